"""Gradients through boundaries: on every rank those of one process, whatever the rows and the order of sums."""

from __future__ import annotations

import pytest
import torch
from stacks.weights import DTYPE, weight
from stacks.worlds import batch_of, build, on_threads
from torch import nn

from boundary import PaddingMode, SumGroup, Topology, declare_attn, declare_ffn, make_stages
from boundary.collectives import ThreadGroup
from boundary.kernels.reduce_scatter_add_norm import reduce_scatter_add_norm
from boundary.layout import FULL
from boundary.linear import ColumnParallelLinear, RowParallelLinear
from boundary.ops import differentiable, summed
from boundary.residual import batch as residual_batch
from boundary.residual.add_norm import AddNormRead, RMSNorm

HIDDEN, INNER, LAYERS = 8, 16, 2


class Compute(nn.Module):
    """A pair of linears with something nonlinear between them. As a mixer it also looks at earlier rows."""

    def __init__(self, name, over, mixes):
        super().__init__()
        self.mixes = mixes
        self.up = ColumnParallelLinear(HIDDEN, INNER, over)
        self.down = RowParallelLinear(INNER, HIDDEN, over, bias=True, reduce_results=not mixes)
        self.up.load_whole(weight(f"{name}.up", INNER, HIDDEN))
        self.down.load_whole(weight(f"{name}.down", HIDDEN, INNER), weight(f"{name}.bias", HIDDEN))

    def forward(self, value):
        value = torch.tanh(self.up(value))
        return self.down(torch.cumsum(value, 0) if self.mixes else value)


class Model(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.computes = nn.ModuleList()
        self.boundaries = []
        for layer in range(LAYERS):
            self.computes.append(Compute(f"{layer}.attn", SumGroup.ATTN_TP, True))
            self.computes.append(Compute(f"{layer}.ffn", SumGroup.TP, False))
            self.boundaries += make_stages(
                (declare_attn(), RMSNorm(HIDDEN).double()),
                (declare_ffn(read=read), RMSNorm(HIDDEN).double()),
                previous=declare_ffn(read=read) if layer else None,
                terminal=layer == LAYERS - 1,
            )
        self.norm = RMSNorm(HIDDEN).double()

    def forward(self, hidden, batch):
        residual_batch.start(batch)
        for index in range(0, 2 * LAYERS, 2):
            attn, ffn = self.boundaries[index : index + 2]
            hidden = attn.finish(self.computes[index](attn.prepare(hidden, batch)), batch)
            hidden = ffn.prepare(hidden, batch)
            with ffn.exit(batch) as output:
                hidden = self.computes[index + 1](hidden)
            hidden = output.finish(hidden)
        return residual_batch.norm(hidden, batch, self.norm)


TOKENS = [4, 2]


@pytest.mark.parametrize("fusion", [False, True])
def test_a_terms_gradient_is_that_of_the_sum_fused_or_not(fusion):
    def rank_main(parallel):
        with torch.enable_grad():
            stages = build(
                parallel,
                lambda: make_stages(
                    (declare_attn(), RMSNorm(HIDDEN).double()), (declare_ffn(), RMSNorm(HIDDEN).double())
                ),
                allreduce_fusion=fusion,
            )
            attn, ffn = stages
            _, batch = batch_of(parallel, [4])
            residual_batch.start(batch)
            attn.prepare(weight("x", 4, HIDDEN), batch)
            term = weight(f"term {parallel.tp.rank}", 4, HIDDEN).clone().requires_grad_()
            made = ffn.prepare(attn.finish(term, batch), batch)
            (gradient,) = torch.autograd.grad((made * weight("loss", 4, HIDDEN)).sum(), term)
            return gradient

    with torch.enable_grad():
        total = sum(weight(f"term {rank}", 4, HIDDEN) for rank in range(2)).requires_grad_()
        made = RMSNorm(HIDDEN).double()(weight("x", 4, HIDDEN) + total)
        (want,) = torch.autograd.grad((made * weight("loss", 4, HIDDEN)).sum(), total)
    for gradient in on_threads(Topology(attention_tp=2), rank_main):
        torch.testing.assert_close(gradient, want)


def test_a_second_gradient_is_right_or_refused():
    (group,) = ThreadGroup.create([0], name="alone")
    term, residual = (torch.randn(3, 8, dtype=DTYPE, requires_grad=True) for _ in range(2))

    def first(made: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(made.pow(3).sum(), term, create_graph=True)[0]

    (second,) = torch.autograd.grad(first(summed(term, group, "sum")).sum(), term)
    torch.testing.assert_close(second, 6 * term)
    moved = differentiable(term, lambda value: value.detach() * 1, lambda gradient: gradient.detach() * 1)
    _, scattered = reduce_scatter_add_norm(term, [3], group, residual, None, "sum")
    for made in (moved, scattered):
        gradient = first(made)
        torch.testing.assert_close(gradient, 3 * made.square())
        with pytest.raises(NotImplementedError, match="once more"):
            torch.autograd.grad(gradient.sum(), term)


def test_a_finalizes_gradient_reaches_every_ranks_experts():
    from boundary.fusions.all_reduce import SumHandoff

    def rank_main(parallel):
        with torch.enable_grad():
            outputs = weight(f"experts {parallel.tp.rank}", 4, 2 * HIDDEN).view(4, 2, HIDDEN).clone().requires_grad_()
            choices = weight("choices", 4, 2)
            whole = SumHandoff(outputs, choices, parallel.bound_sum(SumGroup.TP)).complete()
            (gradient,) = torch.autograd.grad((whole * weight("loss", 4, HIDDEN)).sum(), outputs)
            return torch.equal(gradient, (weight("loss", 4, HIDDEN)[:, None] * choices[..., None]).to(DTYPE))

    assert all(on_threads(Topology(attention_tp=2), rank_main))


def gradients(topology, read=None, **options):
    """Each rank's output and the gradients of its tokens and its last bias, for one loss over everybody's rows."""
    variant = {name: options[name] for name in ("input_scattered", "sequence_parallel") if name in options}

    def rank_main(parallel):
        with torch.enable_grad():
            model = build(parallel, lambda: Model(read or AddNormRead()), **options)
            dp = parallel.topology.attention_dp
            _, batch = batch_of(parallel, TOKENS[:dp], PaddingMode.SUM_LEN, **variant)
            rows, live = batch.rows.cell(parallel.at)
            tokens = weight(f"tokens {parallel.at.dp}", live, HIDDEN).clone().requires_grad_()
            padded = torch.cat([tokens, tokens.new_ones(rows - live, HIDDEN)])
            out = model(padded, batch)
            mover = model.boundaries[0].plan.runtime.mover
            whole = mover.move(out, batch.rows.model_rows, FULL, batch.rows)
            direction = torch.linspace(-1, 1, HIDDEN, dtype=DTYPE)
            (whole * direction).square().sum().backward()
            return out[:live].detach(), tokens.grad, model.computes[-1].down.bias.grad

    return on_threads(topology, rank_main)


def one_process(count):
    """The same loss, in which each data-parallel rank's rows are a sequence of their own."""
    singles = [gradients_of_one(dp) for dp in range(count)]
    return singles, sum(bias for _, _, bias in singles)


def gradients_of_one(dp):
    def rank_main(parallel):
        with torch.enable_grad():
            model = build(parallel, lambda: Model(AddNormRead()))
            _, batch = batch_of(parallel, [TOKENS[dp]])
            tokens = weight(f"tokens {dp}", TOKENS[dp], HIDDEN).clone().requires_grad_()
            out = model(tokens, batch)
            direction = torch.linspace(-1, 1, HIDDEN, dtype=DTYPE)
            (out * direction).square().sum().backward()
            return out.detach(), tokens.grad, model.computes[-1].down.bias.grad

    return on_threads(Topology(), rank_main)[0]


@pytest.mark.parametrize("dp, tp, options", [
    (1, 2, {}),
    (2, 1, {}),
    (2, 1, {"boundary_reduction": "rsv"}),
    (2, 2, {}),
    (2, 2, {"read": AddNormRead(before_gather=True)}),
    (1, 2, {"input_scattered": True, "boundary_reduction": "rs"}),
    (1, 2, {"sequence_parallel": True, "boundary_reduction": "rs"}),
    (1, 4, {"sequence_parallel": True}),
])  # fmt: skip
def test_every_rank_gets_the_gradients_of_one_process(dp, tp, options):
    singles, bias = one_process(dp)
    assert all(grad.abs().max() > 1e-3 for _, grad, _ in singles)
    results = gradients(Topology(attention_dp=dp, attention_tp=tp), **options)
    for rank, (out, grad, bias_grad) in enumerate(results):
        want_out, want_grad, _ = singles[rank // tp]
        torch.testing.assert_close(out, want_out, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(grad, want_grad, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(bias_grad, bias, rtol=1e-9, atol=1e-9)
