"""A dense decoder: attention and SwiGLU layers, their sums left to the next input where that is possible."""

from __future__ import annotations

from functools import partial

from stacks import reference
from stacks.decoders import Decoder
from stacks.show import CONFIG, compare

from boundary import Topology

LAYERS = 3


def want(hidden_states):
    return reference.stack("*-" * LAYERS, CONFIG, hidden_states)[0]


def main() -> None:
    make = partial(Decoder, [False] * LAYERS)
    compare("tensor parallel", Topology(attention_tp=4), make, want)
    compare("attention data parallel", Topology(attention_dp=2), make, want, boundary_reduction="rs")
    compare("both", Topology(attention_dp=2, attention_tp=2), make, want, boundary_reduction="rs")


if __name__ == "__main__":
    main()
