"""What the bracket costs on SmolLM2 at 3 ranks, next to nnsight's own `TPFragments` and to the bare collectives.

    python -m tests.benchmarks.bracket [--rounds N]

Every figure is a ratio of medians of interleaved runs on the same ranks; absolute times on shared machines mean
nothing. Nothing is printed for a comparison whose two sides did not compute the same value.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

import interleave
from boundary.collectives import record
from interleave import nnsight_port as port
from runtimes.transformers.smollm2 import smollm2
from tests.pool import Pool, World

IDS = torch.arange(100, 132)[None]


def timed(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median seconds of each side, one after the other in every round, all ranks together."""
    return {name: statistics.median(series) for name, series in series_of(sides, rounds).items()}


def series_of(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each side in every round."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, side in sides.items():
                dist.barrier()
                start = time.perf_counter()
                side()
                times[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return times


def models(world: World, path: str) -> tuple[Any, Any]:
    """The model twice: under this package, and under nnsight alone."""

    def load() -> tuple[Any, Any]:
        from nnsight.modeling.transformers import TransformersModel
        from transformers.distributed.configuration_utils import DistributedConfig

        ours = interleave.load(path, tp=world.size, dtype="float32")
        theirs = TransformersModel(
            path,
            task="text-generation",
            dispatch=True,
            dtype=torch.float32,
            distributed_config=DistributedConfig(tp_size=world.size),
        )
        return ours, theirs

    return world.keep("models", load)


def read_all(model: Any) -> list[torch.Tensor]:
    with model.trace(IDS):
        values = port.save([])
        for layer in model.model.layers:
            values.append(layer.mlp.down_proj.input)
    return values


def read_none(model: Any) -> Any:
    with model.trace(IDS):
        out = model.lm_head.output.save()
    return out


def reading(world: World, path: str, rounds: int) -> dict[str, float]:
    """Reading `down_proj.input` in all layers: what each side adds to its own trace."""
    ours, theirs = models(world, path)
    with torch.no_grad():
        for a, b in zip(read_all(ours), read_all(theirs), strict=True):
            assert torch.equal(a, b), "the two sides read different values"
        with record() as events:
            read_all(ours)
        assert len(events) == 30, f"{len(events)} exchanges for 30 reads"
        times = series_of(
            {
                "ours": lambda: read_all(ours),
                "ours, nothing read": lambda: read_none(ours),
                "nnsight": lambda: read_all(theirs),
                "nnsight, nothing read": lambda: read_none(theirs),
            },
            rounds,
        )

    def added(side: str) -> float:
        pairs = zip(times[side], times[f"{side}, nothing read"], strict=True)
        return statistics.median(reading - plain for reading, plain in pairs)

    return {"added by ours / added by nnsight": added("ours") / added("nnsight")}


def round_trip(world: World, path: str, rounds: int) -> dict[str, float]:
    """One piece read and put back: against the bare exchange with its copies, and against DTensor."""
    ours, _ = models(world, path)
    fragments = ours.interleaver.fragments
    location = "model.model.layers.0.mlp.gate_proj.output"
    mesh = ours.model.layers[0].mlp.gate_proj._module.weight.device_mesh
    width = fragments.tree[location].layout.widths[world.rank]
    found = {}
    for rows in (1, 8, 32, 256):
        piece = torch.randn(1, rows, width, generator=torch.Generator().manual_seed(world.rank))
        start = width * world.rank

        def bracket(piece: torch.Tensor = piece) -> tuple[torch.Tensor, torch.Tensor]:
            whole, undo = fragments.whole(location, piece)
            return whole, undo(whole)  # type: ignore[misc]

        def edited(piece: torch.Tensor = piece) -> tuple[torch.Tensor, torch.Tensor]:
            whole, undo = fragments.whole(location, piece)
            whole[..., 0] = 1.0
            return whole, undo(whole)  # type: ignore[misc]

        def direct(piece: torch.Tensor = piece, start: int = start) -> tuple[torch.Tensor, torch.Tensor]:
            pieces = [torch.empty_like(piece) for _ in range(world.size)]
            dist.all_gather(pieces, piece)
            whole = torch.cat(pieces, -1)
            return whole, whole.narrow(-1, start, width).clone()

        def dtensor(piece: torch.Tensor = piece) -> tuple[torch.Tensor, torch.Tensor]:
            whole = DTensor.from_local(piece, mesh, [ShardPlacement(-1)], run_check=False).full_tensor()
            back = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
            return whole, back.redistribute(placements=[ShardPlacement(-1)]).to_local()

        for side in (bracket, direct, dtensor):
            whole, back = side()
            assert torch.equal(back, piece), side.__name__
            assert torch.equal(whole, direct()[0]), side.__name__
        with torch.no_grad():
            medians = timed({"bracket": bracket, "edited": edited, "direct": direct, "dtensor": dtensor}, rounds * 20)
        size = f"{piece.nbytes * world.size / 1024:.0f} KiB"
        found[f"{size}: read and put back / direct collective"] = medians["bracket"] / medians["direct"]
        found[f"{size}: read, edited, put back / direct collective"] = medians["edited"] / medians["direct"]
        found[f"{size}: DTensor round trip / ours"] = medians["dtensor"] / medians["bracket"]
    return found


def idle(world: World, path: str, rounds: int) -> dict[str, float]:
    """Visits that nobody waits for, and a trace that reads nothing, next to nnsight's and to the bare forward."""
    ours, theirs = models(world, path)
    location = "model.model.layers.0.mlp.gate_proj.output"
    value = torch.zeros(1, 32, 512)
    visits = 2000

    def visit(interleaver: Any) -> Callable[[], None]:
        def run() -> None:
            for _ in range(visits):
                interleaver.handle(location, value)

        return run

    assert ours.interleaver.handle(location, value) is value
    with torch.no_grad():
        per_visit = timed({"ours": visit(ours.interleaver), "nnsight": visit(theirs.interleaver)}, rounds * 2)
        plain = ours._module
        assert torch.equal(read_none(ours), plain(IDS).logits), "a trace changed the logits"
        whole = timed({"trace": lambda: read_none(ours), "forward": lambda: plain(IDS)}, rounds * 2)
    return {
        "idle visit / nnsight's idle visit": per_visit["ours"] / per_visit["nnsight"],
        "trace that reads only a whole / bare forward": whole["trace"] / whole["forward"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    path = str(Path(smollm2()))
    pool = Pool(3)
    try:
        for part in (reading, round_trip, idle):
            results = pool.run(part, path, rounds, timeout=600)
            # A collective ends when its slowest rank does, so the worst rank's ratio is the honest one.
            for name in results[0]:
                values = [result[name] for result in results]
                worst = min(values) if name.endswith("/ ours") else max(values)
                print(f"{name:70} {worst:8.2f}")
    finally:
        pool.close()


if __name__ == "__main__":
    from tests.benchmarks import bracket  # the ranks import the functions by this module's own name

    bracket.main()
