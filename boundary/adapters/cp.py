"""Context parallelism: dealing out the tokens of requests over ranks, and putting them back in order.

Boundaries move context-parallel rows as cells in rank order, which is all that an FFN needs: it acts on each
row alone. Compute that needs *token* order (a scan, say) asks for it by name. Dealing out and putting back
come as a pair from one :class:`TokenDeal`, so they cannot assume different orders.

Two orders: *interleaved* gives rank `r` every `degree`-th token; *zigzag* cuts each request into `2 * degree`
blocks and gives rank `r` the blocks `r` and `2 * degree - 1 - r`, which evens out causal attention's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..collectives import Group
from ..kernels.rows import gather_rows
from ..layout import PaddingMode, RowFacts


@dataclass(frozen=True)
class TokenDeal:
    """Which tokens each context-parallel rank has.

    Attributes:
        tokens: For each rank the indices of its tokens, in the order in which it holds them.
        padded: How many rows each rank's tensors have.
    """

    tokens: tuple[tuple[int, ...], ...]
    padded: tuple[int, ...]

    def __post_init__(self) -> None:
        dealt = sorted(token for tokens in self.tokens for token in tokens)
        if dealt != list(range(len(dealt))):
            raise ValueError("every token is dealt to exactly one rank")
        if any(len(tokens) > rows for tokens, rows in zip(self.tokens, self.padded, strict=True)):
            raise ValueError(f"padded counts {self.padded} are less than the tokens dealt")

    @property
    def live(self) -> tuple[int, ...]:
        return tuple(map(len, self.tokens))

    def shard(self, value: Tensor, rank: int) -> Tensor:
        """The rows of `rank` out of all rows in token order, padded with zeros."""
        tokens = self.tokens[rank]
        if tokens and max(tokens) >= value.shape[0]:
            raise IndexError(f"token {max(tokens)} is dealt to rank {rank}, of {value.shape[0]} rows in token order")
        padding = [-1] * (self.padded[rank] - len(tokens))
        return gather_rows(value, torch.tensor([*tokens, *padding], dtype=torch.long, device=value.device))

    @cached_property
    def _order(self) -> list[int]:
        """For each token its row among all ranks' padded rows."""
        starts = [sum(self.padded[:rank]) for rank in range(len(self.padded))]
        rows = {
            token: starts[rank] + row for rank, tokens in enumerate(self.tokens) for row, token in enumerate(tokens)
        }
        return [rows[token] for token in range(len(rows))]

    def in_token_order(self, cells: Tensor) -> Tensor:
        """All rows in token order, out of the ranks' padded rows side by side; padding is left behind."""
        return cells[torch.tensor(self._order, dtype=torch.long, device=cells.device)]

    def gather(self, part: Tensor, group: Group) -> Tensor:
        """All rows in token order on every rank of the context-parallel group, which all call this."""
        shapes = [(rows, *part.shape[1:]) for rows in self.padded]
        return self.in_token_order(torch.cat(group.all_gather(part, shapes, "gather in token order")))

    def take_back(self, value: Tensor, group: Group) -> Tensor:
        """This rank's rows of an output that is in token order: the inverse of `gather`. Local."""
        return self.shard(value, group.rank)


def interleaved(lengths: Sequence[int], degree: int) -> TokenDeal | None:
    """Every `degree`-th token to each rank; all ranks have as many rows. None where a request is too short to
    deal out.
    """
    total = sum(lengths)
    if not _long_enough(lengths, degree):
        return None
    rows = -(-total // degree)
    return TokenDeal(tuple(tuple(range(rank, total, degree)) for rank in range(degree)), (rows,) * degree)


def zigzag(lengths: Sequence[int], degree: int) -> TokenDeal | None:
    """Blocks from both ends of every request; a remainder makes its first blocks longer by one. None as
    above.
    """
    if not _long_enough(lengths, degree):
        return None
    dealt: list[list[int]] = [[] for _ in range(degree)]
    start = 0
    for length in lengths:
        base, extra = divmod(length, 2 * degree)
        sizes = [base + (block < extra) for block in range(2 * degree)]
        edges = [start + sum(sizes[:block]) for block in range(2 * degree + 1)]
        for rank in range(degree):
            for block in (rank, 2 * degree - 1 - rank):
                dealt[rank].extend(range(edges[block], edges[block + 1]))
        start += length
    rows = max(map(len, dealt))
    return TokenDeal(tuple(map(tuple, dealt)), (rows,) * degree)


def _long_enough(lengths: Sequence[int], degree: int) -> bool:
    return bool(lengths) and min(lengths) >= 2 * degree


def deal_facts(deals: Sequence[TokenDeal]) -> RowFacts:
    """The row counts of a context-parallel batch: one deal for each attention-DP rank."""
    padding = PaddingMode.MAX_LEN if len({deal.padded for deal in deals}) == 1 else PaddingMode.SUM_LEN
    return RowFacts(tuple(deal.padded for deal in deals), tuple(deal.live for deal in deals), padding)
