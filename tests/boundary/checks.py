"""What the tests of single stages share: bound stages on every rank, and steps through them."""

from __future__ import annotations

import torch
from stacks.weights import DTYPE, GridNorm, weight
from stacks.worlds import batch_of, build, on_threads

from boundary import Topology, declare_attn, declare_ffn, get_forward, make_stages
from boundary.collectives import record
from boundary.residual import batch as residual_batch

HIDDEN = 8


def rows_of(name, count):
    """`count` rows called `name`, on the grid."""
    return weight(name, count, HIDDEN)


def norm(name="norm"):
    return GridNorm(name, HIDDEN)


def term_of(whole, group, seed=0):
    """This rank's term of `whole`: terms differ on every rank and add up exactly."""
    generator = torch.Generator().manual_seed(seed)
    terms = torch.randint(-8, 9, (group.size, *whole.shape), generator=generator).to(DTYPE) / 4
    terms[-1] = whole - terms[:-1].sum(0)
    return terms[group.rank]


def on_ranks(rank_main, *, tokens=(4,), padding=None, runtime=None, batch_options=None, **topology):
    """`rank_main(parallel, batch, make)` on each rank, and the exchanges; `make(*items)` binds stages."""

    def play(parallel):
        _, batch = batch_of(parallel, list(tokens), padding, **(batch_options or {}))
        made = lambda *items, **options: build(  # noqa: E731
            parallel, lambda: make_stages(*items, **options), **(runtime or {})
        )
        return rank_main(parallel, batch, made)

    with record() as events:
        results = on_threads(Topology(**topology), play)
    return results, [event for event in events if event.key != "row counts"]


def layer(make, *, attn=None, ffn=None, previous=None, terminal=False, options=None):
    """An attention and an FFN stage."""
    options = options or {}
    return make(
        (attn or declare_attn(), norm("attn"), options),
        (ffn or declare_ffn(), norm("ffn"), options),
        previous=previous,
        terminal=terminal,
    )


def enter(boundary, batch, hidden):
    residual_batch.start(batch)
    return boundary.prepare(hidden, batch)


def run_ffn(boundary, batch, whole, group, *, seed=0):
    """An FFN whose output is `whole` on its rows: it sums its terms unless the exit's flags say not to."""
    with boundary.exit(batch) as output:
        value = term_of(whole, group, seed)
        if not get_forward().skips_reduction and value.shape[0]:
            value = group.all_reduce(value, "compute sums")
    return output.finish(value)


def ops(events, rank=0):
    """What one rank of each group ran: the collectives' names, in order."""
    return [event.op for event in events if event.rank == rank and event.ranks[0] == 0]
