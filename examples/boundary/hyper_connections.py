"""A decoder whose residual has several streams, mixed by coefficients that each read computes (MHC)."""

from __future__ import annotations

from functools import partial

from stacks import reference
from stacks.decoders import HyperConnectedDecoder
from stacks.show import CONFIG, compare

from boundary import Topology


def want(hidden_states):
    return reference.hyper_connected("*-*E", CONFIG, hidden_states)


def main() -> None:
    make = partial(HyperConnectedDecoder, [False, True])
    compare("tensor parallel", Topology(attention_tp=2), make, want)
    compare("attention DP: read, then gather", Topology(attention_dp=2, attention_tp=2), make, want)


if __name__ == "__main__":
    main()
