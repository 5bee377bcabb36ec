"""Two pipeline stages: what crosses is one term per rank of a sum, completed by the stage that receives it."""

from __future__ import annotations

import torch
from stacks import reference
from stacks.decoders import HybridDecoder
from stacks.show import CONFIG, compare
from stacks.weights import DTYPE
from torch import nn

from boundary import Topology
from boundary.runtime import bound_runtime

PATTERN, CUT = "M-*E", 3
"""The cut comes after attention, whose sum is then still owed."""


def want(hidden_states):
    return reference.stack(PATTERN, CONFIG, hidden_states)[0]


def make() -> nn.Module:
    """This pipeline stage's part of the stack."""
    layers = [range(CUT), range(CUT, len(PATTERN))][bound_runtime().parallel.pipeline_rank]
    return HybridDecoder(PATTERN, layers=layers)


def call(model, ids, batch, parallel):
    """The first pipeline stage sends what `to_pp` exports, rank to rank, and the second goes on from there."""
    names = ("hidden_states", "residual")
    if parallel.pipeline_rank == 0:
        sent = model(ids, batch)
    else:
        sent = {name: torch.empty(len(ids), CONFIG.hidden, dtype=DTYPE) for name in names}
    received = {name: parallel.pipeline.broadcast(sent[name], 0, name) for name in names}
    return model(ids, batch, received=received) if parallel.pipeline_rank else sent["hidden_states"]


def main() -> None:
    compare("cut behind attention", Topology(attention_tp=2, pipeline=2), make, want, call=call)


if __name__ == "__main__":
    main()
