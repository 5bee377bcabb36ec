"""What kernels have in common that complete sums in memory of every rank's GPU that all of them see
(`boundary/symmetric_memory.py`): one kernel, one launch.

Its programs are as many on every rank and at every call, and program `p` of a rank waits for program `p` of the others
alone. It copies rows `p`, `p + PROGRAMS`, ... of the term to its own memory, meets the others, and reads of theirs the
rows that they copied as program `p`.

Two slots take turns, as in `boundary/compiled/channel.c`: that a rank has come to a meeting says that it is done with
the call before, so nobody reads any more what is written over next. So calls of these kernels may follow each other in
any order, the same on every rank, one at a time. Which slot is next is kept on the GPU, so that a recorded graph may be
replayed.

A wait has no end of its own: a rank that never comes leaves the others' GPUs waiting, as nccl's kernels do.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..symmetric_memory import Workspace
from . import gpu
from .add_norm.triton import POINTERS
from .norms import NormFormula

#: The longest row that the registers of a program hold.
LONGEST = 8192

#: The parts of a call. A kernel runs all of its own but under Triton's interpreter, which runs ranks one after another.
COPY, MEET, SUM, COLLECT, TAKE_TURNS = (tl.constexpr(1 << part) for part in range(5))
EVERYTHING = 31


@triton.jit
def bring(term, own, program, rows, term_stride, hidden, at, inside):
    """Copy this program's rows of the term to `own`, where they are contiguous."""
    for row in range(program, rows, tl.num_programs(0)):
        value = tl.load(term + row * term_stride + at, mask=inside)
        tl.store(own + row * hidden + at, value, mask=inside)


@triton.jit
def meet(flags, program, rank, SIZE: tl.constexpr):
    """Wait until this program of every rank is here. What each has written before, all see afterwards.

    `flags` has the address of every rank's flags: of each program one for every rank, which that rank raises, once it
    is down, and the owner takes down.
    """
    tl.debug_barrier()
    for step in tl.static_range(1, SIZE):  # type: ignore[reportGeneralTypeIssues]
        peer = (rank + step) % SIZE
        raised = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + program * SIZE + rank
        while tl.atomic_cas(raised, 0, 1, sem="release", scope="sys") != 0:
            pass
    for step in tl.static_range(1, SIZE):  # type: ignore[reportGeneralTypeIssues]
        peer = (rank + step) % SIZE
        awaited = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + program * SIZE + peer
        while tl.atomic_cas(awaited, 1, 0, sem="acquire", scope="sys") != 1:
            pass
    tl.debug_barrier()


@triton.jit
def sum_of_ranks(slots, term, start, residual, residual_start, at, inside, SIZE: tl.constexpr):
    """A row of the sum in rank order, and then the residual, not rounded.

    `start` and `residual_start` are where the row begins in every rank's memory, which has the term's dtype, and in the
    residual.
    """
    place = tl.load(slots).to(term.dtype) + start + at
    added = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    for peer in range(1, SIZE):
        place = tl.load(slots + peer).to(term.dtype) + start + at
        added += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    return added + tl.load(residual + residual_start + at, mask=inside, other=0.0).to(tl.float32)


def takes(term: Tensor, workspace: Workspace, residual: Tensor, formula: NormFormula | None) -> bool:
    """Whether the term's sum is for the kernels. How many rows of the residual this rank has is no fact that all share,
    and not looked at.
    """
    parameters = [] if formula is None else [one for one in (formula.weight, formula.bias) if one is not None]
    if term.dim() != 2 or not term.numel() or term.shape[1:] != residual.shape[1:] or term.shape[1] > LONGEST:
        return False
    if term.dtype not in POINTERS or residual.dtype != term.dtype or not gpu.runs(term, residual, *parameters):
        return False
    if any(one.shape != term.shape[1:] or one.dtype not in POINTERS for one in parameters):
        return False
    return term.nbytes <= workspace.capacity


def warps(block: int) -> int:
    """8 elements to a thread, since several ranks' are on their way at a time."""
    return min(max(block // 256, 1), 32)
