"""What the example scripts share: run a stack on every rank, compare with one process, say what was exchanged."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from boundary import PaddingMode, Topology
from boundary.collectives import record
from boundary.parallel import Parallel

from .weights import Config
from .worlds import batch_of, build, on_processes, on_threads, tokens_of

CONFIG = Config()
TOKENS = [5, 2]


def embedded(dp_rank: int, count: int) -> Tensor:
    from .parts import embedding

    return embedding(CONFIG)[tokens_of(dp_rank, count)]


def forward(
    parallel: Parallel, make: Callable[[], nn.Module], options: dict[str, Any], call: Callable[..., Tensor] | None
) -> tuple[Tensor, Counter[str]]:
    """Build and run on one rank: its live rows of the result, and the collectives it ran."""
    model = build(parallel, make, **options)
    ids, batch = batch_of(parallel, TOKENS[: parallel.topology.attention_dp], PaddingMode.MAX_LEN)
    with record() as events:
        output = model(ids, batch) if call is None else call(model, ids, batch, parallel)
    own = parallel.rank + parallel.pipeline_rank * parallel.topology.tp
    ran = Counter(event.op for event in events if event.ranks[event.rank] == own)
    return output[: batch.rows.cell(parallel.at)[1]], ran


def compare(
    title: str,
    topology: Topology,
    make: Callable[[], nn.Module],
    want: Callable[[Tensor], Tensor],
    *,
    call: Callable[..., Tensor] | None = None,
    **options: Any,
) -> None:
    """Raise unless every rank equals one process, bit for bit; print one line.

    Args:
        title: What the line begins with.
        topology: The ranks: threads of this process, or with `--processes` on the command line processes over gloo.
        make: Builds the stack; importable by name, for processes.
        want: What one process computes for the embedded tokens of one attention-DP rank.
        call: Runs the stack, where that takes more than its ids and batch.
        **options: The runtime's.
    """
    if "--processes" in sys.argv:
        results = on_processes(topology, forward, make, options, call)
    else:
        results = on_threads(topology, lambda parallel: forward(parallel, make, options, call))
    for rank, (output, _) in enumerate(results[-topology.tp :]):
        dp = topology.coordinates(rank).dp
        assert torch.equal(output, want(embedded(dp, TOKENS[dp]))), f"rank {rank} differs from one process"
    ran = ", ".join(f"{count} {op}" for op, count in sorted(results[0][1].items())) or "no collectives"
    print(f"{title:<44} equal on {len(results)} ranks; rank 0 ran {ran}")
