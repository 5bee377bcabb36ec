"""The Triton kernels on a GPU: whether they are right there, and what share of the memory's bandwidth they use.

    python -m tests.benchmarks.gpu [--seconds N]

Three parts, of five minutes together at most:

* every kernel against its definition in float64, on odd widths, no rows, rows apart and every dtype. One that is wrong
  is named, and nothing else is run;
* each operation's time in times of a copy of as many bytes as it reads and writes, the operation and the copy in turns,
  each after the caches were flushed, in the median of the rounds. Each is compared with its definition once more
  before it is timed, on the first and the last rows;
* the completion of a sum between GPUs. With one GPU the ranks' memory is all on it, and a rank's launch is timed by
  its parts that move data; whatever passes between GPUs is not measured. With two or more, two ranks run it.

A wait for another rank has no bound, so on one GPU no rank waits: each finds its flag up already (`Ranks.in_turn`).
The exit status is 1 where something was wrong, missed its target or was not run for want of time, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from boundary.collectives import NcclGroup
from boundary.kernels import meeting
from boundary.kernels.add_norm import naive as add_norm_naive
from boundary.kernels.add_norm import triton as add_norm
from boundary.kernels.add_norm_quantize import naive as quantize_naive
from boundary.kernels.add_norm_quantize import triton as quantize
from boundary.kernels.all_reduce_add_norm import all_reduce_add_norm
from boundary.kernels.all_reduce_add_norm import naive as all_reduce_naive
from boundary.kernels.all_reduce_add_norm import triton as all_reduce
from boundary.kernels.mhc import naive as mhc_naive
from boundary.kernels.mhc import triton as mhc
from boundary.kernels.moe_finalize import naive as finalize_naive
from boundary.kernels.moe_finalize import triton as finalize
from boundary.kernels.norms import Kind, NormFormula
from boundary.kernels.reduce_scatter_add_norm import reduce_scatter_add_norm
from boundary.kernels.reduce_scatter_add_norm import triton as reduce_scatter
from boundary.kernels.rows import naive as rows_naive
from boundary.kernels.rows import triton as rows_triton
from boundary.kernels.silu_mul import naive as silu_naive
from boundary.kernels.silu_mul import triton as silu
from boundary.symmetric_memory import PROGRAMS, REGIONS, SLOTS, Workspace, capacity_of, num_bytes, prepare
from tests.benchmarks.kernels import Table
from tests.norms import KINDS, norm_of

T = TypeVar("T")

SECONDS = 280.0
MOST_MEMORY = 100 << 30
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Rows, hidden, and whether rows are apart in memory.
SHAPES = [(0, 7, False), (3, 577, True), (130, 4096, False)]
#: What is timed, each `(rows, hidden)`: norms, other operations, completions; then bytes of terms in one shot and two.
NORMED = [(rows, hidden) for hidden in (4096, 8192) for rows in (4096, 16384, 65536)]
OTHER = (8192, 4096)
COMPLETED = [(8192, 4096), (4096, 8192), (32768, 4096)]
SHOTS, SHOT_HIDDEN = [1 << power for power in range(14, 25)], 4096
PROGRAM_COUNTS = [32, 64, 96, 128, 256]
#: Rows for which the gradients are timed too, at most.
BACKWARD_ROWS = 16384
ROUNDS = 25
#: Bytes that are written to flush the caches: so many that meanwhile the host gets ahead of the GPU.
FLUSH = 1 << 30
#: The most bytes that an operation is compared with a copy of, half of them read and half written.
COPIED = 5 << 30
COPY_TARGET, QUANTIZED_TARGET, FUSED_TARGET = 0.90, 0.85, 1.10
#: What a second meeting is taken to cost; between GPUs, so it is not measured on one.
MEETING_SECONDS = 5e-6
#: Seconds after which ranks that really wait for each other end themselves.
MEETING_LIMIT = 60


class Wrong(Exception):
    """A kernel is not its definition; the message says how."""


# --- Right or wrong -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Inputs of one shape, dtype and layout."""

    device: torch.device
    rows: int
    hidden: int
    dtype: torch.dtype
    apart: bool

    def draw(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.device, dtype or self.dtype)

    def value(self, *between: int, seed: int) -> Tensor:
        """`[rows, *between, hidden]`, with NaN around its rows if they are apart."""
        value = self.draw(self.rows, *between, self.hidden, seed=seed)
        if not self.apart:
            return value
        around = value.new_full((*value.shape[:-1], self.hidden + 5), torch.nan)
        around[..., 3:-2] = value
        return around[..., 3:-2]

    def formula(self, kind: str) -> NormFormula:
        weight, bias = self.draw(self.hidden, seed=11), self.draw(self.hidden, seed=12)
        return norm_of(kind, weight, bias)


def doubled(formula: NormFormula) -> NormFormula:
    weight, bias = (None if one is None else one.double() for one in (formula.weight, formula.bias))
    return replace(formula, weight=weight, bias=bias)


def taken(made: T | None, what: str = "") -> T:
    """What a kernel made, if it did not decline."""
    if made is None:
        raise Wrong(f"{what}: the kernel declined" if what else "the kernel declined")
    return made


def near(found: Tensor | None, right: Tensor, what: str, terms: int = 1) -> None:
    """`found` is `right`, in float64, computed in float32 and rounded once; `terms` of about one were added up."""
    found = taken(found, what)
    if found.shape != right.shape:
        raise Wrong(f"{what}: shape {tuple(found.shape)} instead of {tuple(right.shape)}")
    bound = right.abs() * torch.finfo(found.dtype).eps / 2 + 1e-5 * (right.abs() + terms**0.5)
    off = (found.double() - right).abs()
    if not bool((off <= bound).all()):
        raise Wrong(f"{what}: off by up to {off.max().item():.3g}, values up to {right.abs().max().item():.3g}")


def same(found: Tensor | None, right: Tensor, what: str) -> None:
    found = taken(found, what)
    if found.dtype != right.dtype or not torch.equal(found, right):
        raise Wrong(f"{what}: not the definition's bits")


def check_add_norm(case: Case) -> None:
    value, residual = case.value(seed=1), case.value(seed=2)
    for kind in KINDS:
        formula = case.formula(kind)
        normed, total = taken(add_norm.add_norm(value, residual, formula), kind)
        right, _ = add_norm_naive.add_norm(value.double(), residual.double(), doubled(formula))
        near(normed, right, kind)
        same(total, add_norm_naive.add_norm(value, residual, formula)[1], f"the sum of {kind}")
    formula = case.formula("rms")
    near(add_norm.norm(value, formula), add_norm_naive.norm(value.double(), doubled(formula), torch.float64), "alone")


def check_add_norm_gradients(case: Case) -> None:
    value, residual, given, of_total = (case.value(seed=seed) for seed in range(1, 5))
    for kind in ("gemma", "layer"):
        formula = case.formula(kind)
        leaves = [one.detach().double().requires_grad_() for one in (value, residual)]
        wide = doubled(formula)
        parameters = [one.requires_grad_() for one in (wide.weight, wide.bias) if one is not None]
        made = add_norm_naive.add_norm(leaves[0], leaves[1], wide)
        wanted = torch.autograd.grad(made, [*leaves, *parameters], [given.double(), of_total.double()])
        needed = True, formula.bias is not None
        backs = taken(add_norm.backward(value, residual, formula, given, of_total, needed), kind)
        near(backs[0], wanted[0], f"the sum's gradient of {kind}")
        for what, found, right in zip(("weight", "bias"), backs[1:], wanted[2:], strict=False):
            near(found, right, f"the {what}'s gradient of {kind}", terms=case.rows)


def quantized_dtypes(device: torch.device) -> list[torch.dtype]:
    """Those that the device has instructions for."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
    return [dtype for dtype in quantize_naive.LIMITS if dtype == torch.int8 or not old]


def check_quantized(
    made: tuple[Tensor, ...] | None, normed: Tensor, total: Tensor, scale: Tensor | None, what: str
) -> None:
    """`made` is `normed`, in float64, quantized; and the sum."""
    found, scales, found_total = taken(made, what)
    same(found_total, total, f"the sum of {what}")
    if scale is None:
        wanted = quantize_naive.scale_of(normed.float(), found.dtype)
        if scales.shape != wanted.shape or not torch.allclose(scales, wanted, rtol=1e-5, atol=0.0):
            raise Wrong(f"{what}: the scales are off")
    scaled = (normed / scales).clamp(*quantize_naive.LIMITS[found.dtype])
    step = torch.ones_like(scaled)
    if found.dtype != torch.int8:
        step = torch.exp2(scaled.abs().clamp_min(2.0**-6).log2().floor() - 3)
    if not bool(((found.double() - scaled).abs() <= step / 2 + 1e-5 * (normed.abs() + 1) / scales).all()):
        raise Wrong(f"{what}: not the nearest values")


def check_add_norm_quantize(case: Case) -> None:
    value, residual = case.value(seed=1), case.value(seed=2)
    total = value.float() + residual.float()
    for dtype in quantized_dtypes(case.device):
        for kind, scale in (("rms", None), ("layer", torch.tensor(0.02, device=case.device))):
            formula = case.formula(kind)
            normed = add_norm_naive.norm(value.double() + residual.double(), doubled(formula), torch.float64)
            made = quantize.add_norm_quantize(value, residual, formula, dtype, scale)
            check_quantized(made, normed, total.to(case.dtype), scale, f"{kind} in {str(dtype)[6:]}")


def check_silu_mul(case: Case) -> None:
    gate, up, given = (case.value(seed=seed) for seed in range(1, 4))
    right = silu_naive.silu_mul(gate.double(), up.double())
    near(silu.silu_mul(gate, up), right, "two tensors")
    near(silu.silu_mul_halves(torch.cat([gate, up], dim=-1)), right, "two halves")
    leaves = [one.detach().requires_grad_() for one in (gate, up)]
    found = torch.autograd.grad(silu.silu_mul(*leaves), leaves, given)
    for what, back, wanted in zip(
        ("gate", "up"), found, silu_naive.gradients(gate.double(), up.double(), given.double()), strict=True
    ):
        near(back, wanted, f"the {what}'s gradient")


def check_moe_finalize(case: Case) -> None:
    shared, residual = case.value(seed=1), case.value(seed=2)
    for choices, scaling in ((2, None), (8, 2.5)):
        outputs, weights = case.value(choices, seed=3), case.draw(case.rows, choices, seed=4, dtype=torch.float32)
        wide = outputs.double(), weights.double()
        made = finalize.moe_finalize(outputs, weights, shared, scaling)
        near(made, finalize_naive.moe_finalize(*wide, shared.double(), scaling), f"{choices} choices", choices)
        same(made, finalize_naive.moe_finalize(outputs, weights, shared, scaling), f"{choices} choices")
        formula = case.formula("rms" if scaling else "layer")
        both = finalize.moe_finalize_add_norm(outputs, weights, residual, formula, None, scaling)
        normed, total = taken(both, f"{choices} choices with a norm")
        right, _ = finalize_naive.moe_finalize_add_norm(*wide, residual.double(), doubled(formula), None, scaling)
        near(normed, right, f"the norm of {choices} choices")
        wanted = finalize_naive.moe_finalize_add_norm(outputs, weights, residual, formula, None, scaling)
        same(total, wanted[1], f"the sum of {choices} choices")


def check_rows(case: Case) -> None:
    value = case.value(seed=1)
    # Some are no row's, and some come twice.
    index = torch.arange(case.rows + 3, device=case.device) % (case.rows + 1) - 1
    same(rows_triton.gather_rows(value, index), rows_naive.gather_rows(value, index), "gathered")
    index = index[: case.rows].flip(0) // 2
    near(
        rows_triton.scatter_rows(value, index, case.rows + 1),
        rows_naive.scatter_rows(value.double(), index, case.rows + 1),
        "scattered",
        terms=3,
    )


def check_mhc(case: Case) -> None:
    for streams in (1, 4):
        inputs = (
            case.value(streams, seed=1),
            case.draw(case.rows, streams, streams, seed=2, dtype=torch.float32),
            case.draw(case.rows, streams, seed=3, dtype=torch.float32),
            case.value(seed=4),
        )
        given = case.value(streams, seed=5)
        made = mhc.mix(*inputs)
        same(made, mhc_naive.mix(*inputs), f"{streams} streams")
        wide = [one.double().requires_grad_() for one in inputs]
        right = mhc_naive.mix(*wide)
        near(made, right.detach(), f"{streams} streams", streams + 1)
        wanted = torch.autograd.grad(right, wide, given.double())
        leaves = [one.detach().requires_grad_() for one in inputs]
        found = torch.autograd.grad(taken(mhc.mix(*leaves)), leaves, given)
        names = "streams", "comb", "post", "contribution"
        for what, back, right_back in zip(names, found, wanted, strict=True):
            terms = case.hidden if what in ("comb", "post") else streams + 1
            near(back, right_back, f"the gradient of {what} of {streams}", terms)


class Ranks:
    """The memory of several ranks, all of it on one device."""

    def __init__(self, size: int, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        capacity = capacity_of(rows, hidden, dtype)
        # NaN in every dtype, wherever nothing is written.
        self.memory = [
            torch.full((num_bytes(capacity, size),), 0xFF, dtype=torch.uint8, device=device) for _ in range(size)
        ]
        #: Of each rank, for each program a flag of every rank.
        self.flags = [memory[SLOTS * REGIONS * capacity :].view(torch.int32).view(-1, size) for memory in self.memory]
        for flags in self.flags:
            flags.zero_()
        addresses = [memory.data_ptr() for memory in self.memory]
        self.workspaces = [Workspace.over(addresses, rank, capacity, device, self.memory) for rank in range(size)]

    def play(self, parts: int, terms: list[Tensor], residual: Tensor, formula: NormFormula | None,
             results: list[tuple[Tensor | None, Tensor]], two_shots: bool = False, counts: list[int] | None = None,
             ) -> None:  # fmt: skip
        """Some parts of a call, by one rank after the other. With `counts`, each rank keeps so many of the rows."""
        for rank, (term, workspace, (normed, total)) in enumerate(zip(terms, self.workspaces, results, strict=True)):
            if counts is None:
                all_reduce.launch(term, workspace, residual, formula, normed, total, parts, two_shots)
            else:
                own = residual.split(counts)[rank]
                reduce_scatter.launch(term, counts, workspace, own, formula, normed, total, parts)

    def complete(
        self, terms: list[Tensor], residual: Tensor, formula: NormFormula | None, two_shots: bool = False,
        counts: list[int] | None = None,
    ) -> list[tuple[Tensor | None, Tensor]]:  # fmt: skip
        """One call without its meetings: every rank plays one part of it before any plays the next."""
        results = empty_results(shares(residual, len(terms), counts), formula)
        last = meeting.COLLECT.value | meeting.TAKE_TURNS.value
        for parts in (meeting.COPY.value, meeting.SUM.value, last):
            self.play(parts, terms, residual, formula, results, two_shots, counts)
        return results

    def in_turn(
        self, terms: list[Tensor], residual: Tensor, formula: NormFormula | None, counts: list[int] | None
    ) -> list[tuple[Tensor | None, Tensor]]:
        """One call of two ranks in one shot, its meeting included, of which the second begins when the first has ended.

        The first finds its flag up, as though the second were ahead by its copy, which is made here; raises the
        second's; and so the second need not wait either, and leaves the first's flag up for the next call.
        """
        results = empty_results(shares(residual, 2, counts), formula)
        self.flags[0][:, 1] = 1
        self.play(meeting.COPY.value, terms, residual, formula, results, counts=counts)
        self.play(meeting.EVERYTHING, terms, residual, formula, results, counts=counts)
        return results


def shares(rows: Tensor, size: int, counts: list[int] | None) -> list[Tensor]:
    """What each of `size` ranks keeps: without counts everything."""
    return [rows] * size if counts is None else list(rows.split(counts))


def empty_results(residuals: list[Tensor], formula: NormFormula | None) -> list[tuple[Tensor | None, Tensor]]:
    return [
        (None if formula is None else torch.empty_like(own, memory_format=torch.contiguous_format),
         torch.empty_like(own, memory_format=torch.contiguous_format))
        for own in residuals
    ]  # fmt: skip


def check_completed(
    results: list[tuple[Tensor | None, Tensor]],
    terms: list[Tensor],
    residual: Tensor,
    formula: NormFormula,
    what: str,
    counts: list[int] | None = None,
) -> None:
    """Every rank has the sum of all rows and its norm, or, with `counts`, those of its own."""
    wanted = all_reduce_naive.finish(terms, residual, formula)[1]
    right, _ = all_reduce_naive.finish([term.double() for term in terms], residual.double(), doubled(formula))
    assert right is not None
    every = zip(results, *(shares(one, len(results), counts) for one in (wanted, right)), strict=True)
    for rank, ((normed, total), own, own_right) in enumerate(every):
        same(total, own, f"{what}: the sum of rank {rank}")
        near(normed, own_right, f"{what}: the norm of rank {rank}", len(terms))


def check_all_reduce_add_norm(case: Case) -> None:
    residual, formula = case.value(seed=1), case.formula("layer")
    for size, two_shots in ((2, False), (4, True)):
        ranks = Ranks(size, max(case.rows, 1), case.hidden, case.dtype, case.device)
        if not case.rows:
            if all_reduce.all_reduce_add_norm(residual, ranks.workspaces[0], residual, formula) is not None:
                raise Wrong("no rows: the kernel took them")
            continue
        what = f"{size} ranks in {'two shots' if two_shots else 'one shot'}"
        for call in range(2):
            terms = [case.value(seed=10 * call + rank + 2) for rank in range(size)]
            check_completed(ranks.complete(terms, residual, formula, two_shots), terms, residual, formula, what)


def check_reduce_scatter_add_norm(case: Case) -> None:
    """Each of three ranks keeps its own rows; one keeps none."""
    residual, formula = case.value(seed=1), case.formula("layer")
    ranks = Ranks(3, max(case.rows, 1), case.hidden, case.dtype, case.device)
    counts = [case.rows // 3, 0, case.rows - case.rows // 3]
    if not case.rows:
        if reduce_scatter.reduce_scatter_add_norm(residual, counts, ranks.workspaces[0], residual, formula) is not None:
            raise Wrong("no rows: the kernel took them")
        return
    for call in range(2):
        terms = [case.value(seed=10 * call + rank + 2) for rank in range(3)]
        results = ranks.complete(terms, residual, formula, counts=counts)
        check_completed(results, terms, residual, formula, f"3 ranks that keep {counts} rows", counts)


def alternating(rows: int) -> list[list[int] | None]:
    """What two ranks keep in calls that follow each other: None is an all-reduce. Each kind comes on both slots."""
    return [None, [rows, 0], [rows - rows // 3, rows // 3], None, None, [0, rows]]


def check_meeting(case: Case) -> None:
    """All-reduces and reduce-scatters take turns on one workspace."""
    if not case.rows:
        return
    residual, formula = case.value(seed=1), case.formula("layer")
    ranks = Ranks(2, case.rows, case.hidden, case.dtype, case.device)
    programs = all_reduce.PROGRAMS
    for call, counts in enumerate(alternating(case.rows)):
        terms = [case.value(seed=10 * call + rank + 2) for rank in range(2)]
        results = ranks.in_turn(terms, residual, formula, counts)
        what = f"two ranks that meet and keep {'everything' if counts is None else counts}"
        check_completed(results, terms, residual, formula, what, counts)
        if not bool((ranks.flags[0][:programs, 1] == 1).all()) or bool(ranks.flags[1].any()):
            raise Wrong(f"{what}: flags are not as a call leaves them")


CHECKS: dict[str, Callable[[Case], None]] = {
    "add_norm": check_add_norm,
    "add_norm's gradients": check_add_norm_gradients,
    "add_norm_quantize": check_add_norm_quantize,
    "silu_mul": check_silu_mul,
    "moe_finalize": check_moe_finalize,
    "rows": check_rows,
    "mhc": check_mhc,
    "all_reduce_add_norm": check_all_reduce_add_norm,
    "reduce_scatter_add_norm": check_reduce_scatter_add_norm,
    "the meeting of both": check_meeting,
}


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody has written is full of NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def run_checks(device: torch.device, shapes: list[tuple[int, int, bool]], dtypes: list[torch.dtype]) -> list[str]:
    """What is wrong: the check's name, the case and how. Whatever a case raises is, and the others run, unless the
    device then runs nothing any more.
    """
    wrong = []
    with poisoned():
        for name, check in CHECKS.items():
            for rows, hidden, apart in shapes:
                for dtype in dtypes:
                    try:
                        check(Case(device, rows, hidden, dtype, apart))
                    except Exception as error:
                        layout = ", rows apart" if apart else ""
                        how = textwrap.shorten(str(error), 600)
                        if not isinstance(error, Wrong):
                            how = f"{type(error).__name__}: {how}"
                        wrong.append(f"{name} of [{rows}, {hidden}] {str(dtype)[6:]}{layout}: {how}")
                        if not isinstance(error, Wrong) and not works(device):
                            return [*wrong, "the device runs nothing any more; the checks after that were not made"]
    return wrong


def works(device: torch.device) -> bool:
    """Whether the device still runs anything: after an access to memory that is not there it does not."""
    try:
        return torch.ones(2, device=device).sum().item() == 2
    except Exception:
        return False


# --- How fast -------------------------------------------------------------------------------------------------------


class Bench:
    """Times runs on one device, until the time is over."""

    def __init__(self, device: torch.device, until: float, table: Table) -> None:
        self.device, self.until, self.table = device, until, table
        self._flush = torch.empty(FLUSH, dtype=torch.uint8, device=device)
        self._source, self._target = (torch.empty(COPIED // 2, dtype=torch.uint8, device=device) for _ in range(2))
        self._source.zero_()

    def series(self, sides: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        """The seconds of each side in every round."""
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in sides}
        for side in sides.values():
            side()
        for _ in range(ROUNDS):
            sides = dict(reversed(sides.items()))
            for name, side in sides.items():
                pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self._flush.zero_()
                pair[0].record()
                side()
                pair[1].record()
                events[name].append(pair)
        torch.cuda.synchronize(self.device)
        return {name: [start.elapsed_time(end) / 1e3 for start, end in pairs] for name, pairs in events.items()}

    def of_copy(self, run: Callable[[], object], nbytes: int) -> tuple[float, float]:
        """The share of a copy's bandwidth that `run` has, which reads and writes `nbytes`; and its seconds."""
        half = nbytes // 2
        assert half <= len(self._source)
        source, target = self._source[:half], self._target[:half]
        times = self.series({"copy": lambda: target.copy_(source), "run": run})
        share = statistics.median(a / b for a, b in zip(times["copy"], times["run"], strict=True))
        return share, statistics.median(times["run"])

    def measure(
        self, what: str, run: Callable[[], object], gate: Callable[[], None], nbytes: int, target: float | None = None
    ) -> None:
        """A row of the table, if `gate` raises nothing and there is time."""
        if not self.has_time(what):
            return
        try:
            gate()
        except Wrong as error:
            self.table.missed += 1
            print(f"{what:66}    wrong: {error}", flush=True)
            return
        with torch.no_grad():
            share, seconds = self.of_copy(run, nbytes)
        self.table.row(what, share, target, f"{seconds * 1e6:.0f} us, {nbytes / seconds / 1e12:.2f} TB/s")

    def has_time(self, what: str) -> bool:
        if time.monotonic() < self.until:
            return True
        self.table.missed += 1
        print(f"{what:66}    not run: the time is over", flush=True)
        return False

    def draw(self, *shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self.device, dtype=dtype)


def ends(rows: int) -> list[slice]:
    """The first rows and the last."""
    return [slice(0, min(rows, 32)), slice(max(rows - 32, 0), rows)]


class Norms:
    """The operations of one sum and its norm, and whether they are right on the first and the last rows."""

    def __init__(self, bench: Bench, rows: int, hidden: int) -> None:
        self.rows = rows
        self.value, self.residual = (bench.draw(rows, hidden, seed=seed) for seed in (1, 2))
        self.formula = NormFormula(Kind.RMS, bench.draw(hidden, seed=3), 1e-6)

    def run(self) -> tuple[Tensor, Tensor]:
        return taken(add_norm.add_norm(self.value, self.residual, self.formula))

    def right(self, part: slice) -> tuple[Tensor, Tensor]:
        """The norm in float64, and the sum."""
        value, residual = self.value[part], self.residual[part]
        normed, _ = add_norm_naive.add_norm(value.double(), residual.double(), doubled(self.formula))
        return normed, (value.float() + residual.float()).to(value.dtype)

    def gate(self) -> None:
        normed, total = self.run()
        for part in ends(self.rows):
            right, right_total = self.right(part)
            near(normed[part], right, "the norm")
            same(total[part], right_total, "the sum")

    def quantized(self, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return taken(quantize.add_norm_quantize(self.value, self.residual, self.formula, dtype, scale))

    def gate_quantized(self, dtype: torch.dtype, scale: Tensor | None) -> None:
        found, scales, total = self.quantized(dtype, scale)
        for part in ends(self.rows):
            own = found[part], scales[part] if scale is None else scale, total[part]
            check_quantized(own, *self.right(part), scale, "the norm")

    def backward(self, given: Tensor, of_total: Tensor, of_weight: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return taken(add_norm.backward(self.value, self.residual, self.formula, given, of_total, (of_weight, False)))

    def gate_backward(self, given: Tensor, of_total: Tensor, of_weight: bool) -> None:
        found = self.backward(given, of_total, of_weight)[0]
        for part in ends(self.rows):
            total = (self.value[part].double() + self.residual[part].double()).requires_grad_()
            normed = add_norm_naive.norm(total, doubled(self.formula), torch.float64)
            gradients = [given[part].double(), of_total[part].double()]
            near(found[part], torch.autograd.grad([normed, total], total, gradients)[0], "the gradient")


def norms(bench: Bench) -> None:
    print("add + RMSNorm, its quantized kinds and its gradient / a copy of as many bytes, bfloat16")
    for rows, hidden in NORMED:
        shape = f"[{rows}, {hidden}]"
        if not bench.has_time(f"  norms of {shape}"):
            continue
        of = Norms(bench, rows, hidden)
        unit = of.value.nbytes
        bench.measure(f"  add_norm {shape}", of.run, of.gate, 4 * unit, COPY_TARGET)
        for dtype in quantized_dtypes(bench.device):
            for by, scale in (("row", None), ("tensor", torch.tensor(0.02, device=bench.device))):
                what = f"  add_norm_quantize {shape} {str(dtype)[6:]} by {by}"
                run, gate = partial(of.quantized, dtype, scale), partial(of.gate_quantized, dtype, scale)
                bench.measure(what, run, gate, 3 * unit + of.value.numel(), QUANTIZED_TARGET)
        if rows > BACKWARD_ROWS:
            continue
        given, of_total = bench.draw(rows, hidden, seed=4), bench.draw(rows, hidden, seed=5)
        for what, of_weight in (("backward", False), ("backward with the weight's", True)):
            run = partial(of.backward, given, of_total, of_weight)
            gate = partial(of.gate_backward, given, of_total, of_weight)
            bench.measure(f"  add_norm {what} {shape}", run, gate, 5 * unit)


def others(bench: Bench) -> None:
    print("other operations / a copy of as many bytes, bfloat16")
    (rows, hidden), choices = OTHER, 8
    value, other = bench.draw(rows, hidden, seed=1), bench.draw(rows, hidden, seed=2)
    formula = NormFormula(Kind.RMS, bench.draw(hidden, seed=3), 1e-6)
    outputs = bench.draw(rows, choices, hidden, seed=4)
    weights = bench.draw(rows, choices, seed=5, dtype=torch.float32)
    streams, comb = outputs[:, :4].contiguous(), bench.draw(rows, 4, 4, seed=6, dtype=torch.float32)
    post = weights[:, :4].contiguous()
    index = torch.randperm(rows, generator=torch.Generator().manual_seed(7)).to(bench.device)
    unit, shape = value.nbytes, f"[{rows}, {hidden}]"

    def add(what: str, run: Callable[[], object], right: Callable[[slice], Tensor], nbytes: int) -> None:
        """`run` makes one tensor of rows, or a tuple that begins with one, of which `right` makes some in float64."""

        def gate() -> None:
            made = run()
            first = made[0] if isinstance(made, tuple) else made
            for part in ends(rows):
                near(first[part] if isinstance(first, Tensor) else None, right(part), "the rows", choices)

        bench.measure(f"  {what} {shape}", run, gate, nbytes)

    def finalized(part: slice) -> Tensor:
        return finalize_naive.moe_finalize(outputs[part].double(), weights[part].double())

    def finalized_norm(part: slice) -> Tensor:
        total = finalized(part) + value[part].double()
        return add_norm_naive.norm(total, doubled(formula), torch.float64)

    def mixed(part: slice) -> Tensor:
        return mhc_naive.mix(*(one[part].double() for one in (streams, comb, post, value)))

    add(
        "silu_mul",
        lambda: silu.silu_mul(value, other),
        lambda part: silu_naive.silu_mul(value[part].double(), other[part].double()),
        3 * unit,
    )
    add(
        f"moe_finalize of {choices}",
        lambda: finalize.moe_finalize(outputs, weights, None, None),
        finalized,
        (choices + 1) * unit,
    )
    add(
        f"moe_finalize_add_norm of {choices}",
        lambda: finalize.moe_finalize_add_norm(outputs, weights, value, formula, None, None),
        finalized_norm,
        (choices + 3) * unit,
    )
    add(
        "gather_rows",
        lambda: rows_triton.gather_rows(value, index),
        lambda part: rows_naive.gather_rows(value.double(), index[part]),
        2 * unit,
    )
    add(
        "scatter_rows",
        lambda: rows_triton.scatter_rows(value, index, rows),
        lambda part: rows_naive.scatter_rows(value.double(), index, rows)[part],
        2 * unit,
    )
    add("mix of 4 streams", lambda: mhc.mix(streams, comb, post, value), mixed, 9 * unit)
    add(
        "collapse of 4 streams",
        lambda: finalize.moe_finalize(streams, post, None, None),
        lambda part: finalize_naive.moe_finalize(streams[part].double(), post[part].double()),
        5 * unit,
    )


class Emulated:
    """One rank's launch of a completion, of ranks that are all on one device: their terms are in their slots."""

    def __init__(self, bench: Bench, size: int, rows: int, hidden: int, counts: list[int] | None = None) -> None:
        self.counts = counts
        self.terms = [bench.draw(rows, hidden, seed=rank) for rank in range(size)]
        self.residual = bench.draw(rows, hidden, seed=20)
        self.formula = NormFormula(Kind.RMS, bench.draw(hidden, seed=21), 1e-6)
        self.ranks = Ranks(size, rows, hidden, self.residual.dtype, bench.device)
        self.results = empty_results(shares(self.residual, size, counts), self.formula)
        self.ranks.play(meeting.COPY.value, self.terms, self.residual, self.formula, self.results, counts=counts)

    def gate(self) -> None:
        self.run(meeting.SUM.value)
        normed, total = self.results[0]
        assert normed is not None
        for part in ends(len(total)):
            terms = [term[part] for term in self.terms]
            check_completed([(normed[part], total[part])], terms, self.residual[part], self.formula, "one rank")

    def run(self, parts: int, two_shots: bool = False, with_norm: bool = True) -> None:
        normed, total = self.results[0]
        formula, normed = (self.formula, normed) if with_norm else (None, None)
        term, workspace = self.terms[0], self.ranks.workspaces[0]
        if self.counts is None:
            all_reduce.launch(term, workspace, self.residual, formula, normed, total, parts, two_shots)
        else:
            own = self.residual[: self.counts[0]]
            reduce_scatter.launch(term, self.counts, workspace, own, formula, normed, total, parts)


def completions(bench: Bench) -> None:
    print("the completion of a sum, all ranks' memory on one device / a copy of as many bytes, bfloat16")
    sum_part = meeting.SUM.value
    for size in (2, 4, 8):
        for rows, hidden in COMPLETED:
            what = f"  {size} terms [{rows}, {hidden}]"
            if not bench.has_time(what):
                continue
            emulated = Emulated(bench, size, rows, hidden)
            unit = emulated.residual.nbytes
            bench.measure(what, lambda e=emulated: e.run(sum_part), emulated.gate, (size + 3) * unit, COPY_TARGET)
            if not bench.has_time(f"{what}, fused / the sum alone"):
                continue
            times = bench.series(
                {"fused": lambda e=emulated: e.run(sum_part), "sum": lambda e=emulated: e.run(sum_part, False, False)}
            )
            ratio = statistics.median(a / b for a, b in zip(times["fused"], times["sum"], strict=True))
            per_byte = ratio * (size + 2) / (size + 3)
            note = f"{ratio:.2f} of its time, for {size + 3} in place of {size + 2} activations"
            bench.table.row(f"{what}, fused / sum, per byte", per_byte, FUSED_TARGET, note, at_most=True)
            what = f"  {size} terms [{rows}, {hidden}], a rank's own rows"
            if not bench.has_time(what):
                continue
            counts = [rows // size] * size
            del emulated
            scattered = Emulated(bench, size, rows, hidden, counts)
            nbytes = (size + 3) * scattered.residual.nbytes // size
            bench.measure(what, lambda e=scattered: e.run(sum_part), scattered.gate, nbytes)
    programs(bench)


def programs(bench: Bench) -> None:
    """How many programs the launch should have; on GPUs that meet, no more than run at once."""
    print(f"the same by the number of programs, which is {PROGRAMS}")
    rows, hidden = COMPLETED[0]
    emulated = Emulated(bench, 8, rows, hidden)
    workspace = emulated.ranks.workspaces[0]
    for count in PROGRAM_COUNTS:
        turns = torch.zeros(count, dtype=torch.int32, device=bench.device)
        emulated.ranks.workspaces[0] = replace(workspace, turns=turns)
        with mock.patch.object(all_reduce, "PROGRAMS", count):
            bench.measure(
                f"  8 terms [{rows}, {hidden}], {count} programs",
                lambda: emulated.run(meeting.SUM.value),
                emulated.gate,
                11 * emulated.residual.nbytes,
            )


def shots(bench: Bench) -> None:
    """From which size on two shots are worth their second meeting."""
    print("microseconds of a rank's copy and sum in one shot and in two, without meetings, bfloat16")
    one_parts = meeting.COPY.value | meeting.SUM.value
    two_parts = one_parts | meeting.COLLECT.value
    for size in (4, 8):
        found: list[tuple[int, float]] = []
        for nbytes in SHOTS:
            if not bench.has_time(f"  {size} ranks, {nbytes >> 10} KiB"):
                return
            emulated = Emulated(bench, size, nbytes // (2 * SHOT_HIDDEN), SHOT_HIDDEN)
            times = bench.series(
                {"one": lambda e=emulated: e.run(one_parts), "two": lambda e=emulated: e.run(two_parts, True)}
            )
            one, two = (statistics.median(times[name]) for name in ("one", "two"))
            found.append((nbytes, one - two - MEETING_SECONDS))
            print(f"  {size} ranks, {nbytes >> 10:6} KiB {one * 1e6:8.1f} {two * 1e6:8.1f}", flush=True)
        best = None
        for nbytes, gain in reversed(found):
            if gain <= 0:
                break
            best = nbytes
        worth = "no size here" if best is None else f"{best} bytes ({best >> 10} KiB)"
        print(
            f"  {size} ranks: TWO_SHOTS from {worth}, if a meeting takes {MEETING_SECONDS * 1e6:g} us and a peer's "
            f"memory is as fast as one's own; it is {all_reduce.TWO_SHOTS}"
        )


# --- Two GPUs -------------------------------------------------------------------------------------------------------


def two_gpus(bench: Bench) -> None:
    """Two processes, each with a GPU of its own, meet in the kernel. Each ends itself if it does not end in time."""
    if torch.cuda.device_count() < 2:
        print(
            "two ranks: not run, there is one GPU. That one waits for the other was not tried, because the kernel's "
            "wait has no bound; `the meeting of both` ran its steps where no rank had to wait"
        )
        return
    if not bench.has_time("two ranks"):
        return
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank_main, args=(rank, f"{folder}/store")) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    if any(rank.exitcode for rank in ranks):
        bench.table.missed += 1
        print(
            f"two ranks: wrong, missed or not ended in {MEETING_LIMIT} s (statuses {[one.exitcode for one in ranks]})"
        )


def _rank_main(rank: int, path: str) -> None:
    faulthandler.dump_traceback_later(MEETING_LIMIT, exit=True)
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.FileStore(path, 2), rank=rank, world_size=2, device_id=device)
    group = NcclGroup(dist.group.WORLD, range(2), 30.0)  # type: ignore[arg-type]
    rows, hidden = 4096, 4096
    prepare(group, rows, hidden, torch.bfloat16)
    table = Table()
    bench = Bench(device, time.monotonic() + MEETING_LIMIT, table)
    formula = NormFormula(Kind.RMS, bench.draw(hidden, seed=21), 1e-6)
    for count in (1, 7, 64, rows):
        terms = [bench.draw(count, hidden, seed=number) for number in range(2)]
        residual = bench.draw(count, hidden, seed=20)
        with torch.no_grad():
            for counts in alternating(count):
                what = f"rank {rank} of two that keep {'everything' if counts is None else counts}"
                if counts is None:
                    made = all_reduce_add_norm(terms[rank], group, residual, formula, "sum")
                    check_completed([made], terms, residual, formula, what)  # type: ignore[list-item]
                else:
                    own = residual.split(counts)[rank]
                    made = reduce_scatter_add_norm(terms[rank], counts, group, own, formula, "scatter")
                    theirs = [term.split(counts)[rank] for term in terms]
                    check_completed([made], theirs, own, formula, what)  # type: ignore[list-item]
            halves = [count - count // 2, count // 2]
            own = residual.split(halves)[rank]
            times = bench.series(
                {
                    "fused": lambda t=terms, r=residual: all_reduce_add_norm(t[rank], group, r, formula, "sum"),
                    "sum": lambda t=terms, r=residual: all_reduce_add_norm(t[rank], group, r, None, "sum"),
                    "scatter": lambda t=terms, r=own, c=halves: reduce_scatter_add_norm(
                        t[rank], c, group, r, formula, "scatter"
                    ),
                }
            )
        ratio = statistics.median(a / b for a, b in zip(times["fused"], times["sum"], strict=True))
        if rank == 0:
            note = f"{statistics.median(times['fused']) * 1e6:.0f} us"
            table.row(f"two ranks [{count}, {hidden}], fused / sum", ratio, FUSED_TARGET, note, at_most=True)
            ratio = statistics.median(a / b for a, b in zip(times["scatter"], times["fused"], strict=True))
            note = f"{statistics.median(times['scatter']) * 1e6:.0f} us"
            table.row(f"two ranks [{count}, {hidden}], own rows / all rows", ratio, None, note)
    dist.destroy_process_group()
    sys.exit(1 if table.missed else 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which no measurement begins")
    seconds = parser.parse_args().seconds
    if not torch.cuda.is_available():
        print("there is no CUDA GPU here, and nothing was checked or measured", file=sys.stderr)
        return 2
    # A kernel that never ends must not keep the GPU.
    faulthandler.dump_traceback_later(seconds + 15, exit=True)
    until = time.monotonic() + seconds
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, MOST_MEMORY / total), device)
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}")
    wrong = run_checks(device, SHAPES, DTYPES)
    if wrong:
        print("wrong:", *wrong, sep="\n  ")
        return 1
    print(f"all {len(CHECKS)} checks are right, after {time.monotonic() - until + seconds:.0f} s")
    table = Table()
    bench = Bench(device, until, table)
    for part in (two_gpus, norms, completions, others, shots):
        part(bench)
        torch.cuda.empty_cache()
    print(table.summary())
    return 1 if table.missed else 0


if __name__ == "__main__":
    from tests.benchmarks import gpu  # the ranks import the functions by this module's own name

    sys.exit(gpu.main())
