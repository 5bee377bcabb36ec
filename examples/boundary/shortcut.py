"""A LongCat-like layer: a MoE beside two dense FFNs and an attention, joined at the layer's end."""

from __future__ import annotations

from functools import partial

from stacks import reference
from stacks.decoders import ShortcutDecoder
from stacks.show import CONFIG, compare

from boundary import Topology


def want(hidden_states):
    return reference.shortcut(2, CONFIG, hidden_states)


def main() -> None:
    make = partial(ShortcutDecoder, 2)
    compare("tensor parallel", Topology(attention_tp=2), make, want)
    everywhere = Topology(attention_dp=2, attention_tp=2, moe_ep=4)
    compare("attention DP and an all-to-all", everywhere, make, want, a2a_backend="all_to_all")


if __name__ == "__main__":
    main()
