"""From declarations to a :class:`StagePlan`: every batch variant's path, bound once.

:func:`resolve` turns a declaration into rows and sums for one variant; it looks at the declared neighbours,
never at a neighbour's plan, so that a layer on another rank or pipeline stage resolves alike. `bind_plan`
binds the result. In the forward pass :meth:`StagePlan.select` picks a path from the batch's facts, and that
is all that is left to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .boundary import StageEntry, StageExit, make_boundary, make_output_boundary
from .contracts import (
    BatchVariant,
    EdgeDecl,
    Leaves,
    Order,
    ProducerReduction,
    StageDecl,
    StageInput,
    StageKind,
    StageOutput,
)
from .exit import Decider
from .forward import ForwardBatch
from .fusions import FusedInput
from .fusions.all_reduce import built_in_attention_input, built_in_ffn_input, takes
from .layout import ATTN_CP, ATTN_DP, ATTN_TP_SCATTER, FULL, Layout, SumGroup
from .parallel import BoundSum
from .residual import Norm
from .runtime import Runtime

if TYPE_CHECKING:
    from .factories import StageDeclaration

SCATTERED = (BatchVariant.INPUT_SCATTERED, BatchVariant.SEQUENCE_PARALLEL)
"""Variants in which rows lie on attention-TP slices between layers."""


@dataclass(frozen=True, eq=False)
class BoundPath:
    """One batch variant's way through a stage. A branch's first stage has no entry: its source has read."""

    decl: StageDecl
    entry: StageEntry | None
    exit: StageExit
    decider: Decider


@dataclass(eq=False)
class StagePlan:
    """A stage's paths by batch variant, and the declared facts that providers ask for."""

    declaration: StageDeclaration
    runtime: Runtime
    paths: dict[BatchVariant, BoundPath] = field(default_factory=dict)

    def select(self, batch: ForwardBatch) -> BoundPath:
        """The path for this batch.

        Raises:
            RuntimeError: This stage has none for the batch's variant.
        """
        variant = batch.variant
        path = self.paths.get(variant)
        if path is None:
            raise RuntimeError(f"no stage boundary path for the active {variant.name} batch")
        return path


def attention_rows(runtime: Runtime, variant: BatchVariant) -> Layout:
    """The rows attention runs on, and the model's own tensors have outside the stack."""
    axes = [ATTN_DP, ATTN_CP] if variant is BatchVariant.CP else [ATTN_DP]
    return runtime.parallel.topology.layout(*axes)


def sliced(layout: Layout, runtime: Runtime) -> Layout:
    """`layout` with attention TP's ranks each on their own slice."""
    return Layout(layout.sharded | runtime.parallel.topology.axes(ATTN_TP_SCATTER))


def runs_on_slices(decl: StageDeclaration, runtime: Runtime) -> bool:
    """Whether an FFN works on slices of attention's rows, with all it needs: its output is complete."""
    if decl.kind is StageKind.ATTN:
        return False
    return runtime.a2a_backend is not None if decl.sparse else runtime.dense_local


def leaves_sum(decl: StageDeclaration, consumer: StageKind | None, runtime: Runtime) -> Leaves:
    """Whether a mixer leaves its attention-TP sum to a consumer of that kind: both sides call this."""
    if decl.kind is StageKind.FFN or decl.terminal or runtime.parallel.attention_tp.size == 1:
        return Leaves.NEVER
    if decl.update.at_producer:
        return Leaves.NEVER
    if decl.reduction is ProducerReduction.PARTIAL or consumer is StageKind.FFN:
        return Leaves.ALWAYS
    if consumer is None or runtime.parallel.topology.attention_dp > 1:
        return Leaves.NEVER
    return Leaves.PER_BATCH


def handoff_rows(decl: StageDeclaration, runtime: Runtime, variant: BatchVariant) -> Layout:
    """The rows on which a producer's completed contribution meets the next stage."""
    attention = attention_rows(runtime, variant)
    if decl.terminal or decl.kind is StageKind.ATTN:
        return attention
    if variant in SCATTERED:
        return sliced(attention, runtime)
    if runs_on_slices(decl, runtime):
        # Two-batch overlap starts at the first sparse layer, and splits attention's rows.
        starts_overlap = runtime.two_batch_overlap and not decl.sparse and decl.next_sparse
        return attention if starts_overlap else sliced(attention, runtime)
    return attention


def resolve_input(
    decl: StageDeclaration, runtime: Runtime, variant: BatchVariant, *, latent: bool = False
) -> StageInput:
    """The rows a stage needs. `latent`: its attention takes slices and gathers what it computes from them."""
    attention = attention_rows(runtime, variant)
    slices = sliced(attention, runtime)
    previous = decl.previous
    if decl.kind is StageKind.ATTN:
        arrives = attention if previous is None else handoff_rows(previous, runtime, variant)
        read_rows = slices if variant in SCATTERED else arrives
        adapter = latent and decl.gathers_tp_input and read_rows != attention
        return StageInput(attention, read_rows, gathered_by_adapter=adapter)
    if runs_on_slices(decl, runtime):
        return StageInput(slices, slices)
    if keeps_cp_rows(decl, runtime, variant):
        return StageInput(attention, attention)
    joins = (
        decl.read.keeps_residual
        and not decl.read.before_gather
        and previous is not None
        and previous.update.plain
        and leaves_sum(previous, decl.kind, runtime) is Leaves.ALWAYS
    )
    if variant is BatchVariant.SEQUENCE_PARALLEL:
        return StageInput(FULL, slices)
    if variant is BatchVariant.INPUT_SCATTERED:
        if not decl.read.keeps_residual or (previous is not None and not previous.update.plain):
            return StageInput(FULL, slices)
        joins = joins and decl.scattered_residual == "joins"
        return StageInput(FULL, FULL, Order.JOIN_SLICES if joins else Order.PLAIN)
    topology = runtime.parallel.topology
    if joins and variant is BatchVariant.ORDINARY and topology.attention_dp > 1 and topology.attention_cp == 1:
        return StageInput(FULL, attention, Order.JOIN_THEN_GATHER)
    return StageInput(FULL, attention)


def keeps_cp_rows(decl: StageDeclaration, runtime: Runtime, variant: BatchVariant) -> bool:
    """A MoE whose data-parallel groups are the context-parallel ranks stays on their rows."""
    return variant is BatchVariant.CP and decl.sparse and runtime.parallel.topology.moe_dp > 1


def output_sum(decl: StageDeclaration, runtime: Runtime) -> BoundSum | None:
    """The sum that a stage's compute leaves open, unless it completes it itself."""
    if runs_on_slices(decl, runtime):
        return None
    if decl.kind is StageKind.ATTN:
        return runtime.parallel.bound_sum(SumGroup.ATTN_TP)
    return runtime.parallel.bound_sum(SumGroup.MOE_OUTPUT if decl.sparse else SumGroup.TP)


def resolve_output(
    decl: StageDeclaration,
    runtime: Runtime,
    variant: BatchVariant,
    input_: StageInput,
    consumer: StageKind | None,
) -> StageOutput:
    """What a stage leaves, given what its own input asks for and what kind of stage comes next."""
    handoff = handoff_rows(decl, runtime, variant)
    # Whoever leaves a stack gets a hidden state: where the residual is none, the last stage makes it one.
    wide = not (decl.update.plain and decl.read.keeps_residual)
    output = StageOutput(
        rows=input_.rows,
        sum=output_sum(decl, runtime),
        handoff_rows=handoff,
        residual_rows=input_.read_rows,
        leaves_sum=leaves_sum(decl, consumer, runtime),
        writes_residual=decl.update.at_producer or (decl.terminal and (wide or input_.read_rows != handoff)),
    )
    if decl.kind is StageKind.ATTN or output.sum is None or output.writes_residual:
        return output
    scoped = decl.reduction is ProducerReduction.SCOPED and not decl.terminal
    stays_with_producer = variant is BatchVariant.SEQUENCE_PARALLEL
    return replace(
        output,
        leaves_for_input=scoped and _may_leave_all_reduce(decl, runtime, variant, output),
        leaves_for_scatter=scoped and not stays_with_producer,
        leaves_for_finalize=decl.reduction is ProducerReduction.SCOPED
        and variant is BatchVariant.ORDINARY
        and _may_leave_finalize(decl, runtime, output),
    )


def _may_leave_finalize(decl: StageDeclaration, runtime: Runtime, output: StageOutput) -> bool:
    """Everything but the batch and the provider that decides whether a MoE's finalize is left.

    A final norm takes it over only where there is nothing to do beside it.
    """
    if not decl.sparse or runtime.quantized_communication:
        return False
    return not decl.terminal or (decl.transform is None and output.rows == output.lands == output.residual_rows)


def _may_leave_all_reduce(decl: StageDeclaration, runtime: Runtime, variant: BatchVariant, output: StageOutput) -> bool:
    """Everything but the batch that decides whether an FFN's all-reduce is left to the next input."""
    topology = runtime.parallel.topology
    if runtime.quantized_communication or not decl.update.outlives_producer:
        return False
    if decl.transform is not None and not decl.transform.before_reduce_scatter:
        return False
    if topology.attention_dp > 1:
        reads_outputs = (runtime.speculative_algorithm or "").upper().startswith("EAGLE")
        if reads_outputs or topology.attention_cp > 1:
            return False
    if variant is BatchVariant.CP:
        return output.rows == output.handoff_rows
    return variant is BatchVariant.ORDINARY


def bind_plan(
    decl: StageDeclaration,
    norm: Norm,
    runtime: Runtime,
    *,
    consumer: StageKind | None,
    fusions: Any = None,
    latent: bool = False,
) -> StagePlan:
    """The paths of one stage.

    Raises:
        ValueError: Some batch variant that may come has no correct path here.
    """
    plan = StagePlan(decl, runtime)
    branch = decl.prepared_from is not None
    if branch and runtime.variants != (BatchVariant.ORDINARY,):
        names = [variant.name for variant in runtime.variants if variant is not BatchVariant.ORDINARY]
        raise ValueError(f"a branch moves only ordinary token rows; this runtime may run {', '.join(names)} batches")
    if not (decl.update.at_producer or decl.update.outlives_producer) and decl.kind is StageKind.FFN:
        raise ValueError("an FFN's update reaches the next layer, so it must outlive its producer or run at_producer")
    candidates = _candidates(plan, fusions)
    for variant in runtime.variants:
        input_ = resolve_input(decl, runtime, variant, latent=latent)
        output = resolve_output(decl, runtime, variant, input_, consumer)
        edge = _edge(decl, input_, runtime, variant)
        bound = make_output_boundary(
            output,
            decl.update,
            runtime.mover,
            transform=decl.transform,
            permits=_permits(decl, runtime, variant),
            contract=decl.read.contract if decl.terminal and not decl.read.keeps_residual else None,
        )
        entry = None if branch else make_boundary(
            edge,
            decl.read,
            norm,
            runtime.mover,
            update_is_plain=decl.previous is None or decl.previous.update.plain,
            model_rows=attention_rows(runtime, variant),
            candidates=candidates,
        )  # fmt: skip
        plan.paths[variant] = BoundPath(
            StageDecl(decl.kind, input_, output), entry, bound, _decider(plan, bound, fusions)
        )
    return plan


def _permits(decl: StageDeclaration, runtime: Runtime, variant: BatchVariant) -> Any:
    topology = runtime.parallel.topology
    mixes_dp_and_cp = topology.attention_dp > 1 and topology.attention_cp > 1
    return frozenset() if decl.kind is StageKind.ATTN or mixes_dp_and_cp else runtime.policy.permits


def _edge(decl: StageDeclaration, input_: StageInput, runtime: Runtime, variant: BatchVariant) -> EdgeDecl:
    previous = decl.previous
    if previous is None:
        rows = attention_rows(runtime, variant)
        return EdgeDecl(None, input_, rows, input_.read_rows, None)
    its_input = resolve_input(previous, runtime, variant)
    output = resolve_output(previous, runtime, variant, its_input, decl.kind)
    expects = output.sum if output.leaves_sum is Leaves.ALWAYS else None
    source = output.handoff_rows if output.writes_residual else output.residual_rows
    return EdgeDecl(output, input_, source, input_.read_rows, expects)


def _candidates(plan: StagePlan, fusions: Any) -> tuple[FusedInput, ...]:
    """The provider's, in its order, before the built-in ones."""
    decl, runtime = plan.declaration, plan.runtime
    offered: Sequence[FusedInput] = ()
    if fusions is not None:
        offered = fusions.attention_input(plan) if decl.kind is StageKind.ATTN else fusions.ffn_input(plan)
    if not runtime.allreduce_fusion:
        return tuple(offered)
    if decl.kind is StageKind.FFN:
        return *offered, built_in_ffn_input()
    names = (SumGroup.TP, SumGroup.MOE_OUTPUT, SumGroup.ATTN_TP)
    return *offered, *(built_in_attention_input(name) for name in names)


def _decider(plan: StagePlan, bound: StageExit, fusions: Any) -> Decider:
    decl, runtime = plan.declaration, plan.runtime
    if decl.kind is StageKind.ATTN:
        return Decider(bound)
    needs_consumer = runtime.lora or (decl.sparse and runtime.shared_expert_tp1)
    over, rows = bound.output.sum, bound.output.rows
    # A fused all-reduce moves no rows, so it is for sums that land where their terms are.
    fusable = over is not None and over.group is runtime.parallel.tp and rows == bound.output.lands

    def takes_sum(batch: ForwardBatch) -> bool:
        if not fusable or runtime.a2a_backend is not None:
            return False
        offered = fusions is not None and fusions.can_defer_all_reduce(plan, batch)
        return offered or (runtime.allreduce_fusion and takes(bound.mover.count(rows, batch.rows)))

    def takes_finalize(batch: ForwardBatch) -> bool:
        offered = fusions.can_defer_finalize(plan, batch)
        return offered and (not decl.terminal or getattr(fusions, "terminal_finalize", False))

    return Decider(
        bound,
        needs_consumer=needs_consumer,
        takes_sum=takes_sum,
        takes_finalize=None if fusions is None else takes_finalize,
    )
