"""Run a function on every rank of a topology: as threads of this process, or as processes over gloo."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from boundary import ForwardBatch, ForwardMode, PaddingMode, Runtime, Topology, bind, exchange_batch
from boundary.collectives import CollectiveError
from boundary.parallel import Parallel, ThreadWorld, from_torch_distributed

T = TypeVar("T")
PADDING_ID = 31
"""The token whose embedding fills padding rows in the examples: large, so that a leak shows."""


def on_threads(topology: Topology, rank_main: Callable[[Parallel], T], limit: float = 20.0) -> list[T]:
    """`rank_main(parallel)` on one thread per rank; what each returned, by rank. The first own error is
    raised.
    """
    world = ThreadWorld(topology, limit)
    results: dict[int, T] = {}
    errors: list[tuple[int, BaseException]] = []

    def play(rank: int) -> None:
        try:
            with torch.no_grad():
                results[rank] = rank_main(world.join(rank))
        except BaseException as error:
            errors.append((rank, error))
            world.abort(f"rank {rank} raised {error!r}")

    threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(world.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * limit)
    if errors:
        rank, error = min(errors, key=lambda entry: isinstance(entry[1], CollectiveError))
        error.add_note(f"on rank {rank} of {world.size}")
        raise error
    assert len(results) == world.size, f"only ranks {sorted(results)} of {world.size} returned"
    return [results[rank] for rank in range(world.size)]


def on_processes(topology: Topology, rank_main: Callable[..., Any], *args: Any, limit: float = 60.0) -> list[Any]:
    """`rank_main(parallel, *args)` on one gloo process per rank. The function is importable by name."""
    world = topology.tp * topology.pipeline
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (topology, rank_main, args, folder, limit), nprocs=world)  # type: ignore[attr-defined]
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]


def _process(
    rank: int,
    topology: Topology,
    rank_main: Callable[..., Any],
    args: tuple[Any, ...],
    folder: str,
    limit: float,
) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    world = topology.tp * topology.pipeline
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        with torch.no_grad():
            result = rank_main(from_torch_distributed(topology, limit), *args)
        torch.save(result, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def tokens_of(dp_rank: int, count: int) -> Tensor:
    """The ids of one attention-DP rank's tokens."""
    return torch.arange(count) * 7 % 29 + dp_rank


def batch_of(
    parallel: Parallel, tokens: list[int], padding: PaddingMode | None = None, **options: Any
) -> tuple[Tensor, ForwardBatch]:
    """This rank's ids, padded, and the batch, where attention-DP rank `d` has `tokens[d]` tokens."""
    own = tokens[parallel.at.dp]
    mode = ForwardMode.EXTEND if own else ForwardMode.IDLE
    batch = exchange_batch(parallel, own, mode, padding=padding, **options)
    rows, _ = batch.rows.cell(parallel.at)
    ids = torch.full((rows,), PADDING_ID)
    ids[:own] = tokens_of(parallel.at.dp, own)
    return ids, batch


def build(parallel: Parallel, make: Callable[[], T], **options: Any) -> T:
    """`make()` bound to a runtime of these options."""
    with bind(Runtime(parallel, **{"boundary_reduction": "ar", **options})):
        return make()
