"""`all_reduce_add_norm` through Triton, in memory of every rank's GPU that all of them see: one kernel, one launch.

Its programs are as many on every rank and at every call, and program `p` of a rank waits for program `p` of the others
alone. It copies its rows of the term to its own memory, meets the others, and adds up what all of them brought, in rank
order. In one shot every rank does so for all rows. In two, for which less is read, a rank does it for its share of the
rows, leaves the results in its own memory too, meets the others again, and copies theirs.

Two slots take turns, as in `boundary/compiled/channel.c`: that a rank has come to a meeting says that it is done with
the call before, so nobody reads any more what is written over next. Which one is next is kept on the GPU, so that a
recorded graph may be replayed.

A wait has no end of its own: a rank that never comes leaves the others' GPUs waiting, as nccl's kernels do.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...symmetric_memory import PROGRAMS, REGIONS, Workspace
from .. import gpu
from ..add_norm.triton import POINTERS, contiguous, norm_row
from ..host import rows_of
from ..norms import Kind, NormFormula

#: The longest row that the registers of a program hold.
LONGEST = 8192
#: From so many bytes of a term on, two shots read so much less that they are worth a second meeting. Not measured.
TWO_SHOTS = 1 << 19

#: The parts of a call; a kernel runs all of them but under Triton's interpreter, which runs ranks one after another.
COPY, MEET, SUM, COLLECT, TAKE_TURNS = (tl.constexpr(1 << part) for part in range(5))
EVERYTHING = 31


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
def _complete(
    slots, flags, turns, term, residual, weight, bias, normed, total, term_stride, residual_stride, rank, rows, hidden,
    capacity, slot_stride, eps, offset,
    SIZE: tl.constexpr, PARTS: tl.constexpr, TWO: tl.constexpr, LAYER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    turn = tl.load(turns + program)
    slot = turn.to(tl.int64) * slot_stride
    own = tl.load(slots + rank).to(term.dtype) + slot
    if COPY & PARTS:
        for row in range(program, rows, programs):
            value = tl.load(term + row * term_stride + at, mask=inside)
            tl.store(own + row * hidden + at, value, mask=inside)
    if MEET & PARTS:
        meet(flags, program, rank, SIZE)
    if SUM & PARTS:
        for row in range(program + rank * programs * TWO, rows, programs * (1 + (SIZE - 1) * TWO)):
            place = tl.load(slots).to(term.dtype) + slot + row * hidden + at
            added = tl.load(place, mask=inside, other=0.0).to(tl.float32)
            for peer in range(1, SIZE):
                place = tl.load(slots + peer).to(term.dtype) + slot + row * hidden + at
                added += tl.load(place, mask=inside, other=0.0).to(tl.float32)
            added += tl.load(residual + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
            rounded = added.to(total.dtype.element_ty)
            tl.store(total + row * hidden + at, rounded, mask=inside)
            if TWO:
                tl.store(own + capacity + row * hidden + at, rounded, mask=inside)
            if normed is not None:
                result = norm_row(added, weight, bias, at, inside, hidden, eps, offset, LAYER)
                scaled = result.to(normed.dtype.element_ty)
                tl.store(normed + row * hidden + at, scaled, mask=inside)
                if TWO:
                    tl.store(own + 2 * capacity + row * hidden + at, scaled, mask=inside)
    if TWO:
        if MEET & PARTS:
            meet(flags, program, rank, SIZE)
        if COLLECT & PARTS:
            for row in range(program, rows, programs):
                owner = (row // programs) % SIZE
                if owner != rank:
                    place = tl.load(slots + owner).to(term.dtype) + slot + capacity + row * hidden + at
                    tl.store(total + row * hidden + at, tl.load(place, mask=inside), mask=inside)
                    if normed is not None:
                        tl.store(normed + row * hidden + at, tl.load(place + capacity, mask=inside), mask=inside)
    if TAKE_TURNS & PARTS:
        tl.store(turns + program, 1 - turn)


def all_reduce_add_norm(
    term: Tensor, workspace: Workspace, residual: Tensor, formula: NormFormula | None
) -> tuple[Tensor | None, Tensor] | None:
    """See the dispatcher; None for what the kernel does not take, which it says from facts that all ranks share."""
    if not takes(term, workspace, residual, formula):
        return None
    normed, total = (torch.empty_like(term, memory_format=torch.contiguous_format) for _ in range(2))
    launch(term, workspace, residual, formula, normed if formula is not None else None, total)
    return (None if formula is None else normed), total


def takes(term: Tensor, workspace: Workspace, residual: Tensor, formula: NormFormula | None) -> bool:
    """Whether the term's sum is for the kernel."""
    parameters = [] if formula is None else [one for one in (formula.weight, formula.bias) if one is not None]
    if term.dim() != 2 or not term.numel() or term.shape != residual.shape or term.shape[1] > LONGEST:
        return False
    if term.dtype not in POINTERS or residual.dtype != term.dtype or not gpu.runs(term, residual, *parameters):
        return False
    if any(one.shape != term.shape[1:] or one.dtype not in POINTERS for one in parameters):
        return False
    return term.nbytes <= workspace.capacity


def launch(
    term: Tensor,
    workspace: Workspace,
    residual: Tensor,
    formula: NormFormula | None,
    normed: Tensor | None,
    total: Tensor,
    parts: int = EVERYTHING,
    two_shots: bool | None = None,
) -> None:
    """Run some parts of a call, into the results that are given; None chooses by the size."""
    rows, hidden = term.shape
    if two_shots is None:
        two_shots = workspace.size > 2 and term.nbytes >= TWO_SHOTS
    formula = formula or NormFormula(Kind.RMS, None, 0.0)
    term, term_stride = rows_of(term)
    residual, residual_stride = rows_of(residual)
    block = triton.next_power_of_2(hidden)
    capacity = workspace.capacity // term.element_size()
    gpu.launch(
        _complete, (PROGRAMS,), workspace.slots, workspace.flags, workspace.turns, term, residual,
        contiguous(formula.weight), contiguous(formula.bias), normed, total, term_stride, residual_stride,
        workspace.rank, rows, hidden, capacity, REGIONS * capacity, formula.eps, formula.offset,
        num_warps=_warps(block), SIZE=workspace.size, PARTS=parts, TWO=int(two_shots),
        LAYER=formula.kind is Kind.LAYER, BLOCK=block,
    )  # fmt: skip


def _warps(block: int) -> int:
    """8 elements to a thread, since several ranks' are on their way at a time."""
    return min(max(block // 256, 1), 32)


def _compiled() -> list[gpu.Variant]:
    numbers = dict.fromkeys(("term_stride", "residual_stride", "rank", "rows", "hidden"), "i32")
    numbers |= {"capacity": "i64", "slot_stride": "i64", "eps": "fp32", "offset": "fp32"}
    shared = {"slots": "*i64", "flags": "*i64", "turns": "*i32"}
    variants = []
    for pointer, size, block in (("*bf16", 2, 128), ("*bf16", 8, LONGEST), ("*fp16", 4, 4096), ("*fp32", 8, LONGEST)):
        tensors = dict.fromkeys(("term", "residual", "weight", "bias", "normed", "total"), pointer)
        for two in (False, True):
            constants = {"SIZE": size, "PARTS": EVERYTHING, "TWO": int(two), "LAYER": two, "BLOCK": block}
            variants.append(gpu.Variant(_complete, shared | tensors | numbers, constants, _warps(block)))
    return variants


COMPILED = _compiled()
