"""Compute modules: attention, a recurrent mixer, a SwiGLU MLP, a MoE. Each sees rows and returns rows, or its
term.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from boundary import SumGroup, get_forward
from boundary.adapters.cp import TokenDeal
from boundary.collectives import Group
from boundary.fusions.all_reduce import SumHandoff
from boundary.linear import ColumnParallelLinear, MoeOutputReduction, RowParallelLinear
from boundary.parallel import SoloGroup
from boundary.runtime import bound_runtime

from .weights import DTYPE, Config, on_grid, weight


def column(name: str, in_features: int, out_features: int, over: SumGroup | Group) -> ColumnParallelLinear:
    linear = ColumnParallelLinear(in_features, out_features, over)
    linear.load_whole(weight(name, out_features, in_features))
    return linear.requires_grad_(False)


def row(
    name: str, in_features: int, out_features: int, over: SumGroup | Group, *, reduce_results: bool = True
) -> RowParallelLinear:
    linear = RowParallelLinear(in_features, out_features, over, reduce_results=reduce_results)
    linear.load_whole(weight(name, out_features, in_features))
    return linear.requires_grad_(False)


def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor) -> Tensor:
    """Causal attention, its probabilities on the grid. Row `t` looks at rows up to `t`."""
    scores = torch.einsum("qhk,shk->hqs", q_THK, k_THK)
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    probabilities = on_grid(torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1))
    return torch.einsum("hqs,shk->qhk", probabilities, v_THK)


class Attention(nn.Module):
    """Attention with its heads over attention TP. `scoped`: its projection sums unless an exit says
    otherwise.
    """

    def __init__(self, name: str, config: Config, *, scoped: bool = False) -> None:
        super().__init__()
        over, hidden = SumGroup.ATTN_TP, config.hidden
        self.head_dim = hidden // config.heads
        self.q_proj = column(f"{name}.q", hidden, hidden, over)
        self.k_proj = column(f"{name}.k", hidden, hidden, over)
        self.v_proj = column(f"{name}.v", hidden, hidden, over)
        self.o_proj = row(f"{name}.o", hidden, hidden, over, reduce_results=scoped)
        self.cp = bound_runtime().parallel.attention_cp

    def forward(self, hidden_states: Tensor, deal: TokenDeal | None = None) -> Tensor:
        """`deal` says how a context-parallel batch's tokens are dealt out; attention itself runs in token
        order.
        """
        if deal is not None:
            hidden_states = deal.gather(hidden_states, self.cp)
        q, k, v = (
            on_grid(project(hidden_states)).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = on_grid(attend(q, k, v).flatten(-2))
        if deal is not None:
            mixed = deal.take_back(mixed, self.cp)
        return self.o_proj(mixed)


class Recurrence(nn.Module):
    """A Mamba-like mixer: each channel keeps a state that halves with every token. Channels over attention
    TP.
    """

    def __init__(self, name: str, config: Config) -> None:
        super().__init__()
        self.in_proj = column(f"{name}.in", config.hidden, config.inner, SumGroup.ATTN_TP)
        self.out_proj = row(f"{name}.out", config.inner, config.hidden, SumGroup.ATTN_TP)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.out_proj(scan(on_grid(self.in_proj(hidden_states))))


def scan(values: Tensor) -> Tensor:
    """`state = state / 2 + value` along the rows, on the grid."""
    state, states = values.new_zeros(values.shape[1:]), []
    for value in values:
        state = on_grid(state / 2 + value)
        states.append(state)
    return torch.stack(states) if states else values


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return on_grid(on_grid(nn.functional.silu(gate)) * up)


class Mlp(nn.Module):
    """SwiGLU, its inner features over `over`. The exit's flags reach it through its row-parallel linear."""

    def __init__(self, name: str, config: Config, over: SumGroup | Group, *, reduce_results: bool = True) -> None:
        super().__init__()
        inner = config.inner
        self.gate_up_proj = ColumnParallelLinear(config.hidden, 2 * inner, over, packed=(inner, inner))
        self.gate_up_proj.load_whole(weight(f"{name}.gate_up", 2 * inner, config.hidden))
        self.down_proj = row(f"{name}.down", inner, config.hidden, over, reduce_results=reduce_results)
        self.requires_grad_(False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(hidden_states)))


def dense_mlp(name: str, config: Config) -> Mlp:
    """A dense FFN where this runtime has it: over full TP, or whole on each rank."""
    return Mlp(name, config, SoloGroup() if bound_runtime().dense_local else SumGroup.TP)


class Router(nn.Module):
    """Each row's choice of experts, and their weights on the grid."""

    def __init__(self, name: str, config: Config) -> None:
        super().__init__()
        self.choices = config.choices
        self.weight = nn.Parameter(weight(f"{name}.router", config.experts, config.hidden), requires_grad=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        return route(hidden_states @ self.weight.T, self.choices)


def route(logits: Tensor, choices: int) -> tuple[Tensor, Tensor]:
    """`(expert ids, weights)`, both `[rows, choices]`. Ties go to the expert with the smaller id."""
    order = logits - torch.arange(logits.shape[-1], dtype=logits.dtype) * 2.0**-20
    ids = order.topk(choices, dim=-1).indices
    return ids, on_grid(torch.softmax(logits.gather(-1, ids), dim=-1))


class Moe(nn.Module):
    """Routed experts over EP x MoE TP, and a shared expert: sharded over the same ranks, or replicated.

    Without an all-to-all, every rank sees all rows, computes the experts it holds, and the terms are summed.
    With one, a rank sees its own rows and exchanges them with the ranks that hold their experts; its output
    is complete.
    """

    def __init__(self, name: str, config: Config) -> None:
        super().__init__()
        runtime = bound_runtime()
        parallel = runtime.parallel
        self.config = config
        self.dispatch = runtime.a2a_backend is not None
        self.ep = parallel.moe_ep
        if self.dispatch and parallel.topology.moe_tp > 1:
            raise ValueError("the expert all-to-all of this example holds whole experts: moe_tp must be 1")
        self.router = Router(name, config)
        self.per_rank = config.experts // self.ep.size
        first = self.ep.rank * self.per_rank
        self.experts = nn.ModuleDict(
            {
                str(expert): Mlp(f"{name}.{expert}", config, SumGroup.MOE_OUTPUT, reduce_results=False)
                for expert in range(first, first + self.per_rank)
            }
        )
        # A replicated or local shared expert returns a whole; otherwise it is a term like the routed one.
        whole = self.dispatch or runtime.shared_expert_tp1 or parallel.topology.moe_dp > 1
        self.shared_is_whole = whole
        over: SumGroup | Group = SoloGroup() if whole else SumGroup.TP
        self.shared = Mlp(f"{name}.shared", config, over, reduce_results=False)
        self.reduction = MoeOutputReduction()
        self.reduction.replicates_shared = whole
        self.sum = parallel.bound_sum(SumGroup.MOE_OUTPUT)

    def forward(self, hidden_states: Tensor) -> Tensor | SumHandoff:
        ids, weights = self.router(hidden_states)
        shared = self.shared(hidden_states)
        if self.dispatch:
            return self.reduction(self._exchanged(hidden_states, ids, weights), shared)
        routed = self._chosen(hidden_states, ids)
        if get_forward().defer_moe_finalize and self.sum is not None:
            # The shared expert joins as one more choice of weight one.
            routed = torch.cat([routed, shared[:, None]], dim=1)
            weights = torch.cat([weights, weights.new_ones(len(weights), 1)], dim=1)
            return SumHandoff(routed, weights, self.sum)
        return self.reduction((routed * weights[..., None]).sum(1), shared)

    def _chosen(self, hidden_states: Tensor, ids: Tensor) -> Tensor:
        """`[rows, choices, hidden]`: outputs of the chosen experts this rank holds, zeros for others."""
        chosen = hidden_states.new_zeros(*ids.shape, hidden_states.shape[-1])
        for expert, mlp in self.experts.items():
            row_index, choice = (ids == int(expert)).nonzero(as_tuple=True)
            chosen[row_index, choice] = mlp(hidden_states[row_index])
        return chosen

    def _exchanged(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Send each row to the ranks that hold its experts, and combine what comes back. Idle ranks take
        part.
        """
        ep, width = self.ep, hidden_states.shape[-1]
        owner = ids // self.per_rank
        mine = [(owner == rank).nonzero(as_tuple=True) for rank in range(ep.size)]
        counts = torch.tensor([len(rows) for rows, _ in mine])
        table = torch.stack(ep.all_gather(counts, key="dispatch counts"))
        arriving = table[:, ep.rank].tolist()
        rows = ep.all_to_all([hidden_states[at] for at, _ in mine], [(n, width) for n in arriving], "dispatch rows")
        asked = ep.all_to_all([ids[at] for at in mine], [(n,) for n in arriving], "dispatch experts")
        computed = [self._chosen(part, want[:, None])[:, 0] for part, want in zip(rows, asked, strict=True)]
        back = ep.all_to_all(computed, [(n, width) for n in counts.tolist()], "combine")
        combined = torch.zeros_like(hidden_states)
        for (at, choice), part in zip(mine, back, strict=True):
            combined.index_add_(0, at, part * weights[at, choice][:, None])
        return combined


def embedding(config: Config) -> Tensor:
    return weight("embed", config.vocabulary, config.hidden).to(DTYPE)
