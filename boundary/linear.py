"""Parallel linears and a MoE's output reduction that cooperate with the open exit.

The contract of the stage above decides who adds a row-parallel output's terms. Below a `PARTIAL` stage
nothing sums: its projection is built with `reduce_results=False`. Below a `SCOPED` stage exactly one
reduction sums, and it reads the flags of the exit that is open while it runs. :func:`check_compute` holds a
module to that when a model is built.

Weights are loaded from whole ones, with `load_whole`: each rank cuts its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .collectives import Group
from .construction import runs_on_slices
from .contracts import ProducerReduction, StageKind
from .forward import get_forward
from .layout import SumGroup
from .ops import shared_input, summed, with_addend
from .runtime import Runtime, bound_runtime
from .stage import StageBoundary

if TYPE_CHECKING:
    from .factories import StageDeclaration


def _group(over: SumGroup | Group, runtime: Runtime) -> Group:
    if isinstance(over, Group):
        return over
    if over is SumGroup.MOE_OUTPUT:
        return runtime.parallel.moe_tp
    return runtime.parallel.attention_tp if over is SumGroup.ATTN_TP else runtime.parallel.tp


def _share(size: int, group: Group, what: str) -> int:
    if size % group.size:
        raise ValueError(f"{what}={size} does not divide over the {group.size} ranks of {group.name}")
    return size // group.size


class ColumnParallelLinear(nn.Module):
    """A linear whose output features are dealt out over a group. It never communicates.

    Args:
        in_features, out_features: The whole sizes.
        over: The group: attention TP for a mixer, full TP for an FFN, MoE TP (`MOE_OUTPUT`) for an expert.
        bias: With a bias.
        packed: The sizes of the parts of the output that are dealt out each on its own (`gate | up`).
        runtime: By default the one bound on this thread.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        over: SumGroup | Group = SumGroup.TP,
        *,
        bias: bool = False,
        packed: Sequence[int] | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__()
        self.group = _group(over, runtime or bound_runtime())
        self.packed = tuple(packed) if packed is not None else (out_features,)
        if sum(self.packed) != out_features:
            raise ValueError(f"packed={self.packed} does not add up to out_features={out_features}")
        own = sum(_share(size, self.group, "out_features") for size in self.packed)
        self.weight = nn.Parameter(torch.empty(own, in_features))
        self.bias = nn.Parameter(torch.empty(own)) if bias else None

    @torch.no_grad()
    def load_whole(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take this rank's rows of the whole `weight [out_features, in_features]`."""
        self.weight = nn.Parameter(self._own(weight), requires_grad=self.weight.requires_grad)
        if bias is not None:
            self.bias = nn.Parameter(self._own(bias), requires_grad=self.weight.requires_grad)

    def _own(self, whole: Tensor) -> Tensor:
        parts = whole.split(self.packed)
        return torch.cat([part.tensor_split(self.group.size)[self.group.rank] for part in parts])

    def forward(self, hidden_states: Tensor) -> Tensor:
        return nn.functional.linear(shared_input(hidden_states, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear whose input features are dealt out: each rank's product is one term of a sum.

    Args:
        in_features, out_features: The whole sizes.
        over: The group, as for the column-parallel linear before it.
        bias: With a bias, which joins the sum once: in the term of the group's first rank.
        reduce_results: Add the terms, unless an open exit says that the boundary does. False: always return
            the term.
        runtime: By default the one bound on this thread.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        over: SumGroup | Group = SumGroup.TP,
        *,
        bias: bool = False,
        reduce_results: bool = True,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__()
        self.group = _group(over, runtime or bound_runtime())
        self.reduce_results = reduce_results
        self.weight = nn.Parameter(torch.empty(out_features, _share(in_features, self.group, "in_features")))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    @torch.no_grad()
    def load_whole(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take this rank's columns of the whole `weight [out_features, in_features]`."""
        own = weight.tensor_split(self.group.size, dim=1)[self.group.rank].contiguous()
        self.weight = nn.Parameter(own, requires_grad=self.weight.requires_grad)
        if bias is not None:
            self.bias = nn.Parameter(bias.clone(), requires_grad=self.weight.requires_grad)

    def forward(self, hidden_states: Tensor) -> Tensor:
        term = nn.functional.linear(hidden_states, self.weight)
        if self.bias is not None:
            term = with_addend(term, self.bias, self.group.rank == 0)
        if not self.reduce_results or self.group.size == 1 or get_forward().skips_reduction or not term.shape[0]:
            return term
        return summed(term, self.group, f"sum over {self.group.name}")


class MoeOutputReduction(nn.Module):
    """The reduction at the end of a MoE: routed and shared terms are added on each rank, then summed once.

    Where expert and MoE tensor parallelism need two sums (MoE data parallelism is on), they run one after the
    other and cannot be left to a boundary, so no flag is read. With an expert all-to-all the output is
    complete.

    Args:
        runtime: By default the one bound on this thread.
    """

    def __init__(self, runtime: Runtime | None = None) -> None:
        super().__init__()
        runtime = runtime or bound_runtime()
        self.groups = () if runtime.a2a_backend is not None else runtime.parallel.moe_output
        self.replicates_shared = runtime.shared_expert_tp1

    def forward(self, routed: Tensor, shared: Tensor | None = None) -> Tensor:
        """`routed`: this rank's term. `shared`: its term too, or the whole where the shared expert is
        replicated.

        A replicated output joins one rank's term of the sum; without a sum to join it is simply added.
        """
        if shared is not None:
            joins = not self.replicates_shared or all(group.rank == 0 for group in self.groups)
            routed = with_addend(routed, shared, joins)
        if not routed.shape[0] or (len(self.groups) == 1 and get_forward().skips_reduction):
            return routed
        for group in self.groups:
            routed = summed(routed, group, f"sum over {group.name}")
        return routed


def check_compute(boundary: StageBoundary, compute: nn.Module) -> None:
    """Hold a stage's compute to what its declaration says about sums; called where the model is built.

    Raises:
        ValueError: Below a `PARTIAL` stage something sums, or its projection's terms are not dealt out over
            the declared sum's group. Below another stage not exactly one reduction sums, or it sums over other
            groups than the declared ones; where the output is complete without a sum, something sums.

    Groups are compared by identity: equal ranks are one group. Not looked at are linears whose terms a
    `MoeOutputReduction` adds, because an expert's may be whole on each rank.
    """
    declaration, runtime = boundary.declaration, boundary.plan.runtime
    declared = declared_groups(declaration, runtime)
    if declaration.reduction is ProducerReduction.PARTIAL:
        names = [name for name, module in compute.named_modules() if _summed_over(module) is not None]
        if names:
            raise ValueError(f"below a PARTIAL stage nothing sums: build {names} with reduce_results=False")
        rows = [module for module in compute.modules() if isinstance(module, RowParallelLinear)]
        if rows and _wide((rows[-1].group,)) != declared:
            raise ValueError(
                f"the declared sum runs over {_named(declared)}, and the projection's terms are dealt out over "
                f"{rows[-1].group!r}: every rank would hold the whole output, or another sum's term"
            )
        return
    sums = {name: _summed_over(module) for name, module in compute.named_modules()}
    summing = {name: groups for name, groups in sums.items() if groups}
    if not declared:
        if summing:
            raise ValueError(f"this stage's output is complete without a sum, and these sum: {sorted(summing)}")
        return
    if len(summing) != 1:
        raise ValueError(
            f"below a {declaration.reduction.name} stage exactly one reduction sums, and here do "
            f"{sorted(summing) or 'none'}"
        )
    ((name, groups),) = summing.items()
    if groups != declared:
        raise ValueError(f"{name!r} sums over {_named(groups)}, and this stage declares a sum over {_named(declared)}")


def declared_groups(declaration: StageDeclaration, runtime: Runtime) -> tuple[Group, ...]:
    """The groups whose sums, one after the other, complete a stage's output, whatever the batch variant: none,
    one, or a MoE's two.
    """
    if runs_on_slices(declaration, runtime):
        return ()
    parallel = runtime.parallel
    if declaration.sparse:
        return parallel.moe_output
    return _wide((parallel.attention_tp if declaration.kind is StageKind.ATTN else parallel.tp,))


def _summed_over(module: nn.Module) -> tuple[Group, ...] | None:
    """The groups of more than one rank that a reduction adds over; None for a module that is no reduction."""
    if isinstance(module, MoeOutputReduction):
        return _wide(module.groups)
    return _wide((module.group,)) if isinstance(module, RowParallelLinear) and module.reduce_results else None


def _wide(groups: tuple[Group, ...]) -> tuple[Group, ...]:
    return tuple(group for group in groups if group.size > 1)


def _named(groups: tuple[Group, ...]) -> str:
    return " then ".join(map(repr, groups)) or "no group of several ranks"
