"""Declaring a model's stages, and assembling them.

A :class:`StageDeclaration` says how a stage's compute behaves: what it does to the residual, whether it is
sparse, how it cooperates with the decision about its output sum, and what comes before it. It owns no norm
and no plan, so a neighbour on another rank or pipeline stage is described by writing its declaration again,
with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from .construction import bind_plan
from .contracts import ProducerReduction, StageKind
from .output import OutputTransform
from .residual import Norm, StageRead, StageUpdate
from .residual.add_norm import AddNormRead, AddUpdate
from .runtime import Runtime, bound_runtime
from .stage import StageBoundary


@dataclass(frozen=True)
class StageDeclaration:
    """One stage, as the model describes it; made by `declare_attn` and `declare_ffn`.

    Attributes:
        kind: Mixer or FFN.
        update, read: Its operations on the residual.
        reduction: How compute cooperates with the boundary's decision about its sum.
        sparse, next_sparse: It, and the next layer's FFN, is a MoE.
        gathers_tp_input: Attention's input adapter gathers rows that lie on attention-TP slices; with a
            `qkv_latent_func` it gathers the latents instead of the rows. Otherwise the boundary moves the
            rows.
        scattered_residual: In input-scattered batches the residual's slices join the attention sum, or are
            gathered.
        transform: Runs between the output's sum and the update.
        previous: The actual producer before it; None where the stack starts.
        prepared_from: The stage whose input it shares: a branch.
        terminal: It ends the model's stack.
    """

    kind: StageKind
    update: StageUpdate
    read: StageRead
    reduction: ProducerReduction
    sparse: bool = False
    next_sparse: bool = False
    gathers_tp_input: bool = True
    scattered_residual: Literal["joins", "gathers"] = "joins"
    transform: OutputTransform | None = None
    previous: StageDeclaration | None = None
    prepared_from: StageDeclaration | None = None
    terminal: bool = False


def declare_attn(
    *,
    reduction: ProducerReduction = ProducerReduction.PARTIAL,
    update: StageUpdate | None = None,
    read: StageRead | None = None,
    gathers_tp_input: bool = True,
    transform: OutputTransform | None = None,
    previous: StageDeclaration | None = None,
    prepared_from: StageDeclaration | None = None,
    terminal: bool = False,
) -> StageDeclaration:
    """A mixer: attention, or another stage that mixes tokens. See :class:`StageDeclaration`.

    Raises:
        ValueError: `LOCAL_TAIL`: the contract of some FFNs.
    """
    if reduction is ProducerReduction.LOCAL_TAIL:
        raise ValueError("LOCAL_TAIL is not supported for attention stages")
    return StageDeclaration(
        StageKind.ATTN,
        update or AddUpdate(),
        read or AddNormRead(),
        reduction,
        gathers_tp_input=gathers_tp_input,
        transform=transform,
        previous=previous,
        prepared_from=prepared_from,
        terminal=terminal,
    )


def declare_ffn(
    *,
    sparse: bool = False,
    next_sparse: bool = False,
    reduction: ProducerReduction = ProducerReduction.SCOPED,
    update: StageUpdate | None = None,
    read: StageRead | None = None,
    scattered_residual: Literal["joins", "gathers"] = "joins",
    transform: OutputTransform | None = None,
    previous: StageDeclaration | None = None,
    prepared_from: StageDeclaration | None = None,
    terminal: bool = False,
) -> StageDeclaration:
    """An FFN, dense or a MoE. See :class:`StageDeclaration`.

    Raises:
        ValueError: `PARTIAL`: an FFN's sum is decided by its exit.
    """
    if reduction is ProducerReduction.PARTIAL:
        raise ValueError("PARTIAL is not supported for ffn stages")
    if scattered_residual not in ("joins", "gathers"):
        raise ValueError(f"scattered_residual={scattered_residual!r} is neither 'joins' nor 'gathers'")
    return StageDeclaration(
        StageKind.FFN,
        update or AddUpdate(),
        read or AddNormRead(),
        reduction,
        sparse=sparse,
        next_sparse=next_sparse,
        scattered_residual=scattered_residual,
        transform=transform,
        previous=previous,
        prepared_from=prepared_from,
        terminal=terminal,
    )


_OPTIONS = {StageKind.ATTN: {"qkv_latent_func", "fusions"}, StageKind.FFN: {"fusions"}}


def make_stages(
    *items: tuple[Any, ...],
    previous: StageDeclaration | None = None,
    following: StageDeclaration | None = None,
    prepared_from: StageDeclaration | None = None,
    terminal: bool = False,
    runtime: Runtime | None = None,
) -> tuple[StageBoundary, ...]:
    """Connect stages in the order given, and bind each.

    Args:
        *items: `(declaration, norm)` or `(declaration, norm, options)`. Options: `fusions`, and for a mixer
            `qkv_latent_func`.
        previous: The producer before the first; None where the stack starts.
        following: The consumer after the last, where that decides what the last may leave.
        prepared_from: The stage whose read input the first shares: it is entered through `branch_input`.
        terminal: The last one ends the model's stack.
        runtime: What to bind; by default the one bound on this thread.

    Raises:
        ValueError: A declaration brings neighbours of its own, or a path has no correct implementation.
        TypeError: An option that the stage does not take.
    """
    if not items:
        raise ValueError("make_stages needs at least one stage")
    stages: list[StageBoundary] = []
    source = previous
    for index, item in enumerate(items):
        declaration, norm, *rest = item
        if declaration.previous or declaration.prepared_from or declaration.terminal:
            raise ValueError("give previous, prepared_from and terminal to make_stages, not to the declarations in it")
        last = index == len(items) - 1
        linked = replace(
            declaration,
            previous=source,
            prepared_from=prepared_from if index == 0 else None,
            terminal=terminal and last,
        )
        consumer = following if last else items[index + 1][0]
        options = rest[0] if rest else {}
        stages.append(_make_stage(linked, norm, consumer, options, runtime))
        source = linked
    for stage, next_stage in pairwise(stages):
        stage.certify(next_stage)
    return tuple(stages)


def make_attn_stage(
    declaration: StageDeclaration,
    norm: Norm,
    *,
    following: StageDeclaration | None = None,
    runtime: Runtime | None = None,
    **options: Any,
) -> StageBoundary:
    """One mixer on its own. Its declaration carries its source; `following` names this producer as its
    `previous`.
    """
    return _make_single(StageKind.ATTN, declaration, norm, following, options, runtime)


def make_ffn_stage(
    declaration: StageDeclaration,
    norm: Norm,
    *,
    following: StageDeclaration | None = None,
    runtime: Runtime | None = None,
    **options: Any,
) -> StageBoundary:
    """One FFN on its own. Its declaration carries its source; `following` names this producer as its
    `previous`.
    """
    return _make_single(StageKind.FFN, declaration, norm, following, options, runtime)


def _make_single(
    kind: StageKind,
    declaration: StageDeclaration,
    norm: Norm,
    following: StageDeclaration | None,
    options: dict[str, Any],
    runtime: Runtime | None,
) -> StageBoundary:
    if declaration.kind is not kind:
        raise ValueError(f"this makes {kind.value} stages, and the declaration is of an {declaration.kind.value} stage")
    if following is not None and following.previous != declaration:
        raise ValueError("the following declaration must name this producer in its previous field")
    return _make_stage(declaration, norm, following, options, runtime)


def _make_stage(
    declaration: StageDeclaration,
    norm: Norm,
    consumer: StageDeclaration | None,
    options: dict[str, Any],
    runtime: Runtime | None,
) -> StageBoundary:
    kind = declaration.kind
    if unknown := set(options) - _OPTIONS[kind]:
        raise TypeError(f"an {kind.value} stage takes no option {sorted(unknown)}; it takes {sorted(_OPTIONS[kind])}")
    if declaration.previous is not None and declaration.prepared_from is not None:
        raise ValueError("a branch takes its input from its source: give previous or prepared_from, not both")
    if declaration.terminal and consumer is not None:
        raise ValueError("a terminal stage has nothing following it")
    if consumer is not None and consumer.previous is not None and _alone(consumer.previous) != _alone(declaration):
        raise ValueError("the following declaration must name this producer in its previous field, or nothing")
    runtime = runtime or bound_runtime()
    latent: Callable[..., Any] | None = options.get("qkv_latent_func")
    plan = bind_plan(
        declaration,
        norm,
        runtime,
        consumer=None if consumer is None else consumer.kind,
        fusions=options.get("fusions"),
        latent=latent is not None,
    )
    return StageBoundary(declaration, plan, latent)


def _alone(declaration: StageDeclaration) -> StageDeclaration:
    """What a declaration says of its own stage."""
    return replace(declaration, previous=None, prepared_from=None, terminal=False)
