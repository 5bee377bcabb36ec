"""`reduce_scatter_add_norm` through Triton, in memory of every rank's GPU that all of them see (`kernels/meeting.py`).

Once the ranks have met, each adds up its own rows of what all of them brought, in rank order. A rank that keeps no rows
brings its term and meets the others too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...symmetric_memory import PROGRAMS, REGIONS, Workspace
from .. import gpu
from ..add_norm.triton import contiguous, norm_row
from ..host import rows_of
from ..meeting import COPY, EVERYTHING, LONGEST, MEET, SUM, TAKE_TURNS, bring, meet, sum_of_ranks, takes, warps
from ..norms import Kind, NormFormula


@triton.jit(do_not_specialize=["first", "kept"])  # they are other ones in every batch
def _complete(
    slots, flags, turns, term, residual, weight, bias, normed, total, term_stride, residual_stride, rank, rows, first,
    kept, hidden, slot_stride, eps, offset,
    SIZE: tl.constexpr, PARTS: tl.constexpr, LAYER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    at = tl.arange(0, BLOCK)
    inside = at < hidden
    turn = tl.load(turns + program)
    slot = turn.to(tl.int64) * slot_stride
    if COPY & PARTS:
        own = tl.load(slots + rank).to(term.dtype) + slot
        bring(term, own, program, rows, term_stride, hidden, at, inside)
    if MEET & PARTS:
        meet(flags, program, rank, SIZE)
    if SUM & PARTS:
        # Of the rows `first`, `first + 1`, ... of the term, those that the others brought as this program.
        for row in range((program + programs - first % programs) % programs, kept, programs):
            start = slot + (first + row) * hidden
            added = sum_of_ranks(slots, term, start, residual, row * residual_stride, at, inside, SIZE)
            tl.store(total + row * hidden + at, added.to(total.dtype.element_ty), mask=inside)
            if normed is not None:
                result = norm_row(added, weight, bias, at, inside, hidden, eps, offset, LAYER)
                tl.store(normed + row * hidden + at, result.to(normed.dtype.element_ty), mask=inside)
    if TAKE_TURNS & PARTS:
        tl.store(turns + program, 1 - turn)


def reduce_scatter_add_norm(
    term: Tensor, counts: Sequence[int], workspace: Workspace, residual: Tensor, formula: NormFormula | None
) -> tuple[Tensor | None, Tensor] | None:
    """See the dispatcher; None for what the kernel does not take, which it says from facts that all ranks share."""
    if not takes(term, workspace, residual, formula):
        return None
    normed, total = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
    launch(term, counts, workspace, residual, formula, normed if formula is not None else None, total)
    return (None if formula is None else normed), total


def launch(
    term: Tensor,
    counts: Sequence[int],
    workspace: Workspace,
    residual: Tensor,
    formula: NormFormula | None,
    normed: Tensor | None,
    total: Tensor,
    parts: int = EVERYTHING,
) -> None:
    """Run some parts of a call, into the results that are given."""
    rows, hidden = term.shape
    formula = formula or NormFormula(Kind.RMS, None, 0.0)
    term, term_stride = rows_of(term)
    residual, residual_stride = rows_of(residual)
    block = triton.next_power_of_2(hidden)
    gpu.launch(
        _complete, (PROGRAMS,), workspace.slots, workspace.flags, workspace.turns, term, residual,
        contiguous(formula.weight), contiguous(formula.bias), normed, total, term_stride, residual_stride,
        workspace.rank, rows, sum(counts[: workspace.rank]), counts[workspace.rank], hidden,
        REGIONS * (workspace.capacity // term.element_size()), formula.eps, formula.offset,
        num_warps=warps(block), SIZE=workspace.size, PARTS=parts, LAYER=formula.kind is Kind.LAYER, BLOCK=block,
    )  # fmt: skip


def _compiled() -> list[gpu.Variant]:
    numbers = dict.fromkeys(("term_stride", "residual_stride", "rank", "rows", "first", "kept", "hidden"), "i32")
    numbers |= {"slot_stride": "i64", "eps": "fp32", "offset": "fp32"}
    shared = {"slots": "*i64", "flags": "*i64", "turns": "*i32"}
    variants = []
    for pointer, size, block in (("*bf16", 2, 128), ("*bf16", 8, LONGEST), ("*fp16", 4, 4096), ("*fp32", 8, LONGEST)):
        tensors = dict.fromkeys(("term", "residual", "weight", "bias", "normed", "total"), pointer)
        constants = {"SIZE": size, "PARTS": EVERYTHING, "LAYER": True, "BLOCK": block}
        variants.append(gpu.Variant(_complete, shared | tensors | numbers, constants, warps(block)))
    bare = {"weight": None, "bias": None, "normed": None, "SIZE": 8, "PARTS": EVERYTHING, "LAYER": False, "BLOCK": 4096}
    tensors = dict.fromkeys(("term", "residual", "total"), "*bf16")
    variants.append(gpu.Variant(_complete, shared | tensors | numbers, bare, warps(4096)))
    return variants


COMPILED = _compiled()
