"""A multi-token-prediction head: a stack of its own, which starts and ends with its one layer."""

from __future__ import annotations

from stacks import reference
from stacks.decoders import DraftModel
from stacks.show import CONFIG, compare

from boundary import Topology


def want(hidden_states):
    return reference.draft(CONFIG, hidden_states, hidden_states.flip(-1))


def call(model, ids, batch, parallel):
    """The target's hidden state is stood in for by the reversed embedding; padding rows hold anything."""
    return model(ids, model.embed[ids].flip(-1), batch)


def main() -> None:
    compare("tensor parallel", Topology(attention_tp=2), DraftModel, want, call=call)
    compare("attention data parallel", Topology(attention_dp=2), DraftModel, want, call=call)


if __name__ == "__main__":
    main()
