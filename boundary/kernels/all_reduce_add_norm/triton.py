"""`all_reduce_add_norm` through Triton, in memory of every rank's GPU that all of them see (`kernels/meeting.py`).

Once the ranks have met, each adds up what all of them brought, in rank order. In one shot every rank does so for all
rows. In two, for which less is read, a rank does it for its share of the rows, leaves the results in its own memory
too, meets the others again, and copies theirs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...symmetric_memory import PROGRAMS, REGIONS, Workspace
from .. import gpu, meeting
from ..add_norm.triton import contiguous, norm_row
from ..host import rows_of
from ..meeting import COLLECT, COPY, EVERYTHING, LONGEST, MEET, SUM, TAKE_TURNS, bring, meet, sum_of_ranks, warps
from ..norms import Kind, NormFormula

#: From so many bytes of a term on, two shots read so much less that they are worth a second meeting. Not measured.
TWO_SHOTS = 1 << 19


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
        bring(term, own, program, rows, term_stride, hidden, at, inside)
    if MEET & PARTS:
        meet(flags, program, rank, SIZE)
    if SUM & PARTS:
        for row in range(program + rank * programs * TWO, rows, programs * (1 + (SIZE - 1) * TWO)):
            added = sum_of_ranks(slots, term, slot + row * hidden, residual, row * residual_stride, at, inside, SIZE)
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
    return term.shape == residual.shape and meeting.takes(term, workspace, residual, formula)


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
        num_warps=warps(block), SIZE=workspace.size, PARTS=parts, TWO=int(two_shots),
        LAYER=formula.kind is Kind.LAYER, BLOCK=block,
    )  # fmt: skip


def _compiled() -> list[gpu.Variant]:
    numbers = dict.fromkeys(("term_stride", "residual_stride", "rank", "rows", "hidden"), "i32")
    numbers |= {"capacity": "i64", "slot_stride": "i64", "eps": "fp32", "offset": "fp32"}
    shared = {"slots": "*i64", "flags": "*i64", "turns": "*i32"}
    variants = []
    for pointer, size, block in (("*bf16", 2, 128), ("*bf16", 8, LONGEST), ("*fp16", 4, 4096), ("*fp32", 8, LONGEST)):
        tensors = dict.fromkeys(("term", "residual", "weight", "bias", "normed", "total"), pointer)
        for two in (False, True):
            constants = {"SIZE": size, "PARTS": EVERYTHING, "TWO": int(two), "LAYER": two, "BLOCK": block}
            variants.append(gpu.Variant(_complete, shared | tensors | numbers, constants, warps(block)))
    return variants


COMPILED = _compiled()
