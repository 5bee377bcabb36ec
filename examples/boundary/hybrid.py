"""A Nemotron-H-like stack of one-stage layers: recurrent mixers, attention, MLPs and MoEs in any order."""

from __future__ import annotations

from functools import partial

from stacks import reference
from stacks.decoders import HybridDecoder
from stacks.show import CONFIG, compare

from boundary import Topology

PATTERN = "MM-*EM"


def want(hidden_states):
    return reference.stack(PATTERN, CONFIG, hidden_states)[0]


def main() -> None:
    make = partial(HybridDecoder, PATTERN)
    compare("mixers leave their sums to the next stage", Topology(attention_tp=2), make, want)
    compare("but not to a mixer under data parallelism", Topology(attention_dp=2, attention_tp=2), make, want)


if __name__ == "__main__":
    main()
