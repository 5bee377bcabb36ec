"""Collectives over named groups of our own: who sends what to whom, under which key, and for how long.

A collective is safe only while all ranks call the same ones in the same order, and code that people write
into a running model breaks that rule. What torch offers answers badly: gloo collectives of equal size pair up
whatever they were meant for and mix values silently, and those of unequal size abort the process. So every
exchange here carries a *key*, and ranks with different keys never exchange a byte: they meet an error within
`limit` seconds.

One primitive does all the work, and a transport is a subclass that supplies it: each rank sends a tensor to each
of its peers, most often the same to all, and receives each peer's into a buffer it has allocated, knowing the
sizes.

* :class:`SharedGroup`: processes of one machine, where there is a C compiler. Memory that they share; it adds up
  and deals out what it sums, and completes a sum together with a residual and a norm.
* :class:`SocketGroup`: processes of one machine. Sockets on which each rank writes and reads by itself;
  measured at a third of the cost of gloo's all-gather or less.
* :class:`GlooGroup`: processes on any machines. Point-to-point messages whose tag hashes the key, the dtype and
  the shape, so that no message is taken for another.
* :class:`NcclGroup`: processes on GPUs, one batch of point-to-point operations.
* :class:`ThreadGroup`: threads of one process, which meet in rounds.

On that primitive stand the collectives, the same for every transport. Sums are taken *in rank order* on
every rank, so that all ranks hold the same bits. Results carry version counters (they are allocated outside
inference mode, whatever mode the caller is in) and no gradient: what the gradient of a collective is depends
on what the value means, which the caller knows.

After an error a group is out of step with its peers and must not be used again before its transport is
replaced. This module stands on torch alone, so that both packages can stand on it.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import accumulate
from math import prod
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from .compiled import NormSpec, QuantizedSpec, dtypes
from .shared_memory import Run, SharedMemory
from .sockets import PeerFailed, Sockets

Shape = Sequence[int]
Messages = Sequence[Tensor | None]
"""One tensor per rank of a group; None for none."""


class CollectiveError(RuntimeError):
    """An exchange with a peer failed: the connection broke, or the peers do not agree.

    Attributes:
        what: What happened.
        group, key: The group's name and the exchange's key.
        peer: The global rank whose message was awaited, where that is known.
    """

    def __init__(self, what: str, group: str, key: str, peer: int | None = None) -> None:
        super().__init__(what, group, key, peer)
        self.what, self.group, self.key, self.peer = what, group, key, peer

    def __str__(self) -> str:
        whom = "" if self.peer is None else f" with rank {self.peer}"
        return f"exchange {self.key!r} of group {self.group!r}{whom}: {self.what}"


class CollectiveTimeout(CollectiveError):
    """A peer did not come to an exchange within the group's limit.

    Attributes:
        seconds: How long was waited.
    """

    def __init__(self, seconds: float, group: str, key: str, peer: int | None = None) -> None:
        super().__init__(f"no answer within {seconds:.1f} s", group, key, peer)
        # What a copy of the error, in another process, is made from.
        self.args = (seconds, group, key, peer)
        self.seconds = seconds


@dataclass(frozen=True)
class Event:
    """One exchange as one rank saw it.

    Attributes:
        op: The collective it served: `all_gather`, `all_reduce`, `reduce_scatter`, `all_to_all`, `broadcast`.
        group, ranks: The group's name and its global ranks.
        rank: The index in the group of the rank that reports.
        nbytes: Bytes this rank sent to all of its peers, plus bytes it received from them.
        key: The exchange's key.
    """

    op: str
    group: str
    ranks: tuple[int, ...]
    rank: int
    nbytes: int
    key: str


_recordings: list[list[Event]] = []
_recordings_lock = threading.Lock()


@contextmanager
def record() -> Iterator[list[Event]]:
    """List the exchanges that any thread of this process runs inside the `with` block.

    No byte leaves a rank through this module without an event.
    """
    events: list[Event] = []
    with _recordings_lock:
        _recordings.append(events)
    try:
        yield events
    finally:
        with _recordings_lock:
            _recordings[:] = [recording for recording in _recordings if recording is not events]


def outside_inference() -> AbstractContextManager[Any]:
    """A context in which new tensors carry version counters, also under `torch.inference_mode`.

    Leaving inference mode turns gradients on, so they are turned off again.
    """
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def fresh(like: Tensor, shape: Shape | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """A new contiguous tensor beside `like`, with a version counter whatever mode the caller is in.

    Its shape and dtype are those of `like`, or those that are given.
    """
    if torch.is_inference_mode_enabled():
        with outside_inference():
            return _new(like, shape, dtype)
    return _new(like, shape, dtype)


def _new(like: Tensor, shape: Shape | None, dtype: torch.dtype | None) -> Tensor:
    if shape is not None:
        return like.new_empty(shape, dtype=dtype or like.dtype)
    if dtype is None and like.is_contiguous():
        return torch.empty_like(like)  # a quarter faster than with more arguments
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def sum_in_rank_order(terms: Sequence[Tensor]) -> Tensor:
    """A new tensor: `terms[0] + terms[1] + ...`; the same bits on every rank that holds the same terms.

    Half precision is accumulated in float32 and rounded once, as one process would have done it.
    """
    first = terms[0]
    with outside_inference(), torch.no_grad():
        half = first.dtype.is_floating_point and first.element_size() < 4
        total = first.to(torch.float32 if half else first.dtype, copy=True)
        for term in terms[1:]:
            total += term
        return total.to(first.dtype)


def side_by_side(dim: int, pieces: Sequence[Tensor], runs: Sequence[Run]) -> Tensor:
    """What the ranks' pieces make up along `dim`: the runs of their columns, one after another."""
    return torch.cat([pieces[run.rank].narrow(dim, run.piece, run.width) for run in runs], dim)


class Group(ABC):
    """A fixed set of ranks that exchange tensors. Every method is called by every rank of the group.

    Attributes:
        name: What errors and events call it.
        ranks: Its members' global ranks, in order.
        rank: This rank's index in `ranks`.
        size: How many members there are.
        limit: Seconds after which waiting for a peer ends in :class:`CollectiveTimeout`.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int, limit: float) -> None:
        if not 0 <= rank < len(ranks):
            raise ValueError(f"rank {rank} is no index into the group's ranks {tuple(ranks)}")
        if limit <= 0:
            raise ValueError(f"limit={limit!r}: a wait needs a positive number of seconds")
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.limit = limit

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, ranks={self.ranks}, rank={self.rank})"

    @abstractmethod
    def _exchange(self, send: Messages, receive: Messages, key: str) -> None:
        """Send `send[peer]` to each peer, and fill `receive[peer]` with what that peer sends.

        All tensors are contiguous and none is empty. `None` stands for nothing to send or to receive, and
        both ends agree on it. Both have one entry per rank; this rank's own is None.
        """

    def _run(self, op: str, send: Tensor | Messages | None, receive: Messages, key: str) -> None:
        """Run the primitive; the one way through which bytes leave and enter, and where they are counted.

        A tensor as `send` goes to every peer.
        """
        send = self._without_own([send] * self.size if send is None or isinstance(send, Tensor) else send)
        receive = self._without_own(receive)
        if _recordings:
            self.note(op, sum(message.nbytes for message in (*send, *receive) if message is not None), key)
        self._exchange(send, receive, key)

    def note(self, op: str, nbytes: int, key: str) -> None:
        """Tell the recordings of an exchange of so many bytes, sent and received."""
        event = Event(op, self.name, self.ranks, self.rank, nbytes, key)
        for recording in tuple(_recordings):
            recording.append(event)

    def _without_own(self, messages: Messages) -> list[Tensor | None]:
        """Nothing for this rank itself, and nothing where there are no bytes."""
        return [
            message if rank != self.rank and message is not None and message.numel() else None
            for rank, message in enumerate(messages)
        ]

    def all_gather(
        self, piece: Tensor, shapes: Sequence[Shape] | None = None, key: str = "", *, op: str = "all_gather"
    ) -> list[Tensor]:
        """Every rank's piece, in rank order.

        Args:
            piece: This rank's. Any strides; one dtype on all ranks.
            shapes: Every rank's shape, where they differ; None says that all are `piece.shape`.
            key: What this exchange is; equal on all ranks.
            op: What events call it.

        Returns:
            New contiguous tensors, but for this rank's own entry, which is `piece` itself, detached.
        """
        own = piece.detach()
        if self.size == 1:
            return [own]
        if shapes is not None and (len(shapes) != self.size or tuple(shapes[self.rank]) != tuple(piece.shape)):
            raise ValueError(
                f"exchange {key!r} of {self!r}: the piece has shape {tuple(piece.shape)}, and the shapes "
                f"given are {[tuple(shape) for shape in shapes]}"
            )
        gathered = [
            own if rank == self.rank else fresh(own, piece.shape if shapes is None else shapes[rank])
            for rank in range(self.size)
        ]
        self._run(op, _on_the_wire(own), list(gathered), key)
        return gathered

    def all_gather_along(
        self,
        dim: int,
        piece: Tensor,
        whole_shape: Shape,
        runs: tuple[Run, ...],
        widths: tuple[int, ...],
        key: str = "",
    ) -> Tensor:
        """What the ranks' pieces make up along one dim: a new contiguous tensor of `whole_shape`.

        Args:
            dim: The dim along which pieces differ; it may be negative.
            piece: This rank's. Any strides; one dtype on all ranks.
            whole_shape: The result's, as that of a tensor.
            runs: Where the whole's columns along `dim` come from, from the first to the last.
            widths: How wide each rank's piece is along `dim`.
            key: What this exchange is; equal on all ranks.

        Raises:
            ValueError: The piece, the runs and the whole do not fit together.
        """
        _check_along(dim, piece.shape, whole_shape, runs, widths, self.rank)
        shapes = None
        if len(set(widths)) > 1:
            shape = list(piece.shape)
            shapes = [(*shape[:dim], width, *shape[dim:][1:]) for width in widths]
        pieces = self.all_gather(piece, shapes, key)
        with torch.no_grad():
            return side_by_side(dim, pieces, runs)

    def all_gather_many(
        self, pieces: Sequence[Tensor], shapes: Sequence[Sequence[Shape] | None] | None = None, key: str = ""
    ) -> list[list[Tensor]]:
        """`all_gather` of many pieces at once: one exchange per dtype, however many pieces.

        Args:
            pieces: This rank's; the same number, with the same dtypes in the same order, on all ranks.
            shapes: For each piece what `all_gather` takes.
            key: What this exchange is.

        Returns:
            For each piece every rank's, in rank order. Peers' are views of one buffer per peer and dtype;
            this rank's own is the piece itself, detached.
        """
        per_piece = list(shapes) if shapes is not None else [None] * len(pieces)
        gathered: list[list[Tensor]] = [[piece.detach()] * self.size for piece in pieces]
        if self.size == 1:
            return gathered
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, piece in enumerate(pieces):
            kinds.setdefault((piece.dtype, piece.device), []).append(index)
        for (dtype, _), indices in kinds.items():
            with outside_inference(), torch.no_grad():
                own = torch.cat([_on_the_wire(pieces[index].detach()).reshape(-1) for index in indices])
            shapes_here = [per_piece[index] or [pieces[index].shape] * self.size for index in indices]
            lengths = [[prod(shape[rank]) for shape in shapes_here] for rank in range(self.size)]
            flat = self.all_gather(own, [[sum(row)] for row in lengths], f"{key}/{dtype}")
            for rank, row in enumerate(lengths):
                if rank == self.rank:
                    continue
                for index, shape, part in zip(indices, shapes_here, flat[rank].split(row), strict=True):
                    gathered[index][rank] = part.view(tuple(shape[rank]))
        return gathered

    def all_reduce(self, term: Tensor, key: str = "") -> Tensor:
        """The sum of every rank's term, in rank order: a new tensor, with the same bits on every rank."""
        return sum_in_rank_order(self.all_gather(term, None, key, op="all_reduce"))

    def reduce_scatter(self, term: Tensor, counts: Sequence[int], key: str = "") -> Tensor:
        """This rank's rows of the sum of every rank's term, in rank order: a new tensor.

        Args:
            term: This rank's, of `sum(counts)` rows (dim 0); one shape and dtype on all ranks.
            counts: How many rows of the sum each rank keeps, in rank order. They may differ, and may be zero.
            key: What this exchange is.
        """
        self._check_counts(term, counts, key)
        parts = term.detach().split(list(counts))
        terms = self.all_to_all(parts, [parts[self.rank].shape] * self.size, key, op="reduce_scatter")
        return sum_in_rank_order(terms)

    def _check_counts(self, term: Tensor, counts: Sequence[int], key: str) -> None:
        if len(counts) != self.size or sum(counts) != term.shape[0] or min(counts) < 0:
            raise ValueError(
                f"exchange {key!r} of {self!r}: {list(counts)} rows for the ranks do not make up the term's "
                f"{term.shape[0]}"
            )

    def all_to_all(
        self, pieces: Sequence[Tensor], shapes: Sequence[Shape], key: str = "", *, op: str = "all_to_all"
    ) -> list[Tensor]:
        """Deal out one piece to each rank, and receive the piece that each rank has for this one, in rank order.

        Args:
            pieces: `pieces[rank]` goes to that rank; one dtype on all ranks.
            shapes: What arrives: the shape of the piece that each rank has for this one.
            key: What this exchange is.
            op: What events call it.

        Returns:
            New contiguous tensors, but for this rank's own entry, which is `pieces[rank]` itself, detached.

        Raises:
            ValueError: Not one piece and one shape per rank, several dtypes, or another shape for this rank's
                own piece than it has. Nothing was sent.
        """
        self._check_dealt(pieces, shapes, key)
        own = pieces[self.rank].detach()
        if self.size == 1:
            return [own]
        received = [own if rank == self.rank else fresh(own, shapes[rank]) for rank in range(self.size)]
        self._run(op, [_on_the_wire(piece.detach()) for piece in pieces], received, key)
        return received

    def _check_dealt(self, pieces: Sequence[Tensor], shapes: Sequence[Shape], key: str) -> None:
        """Refuse, before anything is sent, pieces and shapes of which this rank can see that they do not fit."""
        wrong = None
        if len(pieces) != self.size or len(shapes) != self.size:
            wrong = f"{len(pieces)} pieces and {len(shapes)} shapes are not one for each of {self.size} ranks"
        elif len(dtypes := {piece.dtype for piece in pieces}) != 1:
            wrong = f"the pieces have several dtypes: {sorted(map(str, dtypes))}"
        elif tuple(shapes[self.rank]) != tuple(pieces[self.rank].shape):
            own = tuple(pieces[self.rank].shape)
            wrong = f"this rank's own piece has shape {own}, and the shape given for it is {tuple(shapes[self.rank])}"
        if wrong is not None:
            raise ValueError(f"exchange {key!r} of {self!r}: {wrong}")

    def broadcast(self, value: Tensor, source: int, key: str = "") -> Tensor:
        """The value that the rank with index `source` holds.

        Args:
            value: On the source the value; elsewhere a tensor of its shape, dtype and device, whose content
                is not looked at.
            source: An index into `ranks`.
            key: What this exchange is.

        Returns:
            On the source `value` itself, detached; elsewhere a new contiguous tensor.
        """
        if not 0 <= source < self.size:
            raise ValueError(f"source={source!r} is no index into {self!r}")
        value = value.detach()
        receive: list[Tensor | None] = [None] * self.size
        if self.rank == source:
            if self.size > 1:
                self._run("broadcast", _on_the_wire(value), receive, key)
            return value
        received = fresh(value, value.shape)
        receive[source] = received
        self._run("broadcast", None, receive, key)
        return received


def _on_the_wire(value: Tensor) -> Tensor:
    """`value` with its bytes in memory as they read: contiguous, no pending conjugation or negation."""
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    return value.contiguous()


class HostGroup(Group):
    """A group whose transport moves host memory: tensors of other devices are staged through it."""

    def _exchange(self, send: Messages, receive: Messages, key: str) -> None:
        # What goes to all peers is staged once.
        staged = {id(part): part.cpu() for part in send if part is not None and part.device.type != "cpu"}
        send = [staged.get(id(part), part) for part in send]
        buffers = [
            buffer if buffer is None or buffer.device.type == "cpu" else torch.empty_like(buffer, device="cpu")
            for buffer in receive
        ]
        self._exchange_on_host(send, buffers, key)
        for buffer, landed in zip(receive, buffers, strict=True):
            if buffer is not None and landed is not None and buffer is not landed:
                buffer.copy_(landed)

    @abstractmethod
    def _exchange_on_host(self, send: Messages, receive: Messages, key: str) -> None:
        """`_exchange` of CPU tensors."""


class SocketGroup(HostGroup):
    """Processes of one machine, over sockets of their own. Ranks that disagree raise at once, on both sides.

    Attributes:
        transport: The connections. Assign others to bring the group back after an error.
    """

    def __init__(self, transport: Sockets, ranks: Sequence[int], limit: float, name: str = "sockets") -> None:
        super().__init__(name, ranks, transport.rank, limit)
        if transport.size != self.size:
            raise ValueError(f"sockets among {transport.size} ranks cannot carry the ranks {self.ranks}")
        self.transport = transport

    def _exchange_on_host(self, send: Messages, receive: Messages, key: str) -> None:
        start = time.monotonic()
        try:
            self.transport.exchange(
                [None if part is None else _message(part, key) for part in send],
                [None if buffer is None else _message(buffer, key) for buffer in receive],
                self.limit,
            )
        except PeerFailed as failure:
            peer = self.ranks[failure.peer]
            if failure.timed_out:
                raise CollectiveTimeout(time.monotonic() - start, self.name, key, peer) from None
            raise CollectiveError(str(failure), self.name, key, peer) from failure.__cause__


def _message(value: Tensor, key: str) -> tuple[str, memoryview]:
    """What a message is, in words, and a contiguous tensor's memory."""
    memory = value.view(-1).view(torch.uint8).numpy().data
    return f"{key!r} with {_description(value.dtype, value.shape)}", memory


@lru_cache(maxsize=4096)
def _description(dtype: torch.dtype, shape: Shape) -> str:
    return f"{tuple(shape)} of {str(dtype).removeprefix('torch.')}"


#: Bytes of a term from which on ranks share out the rows of a sum onto a residual, and then gather the results.
TWO_SHOTS = 1 << 20

#: Classes of tensors whose elements lie where they say; what a subclass is, only it knows.
_WITH_MEMORY = (Tensor, torch.nn.Parameter)


class SharedGroup(HostGroup):
    """Processes of one machine, through memory that they share. Ranks that disagree raise at once, on all sides.

    Sums are made as they are received, so :meth:`all_reduce` and :meth:`reduce_scatter` are operations of their own
    here; what they give has the bits that it has elsewhere.

    Attributes:
        transport: This rank's end of the memory. Assign another one to bring the group back after an error.
    """

    def __init__(self, transport: SharedMemory, ranks: Sequence[int], limit: float, name: str = "shared") -> None:
        super().__init__(name, ranks, transport.rank, limit)
        if transport.size != self.size:
            raise ValueError(f"memory shared by {transport.size} ranks cannot carry the ranks {self.ranks}")
        self.transport = transport

    def _exchange_on_host(self, send: Messages, receive: Messages, key: str) -> None:
        sent = {id(part) for part in send if part is not None}
        start = time.monotonic()
        try:
            self.transport.exchange(
                [None if part is None else _located(part, key) for part in send],
                [None if buffer is None else _located(buffer, key) for buffer in receive],
                len(sent) > 1,
                self.limit,
            )
        except PeerFailed as failure:
            raise self._translated(failure, start, key) from failure.__cause__

    def all_gather_along(
        self,
        dim: int,
        piece: Tensor,
        whole_shape: Shape,
        runs: tuple[Run, ...],
        widths: tuple[int, ...],
        key: str = "",
    ) -> Tensor:
        """See :meth:`Group.all_gather_along`. Pieces go to their places in the whole as they are received."""
        if self.size == 1 or not piece.is_cpu or type(piece) not in _WITH_MEMORY or 0 in whole_shape:
            return super().all_gather_along(dim, piece, whole_shape, runs, widths, key)
        _check_along(dim, piece.shape, whole_shape, runs, widths, self.rank)
        piece = _on_the_wire(piece.detach())
        whole = fresh(piece, whole_shape)
        along = dim % len(whole_shape)
        column = piece.element_size() * prod(whole_shape[along + 1 :])
        rows = prod(whole_shape[:along])
        if _recordings:
            peers = self.size - 1
            self.note("all_gather", (peers * widths[self.rank] + sum(widths) - widths[self.rank]) * rows * column, key)
        name = _gathered_name(key, piece.dtype, whole_shape, along, widths)
        self._gather(name, piece, whole, (rows, column, whole_shape[along]), runs, widths, key)
        return whole

    def _gather(
        self,
        name: str,
        piece: Tensor,
        whole: Tensor,
        sizes: tuple[int, int, int],
        runs: tuple[Run, ...],
        widths: tuple[int, ...],
        key: str,
    ) -> None:
        """Fill `whole`, in which `piece` may lie in its place. Sizes: rows, a column's bytes, columns of the whole."""
        start = time.monotonic()
        try:
            self.transport.gather(name, piece.data_ptr(), whole.data_ptr(), *sizes, runs, widths, self.limit)
        except PeerFailed as failure:
            raise self._translated(failure, start, key) from failure.__cause__

    def all_reduce(self, term: Tensor, key: str = "") -> Tensor:
        code = self._code(term)
        if code is None:
            return super().all_reduce(term, key)
        term = _on_the_wire(term)
        total = fresh(term)
        self._reduce("all_reduce", term, code, total, None, key)
        return total

    def reduce_scatter(self, term: Tensor, counts: Sequence[int], key: str = "") -> Tensor:
        self._check_counts(term, counts, key)
        code = self._code(term)
        if code is None:
            return super().reduce_scatter(term, counts, key)
        term = _on_the_wire(term)
        total = fresh(term[: counts[self.rank]])
        self._reduce("reduce_scatter", term, code, total, counts, key)
        return total

    def sum_add_norm(
        self,
        term: Tensor,
        residual: Tensor,
        norm: NormSpec | None,
        counts: Sequence[int] | None = None,
        key: str = "",
        quantized: QuantizedSpec | None = None,
    ) -> tuple[Tensor | None, Tensor] | None:
        """Sum every rank's term in rank order, add the residual, normalize: one pass, one rounding.

        Args:
            term: This rank's: `[rows, hidden]`, of one shape and dtype on all ranks.
            residual: `[rows, hidden]`, or with `counts` the rows that this rank keeps; of the same dtype, with
                contiguous rows. It is not written to.
            norm: The norm, for rows of `hidden` elements; None for none.
            counts: How many rows of the sum each rank keeps, in rank order; None says that each keeps all.
            key: What this exchange is.
            quantized: Where the norm of the rows that this rank keeps goes instead of a new tensor.

        Returns:
            `(normalized, sum)`, new tensors, of which the first is None without a norm and with `quantized`. None if
            this group cannot do it, before anything was sent, and then on all ranks: for another dtype, for no
            elements, and for rows that are too long.
        """
        shape = kept = term.shape
        if counts is not None:
            self._check_counts(term, counts, key)
            kept = (counts[self.rank], *shape[1:])
        if residual.shape != kept or residual.dtype is not term.dtype or not residual.is_cpu:
            raise ValueError(
                f"exchange {key!r} of {self!r}: a sum of {_description(term.dtype, shape)}, of which this rank "
                f"keeps {kept[0]} rows, does not go onto a residual of {_description(residual.dtype, residual.shape)}"
            )
        code = self._code(term)
        if code is None or len(shape) != 2 or shape[1] * term.element_size() > self.transport.longest_row:
            return None
        if residual.stride(1) != 1:
            residual = residual.contiguous()
        term = _on_the_wire(term)
        total = fresh(residual)
        normed = None if norm is None or quantized is not None else fresh(total)
        if counts is None and quantized is None and term.nbytes >= TWO_SHOTS:
            self._in_two_shots(term, code, residual, total, normed, norm, key)
            return normed, total
        self._reduce(
            "all_reduce" if counts is None else "reduce_scatter",
            term, code, total, counts, key, shape[1], residual, normed, norm, quantized,
        )  # fmt: skip
        return normed, total

    def _in_two_shots(
        self,
        term: Tensor,
        code: int,
        residual: Tensor,
        total: Tensor,
        normed: Tensor | None,
        norm: NormSpec | None,
        key: str,
    ) -> None:
        """Sum, add and normalize this rank's share of the rows, and gather the others' results: the same bits."""
        rows = term.shape[0]
        counts = tuple(rows // self.size + (rank < rows % self.size) for rank in range(self.size))
        starts = [0, *accumulate(counts)]
        own = slice(starts[self.rank], starts[self.rank + 1])
        self._reduce(
            "all_reduce",
            term, code, total[own], counts, key, term.shape[1], residual[own], None if normed is None else normed[own],
            norm, gathers=1 if normed is None else 2,
        )  # fmt: skip
        runs = tuple(Run(rank, 0, starts[rank], count) for rank, count in enumerate(counts))
        sizes = (1, term.shape[1] * term.element_size(), rows)
        for what, whole in (("sums", total), ("norms", normed)):
            if whole is not None:
                name = _gathered_name(f"{what} of {key}", whole.dtype, whole.shape, 0, counts)
                self._gather(name, whole[own], whole, sizes, runs, counts, key)

    def _reduce(
        self,
        op: str,
        term: Tensor,
        code: int,
        total: Tensor,
        counts: Sequence[int] | None,
        key: str,
        width: int = 0,
        residual: Tensor | None = None,
        normed: Tensor | None = None,
        norm: NormSpec | None = None,
        quantized: QuantizedSpec | None = None,
        gathers: int = 0,
    ) -> None:
        """Run and count a sum: of all rows, or with `counts` of each rank's own. What it counts includes the `gathers`
        of each rank's own rows that are to follow."""
        parts = None
        if counts is not None:
            row = term.numel() // term.shape[0]
            parts = [count * row for count in counts]
        if _recordings:
            own, peers = total.numel(), self.size - 1
            others = term.numel() - own
            moved = peers * own + (peers * term.numel() if counts is None else others)
            self.note(op, (moved + gathers * (peers * own + others)) * term.element_size(), key)
        name = _summed_name(key, term.dtype, term.shape, None if counts is None else tuple(counts), width > 0)
        start = time.monotonic()
        try:
            self.transport.reduce(
                name,
                code,
                term.data_ptr(),
                term.numel(),
                total.data_ptr(),
                self.limit,
                parts,
                width,
                None if residual is None else residual.data_ptr(),
                0 if residual is None else residual.stride(0),
                None if normed is None else normed.data_ptr(),
                norm,
                quantized,
            )
        except PeerFailed as failure:
            raise self._translated(failure, start, key) from failure.__cause__

    def _code(self, term: Tensor) -> int | None:
        """The library's code of the term's dtype; None where the sum is not for it."""
        if self.size == 1 or not term.is_cpu or not term.numel() or type(term) not in _WITH_MEMORY:
            return None
        return dtypes().get(term.dtype)

    def _translated(self, failure: PeerFailed, start: float, key: str) -> CollectiveError:
        peer = self.ranks[failure.peer]
        if failure.timed_out:
            return CollectiveTimeout(time.monotonic() - start, self.name, key, peer)
        return CollectiveError(str(failure), self.name, key, peer)


def _located(value: Tensor, key: str) -> tuple[str, int, int]:
    """What a message is, in words, and where a contiguous tensor lies."""
    what, place = f"{key!r} with {_description(value.dtype, value.shape)}", value.data_ptr()
    if not place:
        raise ValueError(f"exchange {what}: a {type(value).__name__} without memory of its own cannot be sent")
    return what, place, value.nbytes


@lru_cache(maxsize=4096)
def _check_along(
    dim: int, piece_shape: Shape, whole_shape: Shape, runs: tuple[Run, ...], widths: tuple[int, ...], rank: int
) -> None:
    """See :meth:`Group.all_gather_along`."""
    own = list(whole_shape)
    own[dim] = widths[rank]
    ends = [0, *(run.whole + run.width for run in runs)]
    if (
        list(piece_shape) != own
        or ends != [*(run.whole for run in runs), whole_shape[dim]]
        or any(min(run) < 0 or run.piece + run.width > widths[run.rank] for run in runs)
    ):
        raise ValueError(
            f"a piece of shape {tuple(piece_shape)} on rank {rank}, of pieces {widths} wide along dim {dim}, and the "
            f"runs {[tuple(run) for run in runs]} do not make up a whole of shape {tuple(whole_shape)}"
        )


@lru_cache(maxsize=4096)
def _gathered_name(key: str, dtype: torch.dtype, whole_shape: Shape, dim: int, widths: tuple[int, ...]) -> str:
    """What a whole that is gathered is, in words."""
    return f"{key!r} with {_description(dtype, whole_shape)}, gathered along dim {dim} from {widths}"


@lru_cache(maxsize=4096)
def _summed_name(
    key: str, dtype: torch.dtype, shape: torch.Size, counts: tuple[int, ...] | None, onto_residual: bool
) -> str:
    """What a sum is, in words."""
    dealt = "" if counts is None else f", dealt out as {counts}"
    return f"{key!r} with {_description(dtype, shape)}, summed{' onto a residual' * onto_residual}{dealt}"


class GlooGroup(HostGroup):
    """Processes on any machines: tagged point-to-point messages over a gloo process group nobody else uses.

    Attributes:
        transport: The process group. Assign another one to bring the group back after an error.
    """

    def __init__(self, transport: dist.ProcessGroup, ranks: Sequence[int], limit: float, name: str = "gloo") -> None:
        super().__init__(name, ranks, transport.rank(), limit)
        if transport.size() != self.size:
            raise ValueError(f"a process group of {transport.size()} ranks cannot carry the ranks {self.ranks}")
        self.transport = transport
        self._peers = [(self.rank + step) % self.size for step in range(1, self.size)]

    def _exchange_on_host(self, send: Messages, receive: Messages, key: str) -> None:
        seed = crc32(key.encode())
        transport = self.transport
        start = time.monotonic()
        peer = self._peers[0]
        try:
            # Receives are posted first: a message that finds its buffer needs no second copy.
            works = []
            for peer in reversed(self._peers):
                if (buffer := receive[peer]) is not None:
                    works.append((peer, transport.recv([buffer], peer, _tag(seed, buffer))))
            for peer in self._peers:
                if (part := send[peer]) is not None:
                    works.append((peer, transport.send([part], peer, _tag(seed, part))))
            for peer, work in works:  # noqa: B007 - the handler names the peer
                work.wait(timedelta(seconds=max(self.limit - (time.monotonic() - start), 0.001)))
        except RuntimeError as error:
            waited = time.monotonic() - start
            if waited >= self.limit or "timed out" in str(error).lower():
                raise CollectiveTimeout(waited, self.name, key, self.ranks[peer]) from error
            raise CollectiveError(str(error), self.name, key, self.ranks[peer]) from error


def _tag(seed: int, value: Tensor) -> int:
    """The tag of one message: its key's hash, carried on over what is in it.

    gloo aborts the process that receives a message longer than its buffer, so messages of another shape or
    dtype have another tag, and the receiver waits in vain.
    """
    return crc32(_description(value.dtype, value.shape).encode(), seed) & 0x7FFFFFFF


class NcclGroup(Group):
    """Processes on GPUs: one batch of point-to-point operations over an nccl process group.

    nccl has no tags, so the key is not checked on the wire; a peer that does not come is met by `limit`. To
    bound the wait the host waits for the exchange to end.

    Attributes:
        transport: The process group. Assign another one to bring the group back after an error.
    """

    def __init__(self, transport: dist.ProcessGroup, ranks: Sequence[int], limit: float, name: str = "nccl") -> None:
        super().__init__(name, ranks, transport.rank(), limit)
        self.transport = transport

    def _exchange(self, send: Messages, receive: Messages, key: str) -> None:
        # As bytes, because nccl knows only some dtypes.
        operations = []
        for peer, buffer in enumerate(receive):
            if peer == self.rank:
                continue
            if (part := send[peer]) is not None:
                operations.append(self._operation(dist.isend, part, peer))
            if buffer is not None:
                operations.append(self._operation(dist.irecv, buffer, peer))
        if not operations:
            return
        start = time.monotonic()
        try:
            for work in dist.batch_isend_irecv(operations):
                work.wait(timedelta(seconds=max(self.limit - (time.monotonic() - start), 0.001)))
        except RuntimeError as error:
            waited = time.monotonic() - start
            if waited >= self.limit:
                raise CollectiveTimeout(waited, self.name, key) from error
            raise CollectiveError(str(error), self.name, key) from error

    def _operation(self, direction: Any, value: Tensor, peer: int) -> dist.P2POp:
        flat = value.view(-1).view(torch.uint8)
        return dist.P2POp(direction, flat, group=self.transport, group_peer=peer)


class ThreadGroup(Group):
    """Threads of one process, each a rank. They meet in rounds; a round under different keys raises on all.

    :meth:`create` makes the ranks' groups together, because they share the place where they meet.
    """

    def __init__(self, meeting: _Meeting, ranks: Sequence[int], rank: int, limit: float, name: str) -> None:
        super().__init__(name, ranks, rank, limit)
        self._meeting = meeting
        self._round = 0

    @classmethod
    def create(cls, ranks: Sequence[int], limit: float = 10.0, name: str = "threads") -> list[ThreadGroup]:
        """One group per rank of `ranks`, in order: the thread that plays `ranks[i]` takes entry `i`."""
        meeting = _Meeting(len(ranks))
        return [cls(meeting, ranks, rank, limit, name) for rank in range(len(ranks))]

    def abort(self, reason: str) -> None:
        """End every wait of the group, now and later, with a :class:`CollectiveError`, from any thread."""
        self._meeting.close(reason)

    def _exchange(self, send: Messages, receive: Messages, key: str) -> None:
        # Copies go to the meeting, so that the sender need not wait until they were taken.
        copies = {id(part): part.clone() for part in send if part is not None}
        sent = [None if part is None else copies[id(part)] for part in send]
        start = time.monotonic()
        posts = self._meeting.meet(self._round, self.rank, (key, sent), self.limit)
        self._round += 1
        if isinstance(posts, str):
            raise CollectiveError(posts, self.name, key)
        missing = [rank for rank in range(self.size) if rank not in posts]
        if missing:
            waited = time.monotonic() - start
            raise CollectiveTimeout(waited, self.name, key, self.ranks[missing[0]])
        for rank, (other, _) in sorted(posts.items()):
            if other != key:
                self.abort(f"the ranks were at {other!r} and at {key!r}")
                raise CollectiveError(f"it is at {other!r}", self.name, key, self.ranks[rank])
        for rank, buffer in enumerate(receive):
            if buffer is None:
                continue
            value = posts[rank][1][self.rank]
            if value is None or value.shape != buffer.shape or value.dtype != buffer.dtype:
                found = "nothing" if value is None else f"{tuple(value.shape)} of {value.dtype}"
                self.abort(f"the ranks disagree on what {key!r} carries")
                raise CollectiveError(
                    f"it sent {found}, expected {tuple(buffer.shape)} of {buffer.dtype}",
                    self.name,
                    key,
                    self.ranks[rank],
                )
            buffer.copy_(value)


_Post = tuple[str, Messages]


class _Meeting:
    """Where the threads of one group meet: in each round every rank posts once and takes what all posted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, _Post]] = {}
        self._taken: dict[int, int] = {}
        self._closed: str | None = None

    def close(self, reason: str) -> None:
        with self._changed:
            self._closed = self._closed or reason
            self._changed.notify_all()

    def meet(self, round_: int, rank: int, post: _Post, limit: float) -> dict[int, _Post] | str:
        """Every rank's post, fewer if some did not come within `limit`, or why the meeting is closed."""
        with self._changed:
            if self._closed:
                return self._closed
            posts = self._rounds.setdefault(round_, {})
            posts[rank] = post
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or len(posts) == self._size, limit)
            if len(posts) < self._size:
                if self._closed:
                    return self._closed
                self._closed = f"rank index {rank} gave up waiting at {post[0]!r}"
                self._changed.notify_all()
                return posts
            self._taken[round_] = self._taken.get(round_, 0) + 1
            if self._taken[round_] == self._size:
                del self._rounds[round_], self._taken[round_]
            return posts
