"""A MoE decoder with a shared expert: experts over EP and MoE TP, or behind an all-to-all."""

from __future__ import annotations

from functools import partial

from stacks import reference
from stacks.decoders import Decoder
from stacks.show import CONFIG, compare

from boundary import Topology


def want(hidden_states):
    return reference.stack("*-*E*E", CONFIG, hidden_states)[0]


def main() -> None:
    make = partial(Decoder, [False, True, True])
    compare("experts over two ranks, each split in two", Topology(attention_tp=4, moe_ep=2), make, want)
    compare("a replicated shared expert", Topology(attention_tp=2, moe_ep=2), make, want, shared_expert_tp1=True)
    everywhere = Topology(attention_dp=2, attention_tp=2, moe_ep=4)
    compare("an all-to-all on slices of the rows", everywhere, make, want, a2a_backend="all_to_all")


if __name__ == "__main__":
    main()
