"""What fusing costs and saves on CPUs: shared memory against gloo and eager torch, kernels against copies and torch.

    python -m tests.benchmarks.kernels [--rounds N]

Every figure is the median of the ratios of runs side by side, on the same ranks, one thread each; absolute times on
shared machines mean nothing, and those shown are for orientation. Freed memory stays with the process, on both sides,
as it does with the allocators of servers: the C library's default gives it back, and then most of the time of either
side is the kernel's, handing out zeroed pages. A comparison is shown only if what it times was right in the same
process just before. A figure that misses its target is marked.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from boundary.collectives import TWO_SHOTS, SharedGroup, sum_in_rank_order
from boundary.kernels.add_norm import add_norm
from boundary.kernels.add_norm import naive as add_norm_naive
from boundary.kernels.add_norm_quantize import add_norm_quantize
from boundary.kernels.add_norm_quantize import naive as quantize_naive
from boundary.kernels.all_reduce_add_norm import all_reduce_add_norm
from boundary.kernels.all_reduce_add_norm import naive as all_reduce_naive
from boundary.kernels.moe_finalize import moe_finalize, moe_finalize_add_norm
from boundary.kernels.moe_finalize import naive as finalize_naive
from boundary.kernels.norms import Kind, NormFormula
from boundary.kernels.quantization import Quantization
from boundary.kernels.reduce_scatter_add_norm import naive as reduce_scatter_naive
from boundary.kernels.reduce_scatter_add_norm import reduce_scatter_add_norm
from boundary.kernels.rows import gather_rows, scatter_rows
from boundary.kernels.rows import naive as rows_naive
from boundary.shared_memory import SharedMemory
from tests.pool import Pool, World

DECODE = [(1, 576), (8, 576), (64, 576)]
PREFILL = (256, 2048)
FUSED = "sum, residual and norm"
SHAPES = [DECODE[0], DECODE[2], PREFILL]
#: Bytes of an all-reduce, and how many times faster than gloo it is to be.
SIZES = [(4 << 10, 20.0), (64 << 10, 20.0), (1 << 20, 5.0)]


def keep_memory() -> None:
    """Let freed memory stay with this process."""
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_threshold = -1, -3
    # The first is the most that it takes.
    assert libc.mallopt(m_mmap_threshold, 32 << 20) == 1
    assert libc.mallopt(m_trim_threshold, 1 << 30) == 1


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def series(sides: dict[str, Callable[[], Any]], rounds: int, calls: int, gather: Callable[[], Any]) -> dict[str, list]:
    """The seconds of one call of each side in every round, `calls` of them in a row; all ranks start together."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            sides = dict(reversed(sides.items()))
            for name, side in sides.items():
                gather()
                side()
                start = time.perf_counter()
                for _ in range(calls):
                    side()
                times[name].append((time.perf_counter() - start) / calls)
    finally:
        gc.enable()
    return times


def ratio(times: dict[str, list[float]], slow: str, fast: str) -> float:
    """How many times longer the one took, in the median of the rounds."""
    return statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True))


def microseconds(times: dict[str, list[float]], side: str) -> float:
    return statistics.median(times[side]) * 1e6


def calls_for(nbytes: int) -> int:
    """How many calls make a run that is long next to its beginning."""
    return 20 if nbytes <= 256 << 10 else 3


def group_of(world: World) -> SharedGroup:
    def connect() -> SharedGroup:
        store = dist.PrefixStore("benchmark", dist.distributed_c10d._get_default_store())
        return SharedGroup(SharedMemory.connect(store, world.rank, world.size, 20.0), range(world.size), 20.0)

    torch.set_num_threads(1)
    keep_memory()
    return world.keep("shared", connect)


def fused(
    world: World, shape: tuple[int, int], rounds: int, to: torch.dtype | None = None
) -> tuple[float, float, float]:
    """Sum, residual, norm and with `to` quantization in one pass, against gloo's sum and torch's operations after."""
    group = group_of(world)
    rows, hidden = shape
    term, residual = draw(rows, hidden, seed=world.rank), draw(rows, hidden, seed=8)
    weight = draw(hidden, seed=9)
    formula = NormFormula(Kind.RMS, weight, 1e-6)
    form = None if to is None else Quantization(to)
    buffer = torch.empty_like(term)

    def ours() -> Any:
        return all_reduce_add_norm(term, group, residual, formula, "fused", form)

    def theirs() -> tuple[Any, Tensor]:
        # gloo sums in place, and the term must not be lost.
        buffer.copy_(term)
        dist.all_reduce(buffer)
        total = buffer + residual
        normed = torch.nn.functional.rms_norm(total, (hidden,), weight, 1e-6)
        return normed if form is None else form(normed), total

    with torch.no_grad():
        made, eager = ours(), theirs()
        wanted = all_reduce_naive.all_reduce_add_norm(term, group, residual, formula, "wanted")
        right = wanted[0]
        assert right is not None
        assert torch.equal(made[1], wanted[1]), "the sum is not the definition's"
        for one in made[0], eager[0]:
            # A quantized element is off by half a step at most, of which there are 127 to a row's largest.
            value, step = (one, 0.0) if form is None else (one[0].float() * one[1], 0.51 * one[1])
            assert ((value - right).abs() <= 1e-4 * right.abs() + 1e-5 + step).all(), "the norm is not the definition's"
        times = series(
            {"gloo": theirs, "ours": ours},
            rounds,
            calls_for(term.nbytes),
            lambda: group.all_reduce(weight[:1], "start"),
        )
    return ratio(times, "gloo", "ours"), microseconds(times, "ours"), microseconds(times, "gloo")


def all_reduce(world: World, nbytes: int, dtype: torch.dtype, rounds: int) -> tuple[float, float, float]:
    group = group_of(world)
    term = draw(nbytes // dtype.itemsize, seed=world.rank, dtype=dtype)
    buffer = torch.empty_like(term)

    def ours() -> Tensor:
        return group.all_reduce(term, "sum")

    def theirs() -> Tensor:
        buffer.copy_(term)
        dist.all_reduce(buffer)
        return buffer

    assert torch.equal(ours(), sum_in_rank_order(group.all_gather(term, key="terms"))), (
        "the sum is not the definition's"
    )
    times = series(
        {"gloo": theirs, "ours": ours}, rounds, calls_for(nbytes), lambda: group.all_reduce(term[:1], "start")
    )
    return ratio(times, "gloo", "ours"), microseconds(times, "ours"), microseconds(times, "gloo")


def alone(shape: tuple[int, int], dtype: torch.dtype, rounds: int) -> tuple[float, float, dict[str, float]]:
    """Add and norm in one process, and torch's operations, in copies of the same bytes: both tensors, to new ones."""
    torch.set_num_threads(1)
    keep_memory()
    rows, hidden = shape
    value, residual, weight = draw(rows, hidden, seed=1), draw(rows, hidden, seed=2), draw(hidden, seed=3)
    value, residual, weight = (tensor.to(dtype) for tensor in (value, residual, weight))
    formula = NormFormula(Kind.RMS, weight, 1e-6)

    def ours() -> tuple[Tensor, Tensor]:
        return add_norm(value, residual, formula)

    def copies() -> tuple[Tensor, Tensor]:
        return value.clone(), residual.clone()

    def eager() -> tuple[Tensor, Tensor]:
        total = (value + residual).float()
        normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
        return weight * normed.to(dtype), total.to(dtype)

    with torch.no_grad():
        made, wanted = ours(), add_norm_naive.add_norm(value, residual, formula)
        assert torch.equal(made[1], wanted[1])
        assert torch.allclose(
            made[0].float(), wanted[0].float(), rtol=2**-7 if dtype.itemsize == 2 else 1e-5, atol=1e-6
        )
        times = series({"copies": copies, "ours": ours}, rounds, 3, lambda: None)
        slow = series({"copies": copies, "eager": eager}, rounds, 3, lambda: None)
    shown = {name: microseconds(times, name) for name in times} | {"eager": microseconds(slow, "eager")}
    return ratio(times, "ours", "copies"), ratio(slow, "eager", "copies"), shown


def against_torch(shape: tuple[int, int], dtype: torch.dtype, rounds: int) -> dict[str, tuple[float, float, float]]:
    """The library's paths in one process, against their definitions in torch's operations."""
    torch.set_num_threads(1)
    keep_memory()
    rows, hidden = shape
    value, residual, shared = (draw(rows, hidden, seed=seed, dtype=dtype) for seed in range(3))
    formula = NormFormula(Kind.RMS, draw(hidden, seed=3, dtype=dtype), 1e-6)
    index = torch.randint(-1, rows, (rows,), generator=torch.Generator().manual_seed(4))
    sides: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "gather_rows": (lambda: gather_rows(value, index), lambda: rows_naive.gather_rows(value, index)),
        "scatter_rows": (
            lambda: scatter_rows(value, index, rows),
            lambda: rows_naive.scatter_rows(value, index, rows),
        ),
    }
    for choices in (4, 8):
        outputs, weights = draw(rows, choices, hidden, seed=5, dtype=dtype), draw(rows, choices, seed=6)
        sides[f"moe_finalize of {choices}"] = (
            lambda outputs=outputs, weights=weights: moe_finalize(outputs, weights, shared, 2.5),
            lambda outputs=outputs, weights=weights: finalize_naive.moe_finalize(outputs, weights, shared, 2.5),
        )
        sides[f"moe_finalize_add_norm of {choices}"] = (
            lambda outputs=outputs, weights=weights: moe_finalize_add_norm(outputs, weights, residual, formula),
            lambda outputs=outputs, weights=weights: finalize_naive.moe_finalize_add_norm(
                outputs, weights, residual, formula
            ),
        )
    for quantized in (torch.int8, torch.float8_e4m3fn):
        for what, scale in (("row", None), ("tensor", torch.tensor(0.05))):
            sides[f"add_norm_quantize to {str(quantized)[6:]} by {what}"] = (
                lambda to=quantized, scale=scale: add_norm_quantize(value, residual, formula, to, scale),
                lambda to=quantized, scale=scale: quantize_naive.add_norm_quantize(value, residual, formula, to, scale),
            )
    found = {}
    with torch.no_grad():
        for what, (ours, torchs) in sides.items():
            check_equal(what, ours(), torchs())
            times = series({"torch": torchs, "ours": ours}, rounds, calls_for(value.nbytes), lambda: None)
            found[what] = ratio(times, "torch", "ours"), microseconds(times, "ours"), microseconds(times, "torch")
    return found


def check_equal(what: str, made: Any, wanted: Any) -> None:
    """Sums, which come last, are equal to the bit; norms and scales to their last places, integers to one."""
    made, wanted = (results if isinstance(results, tuple) else (results,) for results in (made, wanted))
    assert torch.equal(made[-1], wanted[-1]), f"{what}: the sum is not the definition's"
    for found, right in zip(made[:-1], wanted[:-1], strict=True):
        assert found.dtype == right.dtype and found.shape == right.shape, what
        if found.dtype in quantize_naive.LIMITS:
            other = (found.float() - right.float()).abs() > 0
            assert other.float().mean() < 1e-2, f"{what}: many elements are not the definition's"
            least = 1.0 if found.dtype == torch.int8 else 2.0**-9
            assert torch.allclose(found.float(), right.float(), rtol=2**-3, atol=least), what
        else:
            rtol = 2**-7 if found.dtype.itemsize == 2 else 1e-5
            assert torch.allclose(found.float(), right.float(), rtol=rtol, atol=1e-6), what


def scattered(world: World, shape: tuple[int, int], rounds: int) -> dict[str, tuple[float, float, float]]:
    """Sums over shared memory of which each rank keeps its rows, against those of which each keeps all: alone, and
    fused with residual and norm."""
    group = group_of(world)
    rows, hidden = shape
    counts = [rows // world.size + (rank < rows % world.size) for rank in range(world.size)]
    first = sum(counts[: world.rank])
    term, residual = draw(rows, hidden, seed=world.rank), draw(rows, hidden, seed=8)
    formula = NormFormula(Kind.RMS, draw(hidden, seed=9), 1e-6)
    kept = residual[first : first + counts[world.rank]]
    sides: dict[str, dict[str, Callable[[], Any]]] = {
        "the sum": {
            "all": lambda: group.all_reduce(term, "sum"),
            "own": lambda: group.reduce_scatter(term, counts, "sum"),
        },
        FUSED: {
            "all": lambda: all_reduce_add_norm(term, group, residual, formula, "fused"),
            "own": lambda: reduce_scatter_add_norm(term, counts, group, kept, formula, "fused"),
        },
    }
    with torch.no_grad():
        terms = reduce_scatter_naive.terms_of(term, counts, group, "terms")
        assert torch.equal(sides["the sum"]["own"](), sum_in_rank_order(terms)), "the sum is not the definition's"
        assert torch.equal(sides["the sum"]["all"]()[first : first + len(kept)], sum_in_rank_order(terms))
        wanted = reduce_scatter_naive.finish(terms, kept, formula)
        check_equal("reduce_scatter_add_norm", sides[FUSED]["own"](), wanted)
        of_all = sides[FUSED]["all"]()
        check_equal("all_reduce_add_norm", tuple(one[first : first + len(kept)] for one in of_all), wanted)
        found = {}
        for what, pair in sides.items():
            times = series(pair, rounds, calls_for(term.nbytes), lambda: group.all_reduce(term[:1], "start"))
            found[what] = ratio(times, "all", "own"), microseconds(times, "own"), microseconds(times, "all")
    return found


class Table:
    """Prints figures with their targets, and remembers whether one was missed."""

    def __init__(self) -> None:
        self.missed = 0

    def row(self, what: str, found: float, target: float | None, note: str, *, at_most: bool = False) -> None:
        bound, mark = "", ""
        if target is not None:
            bound = f"{'<=' if at_most else '>='} {target:g}"
            missed = found > target if at_most else found < target
            self.missed += missed
            mark = "missed" if missed else ""
        print(f"{what:66} {found:8.2f}  {bound:7} {mark:7} {note}", flush=True)

    def summary(self) -> str:
        return f"{self.missed} targets missed" if self.missed else "no target missed"


def bytes_moved(shape: tuple[int, int], size: int) -> dict[str, tuple[int, int]]:
    """What rank 0 reads and writes of float32 terms, residuals and results: where it keeps all rows, and its own.

    What it sends is copied, and what it keeps is read of every rank's term. It sends all rows to whoever keeps all, and
    all but its own to those that keep theirs. In two shots it keeps its own, and then copies two results of all rows,
    its own ones to be read, and the others' as it reads them.
    """
    rows, row = shape[0], shape[1] * 4
    own = -(-rows // size)
    found = {}
    for what, others in (("the sum", 1), (FUSED, 3)):
        kept = 2 * (rows - own) + (size + others) * own
        two_shots = what == FUSED and rows * row >= TWO_SHOTS
        found[what] = (kept + 4 * rows if two_shots else (2 + size + others) * rows) * row, kept * row
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    table = Table()

    print("add + RMSNorm in one process / copies of the same bytes")
    for dtype, target in ((torch.float32, 1.5), (torch.bfloat16, None)):
        found, eager, shown = alone(PREFILL, dtype, rounds)
        note = f"{shown['ours']:.0f} us; copies {shown['copies']:.0f} us; torch's operations {eager:.1f} copies"
        table.row(f"  {list(PREFILL)} {str(dtype)[6:]}", found, target, note, at_most=True)

    print("torch's operations / the library's path, in one process")
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            for what, (found, ours, theirs) in against_torch(shape, dtype, rounds).items():
                note = f"{ours:.0f} us; torch {theirs:.0f} us"
                table.row(f"  {what} {list(shape)} {str(dtype)[6:]}", found, 1.0, note)

    for size in (2, 3):
        pool = Pool(size)
        try:
            print(f"gloo and torch's operations / one pass of sum, residual and norm, {size} ranks")
            for shape in (*DECODE, PREFILL):
                # A collective ends when its slowest rank does, so the worst rank's ratio is the honest one.
                found, ours, theirs = min(pool.run(fused, shape, rounds, timeout=300))
                target = 4.0 if shape == PREFILL else 50.0
                table.row(f"  {list(shape)} float32", found, target, f"{ours:.0f} us; gloo {theirs:.0f} us")
                counted, least = bytes_moved(shape, size)[FUSED][0], (size + 3) * shape[0] * shape[1] * 4
                print(
                    f"    bytes moved by rank 0, by construction: {counted}; each term and the residual read once, "
                    f"each result written once: {least}"
                )
            for shape in (*DECODE, PREFILL):
                found, ours, theirs = min(pool.run(fused, shape, rounds, torch.int8, timeout=300))
                table.row(f"  {list(shape)} float32 to int8", found, None, f"{ours:.0f} us; gloo {theirs:.0f} us")
            print(f"gloo's all-reduce / shared memory's, {size} ranks")
            for nbytes, target in SIZES:
                for dtype in (torch.float32, torch.bfloat16):
                    found, ours, theirs = min(pool.run(all_reduce, nbytes, dtype, rounds, timeout=300))
                    goal = target if dtype == torch.float32 else None
                    note = f"{ours:.0f} us; gloo {theirs:.0f} us"
                    table.row(f"  {nbytes >> 10} KiB {str(dtype)[6:]}", found, goal, note)
            print(f"all rows / one rank's rows, over shared memory, {size} ranks")
            for shape in SHAPES[1:]:
                runs = pool.run(scattered, shape, rounds, timeout=300)
                for what, moved in bytes_moved(shape, size).items():
                    found, own, everything = min(run[what] for run in runs)
                    note = f"{own:.0f} us; all rows {everything:.0f} us"
                    table.row(f"  {what} {list(shape)} float32", found, None, note)
                    print(
                        f"    bytes moved by rank 0, by construction: {moved[1]}; of all rows: {moved[0]}, "
                        f"{moved[0] / moved[1]:.2f} times as many"
                    )
        finally:
            pool.close()
    print(table.summary())


if __name__ == "__main__":
    from tests.benchmarks import kernels  # the ranks import the functions by this module's own name

    kernels.main()
