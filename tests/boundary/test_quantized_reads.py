"""Inputs of quantized compute: the same bits on every topology, whoever completes the sum, in every format."""

from __future__ import annotations

from typing import Any

import pytest
import stacks.worlds
import torch
from torch import Tensor, nn

from boundary import declare_attn, declare_ffn
from boundary.collectives import SharedGroup
from boundary.fusions.all_reduce import ReferenceProvider, SumHandoff
from boundary.fusions.shared_memory import install_shared_memory_fusion
from boundary.kernels.add_norm import norm_of_sum
from boundary.kernels.norms import formula_of
from boundary.kernels.quantization import Quantization
from boundary.layout import FULL, SumGroup
from boundary.parallel import ThreadWorld
from boundary.residual import LayerResidual
from boundary.residual.add_norm import AddNormRead, RMSNorm, rms_norm

from .checks import HIDDEN, enter, layer, norm, on_ranks, ops, rows_of, term_of
from .kernels.worlds import SharedThreadWorld


def rounded_to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """A format of a model's own: eight bits per value, one scale per row."""
    scale = rows.abs().amax(-1, keepdim=True).clamp(min=2.0**-20) / 127
    return torch.round(rows / scale).to(torch.int8), scale


#: Some scales that are no powers of two, so that bfloat16's rounding of a norm is seen in what is made of it.
KNOWN = [Quantization(torch.int8), Quantization(torch.float8_e4m3fn), Quantization(torch.int8, torch.tensor(0.0137))]
FORMS = {"int8": KNOWN[0], "float8": KNOWN[1], "one scale": KNOWN[2], "its own": rounded_to_int8}


class Doubled(nn.Module):
    """A norm that nothing is known of."""

    def forward(self, rows: Tensor) -> Tensor:
        return 2 * rows


class OfSum(RMSNorm):
    """A norm that no kernel knows and that takes the sum before it is rounded."""

    def of_sum(self, total: Tensor, dtype: torch.dtype) -> Tensor:
        return rms_norm(total, 1.5 * self.gain, self.eps, dtype)


def norm_of(kind: type[nn.Module], dtype: torch.dtype) -> nn.Module:
    if kind is Doubled:
        return Doubled()
    made = kind(HIDDEN)
    made.weight = nn.Parameter(torch.linspace(0.5, 2.0, HIDDEN).to(dtype), requires_grad=False)
    return made


def wanted_of(form: Any, layernorm: nn.Module, total: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What one process makes of the unrounded sum."""
    formula = formula_of(layernorm, torch.float32)
    if formula is not None and form in KNOWN:
        return form.add_norm(total, None, formula)[0]
    if isinstance(layernorm, Doubled):
        return form(layernorm(total.to(dtype)))
    if formula is not None:
        return form(norm_of_sum(total, formula, dtype))
    return form(layernorm.of_sum(total, dtype))  # type: ignore[operator]


def same(found: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return len(found) == len(right) and all(
        a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(found, right, strict=True)
    )


#: The topology, the runtime's options, and what ranks exchange before the input is there.
EDGES: dict[str, tuple[dict, dict, list[str]]] = {
    "alone": ({}, {}, []),
    "summed": ({"attention_tp": 2}, {}, ["all_reduce"]),
    "scattered": ({"attention_tp": 2}, {"a2a_backend": "all_to_all"}, ["reduce_scatter"]),
    "gathered": ({"attention_dp": 2}, {}, ["all_gather"]),
    "joined": ({"attention_dp": 2, "attention_tp": 2}, {}, ["all_reduce"]),
}
PROVIDERS = {"none": None, "reference": ReferenceProvider(), "shared memory": install_shared_memory_fusion()}
#: Where a residual joins a sum, and where a provider that knows no formats gives a norm, bfloat16 is rounded on the
#: way. (So is a reduce-scatter's sum that no provider completes, before the residual is added: that is exact here.)
CASES = [
    (edge, fusions, dtype)
    for edge in EDGES
    for fusions in PROVIDERS
    for dtype in (torch.float32, torch.bfloat16)
    if dtype == torch.float32 or (edge != "joined" and fusions != "reference")
]


@pytest.mark.parametrize("edge, fusions, dtype", CASES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [RMSNorm, OfSum, Doubled])
def test_the_input_has_the_bits_of_one_process(monkeypatch, edge, fusions, dtype, form, kind):
    form = FORMS[form]
    topology, runtime, exchanged = EDGES[edge]
    provider = PROVIDERS[fusions]
    groups = topology.get("attention_dp", 1)
    residuals = [512 * rows_of(f"x{dp}", 4) for dp in range(groups)]  # next to these bfloat16 has no quarters
    contributions = [3 * rows_of(f"a{dp}", 4) for dp in range(groups)]
    total = (torch.cat(contributions) + torch.cat(residuals)).float()
    wanted = wanted_of(form, norm_of(kind, dtype), total, dtype)
    if dtype == torch.bfloat16:
        assert (total.to(dtype) != total).any()
        if kind is RMSNorm and form in KNOWN:
            assert not same(form(norm_of(kind, dtype)(total.to(dtype))), wanted), "nothing is rounded in this test"

    one_pass = []
    fused = SharedGroup.sum_add_norm

    def seen(self, term, residual, spec, counts=None, key="", quantized=None):
        one_pass.append(quantized is not None)
        return fused(self, term, residual, spec, counts, key, quantized)

    monkeypatch.setattr(SharedGroup, "sum_add_norm", seen)

    def rank_main(parallel, batch, make):
        read = AddNormRead(quantize=form)
        attn, ffn = make(
            (declare_attn(), norm("attn"), {"fusions": provider}),
            (declare_ffn(read=read, sparse=edge == "scattered"), norm_of(kind, dtype), {"fusions": provider}),
        )
        dp = parallel.at.dp
        enter(attn, batch, residuals[dp].to(dtype))
        term = term_of(contributions[dp], parallel.attention_tp).to(dtype)
        made = ffn.prepare(attn.finish(term, batch), batch)
        rows = slice(2 * parallel.rank, 2 * parallel.rank + 2) if edge == "scattered" else slice(None)
        own = rows if edge == "scattered" else slice(4 * dp, 4 * dp + 4)
        assert torch.equal(batch.residual_stream.residual.tensor, total[own].to(dtype))
        assert same(made, tuple(one[rows] for one in wanted))

    for world in (ThreadWorld, SharedThreadWorld):
        monkeypatch.setattr(stacks.worlds, "ThreadWorld", world)
        _, events = on_ranks(rank_main, tokens=(4,) * groups, runtime=runtime, **topology)
        assert set(ops(events)) == set(exchanged)
    if fusions == "shared memory" and edge in ("summed", "scattered") and kind is RMSNorm:
        assert one_pass == [form in KNOWN] * 2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [RMSNorm, OfSum, Doubled])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_input_that_nothing_is_pending_for_and_one_with_an_addition(dtype, form, kind):
    form = FORMS[form]
    value, extra = 3.7 * rows_of("x", 4), 64 * rows_of("extra", 4)

    def rank_main(parallel, batch, make):
        layernorm = norm_of(kind, dtype)
        read = AddNormRead(quantize=form)
        alone = read.read(LayerResidual(value.to(dtype), FULL), layernorm)[0]
        rounded = value.to(dtype)
        assert same(alone, wanted_of(form, layernorm, rounded.float(), dtype))
        attn, ffn = make((declare_attn(), norm("attn")), (declare_ffn(read=read), layernorm))
        enter(attn, batch, rows_of("r", 4).to(dtype))
        output = attn.finish(value.to(dtype), batch)
        made = ffn.prepare(output, batch, post_residual_addition=extra.to(dtype))
        total = rows_of("r", 4).to(dtype).float() + rounded.float() + extra.to(dtype).float()
        assert same(made, wanted_of(form, layernorm, total, dtype))

    on_ranks(rank_main)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_finalize_that_is_left_to_the_input_is_made_in_its_format(monkeypatch, dtype, form):
    form = FORMS[form]
    monkeypatch.setattr(stacks.worlds, "ThreadWorld", SharedThreadWorld)
    outputs = torch.randn(2, 4, 3, HIDDEN, generator=torch.Generator().manual_seed(0)).to(dtype)
    weights = torch.rand(4, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    residual = 512 * rows_of("x", 4).to(dtype)

    def rank_main(parallel, batch, make):
        layernorm = norm_of(RMSNorm, dtype)
        over = parallel.bound_sum(SumGroup.TP)
        terms = [SumHandoff(one, weights, over).combined() for one in outputs]
        total = terms[0].float() + terms[1].float() + residual.float()
        candidate = install_shared_memory_fusion().attention_input(None)[0]
        handoff = SumHandoff(outputs[parallel.rank], weights, over)
        made, updated = candidate.run(handoff, None, residual, layernorm, form=form)
        assert torch.equal(updated, total.to(dtype)) and same(made, wanted_of(form, layernorm, total, dtype))

    on_ranks(rank_main, attention_tp=2)


def test_a_format_that_only_looks_like_one_of_the_kernels_is_called():
    class Halved(Quantization):
        def __call__(self, normalized: Tensor) -> tuple[Tensor, ...]:
            return super().__call__(normalized / 2)

    value, layernorm = 3.7 * rows_of("x", 4).float(), norm_of(RMSNorm, torch.float32)
    form = Halved(torch.int8, torch.tensor(0.05))
    made = AddNormRead(quantize=form).read(LayerResidual(value, FULL), layernorm)[0]
    assert same(made, form(layernorm(value)))


def test_a_format_without_rows_has_none_either():
    for form in FORMS.values():
        for kind in (RMSNorm, Doubled):
            read = AddNormRead(quantize=form)
            made = read.read(LayerResidual(torch.empty(0, HIDDEN), FULL), norm_of(kind, torch.float32))[0]
            assert [one.shape[0] for one in made] == [0] * len(made) and made[0].shape == (0, HIDDEN)


@pytest.mark.parametrize("topology", [{"attention_dp": 2}, {"attention_dp": 2, "attention_tp": 2}])
@pytest.mark.parametrize("form", FORMS)
def test_all_members_of_an_input_move_together(topology, form):
    """They arrive on compute's rows; before the gather where the read asks for it."""
    form = FORMS[form]

    def rank_main(parallel, batch, make):
        before = AddNormRead(quantize=form, before_gather=True)
        after = AddNormRead(quantize=form)
        inputs = []
        for read in (before, after):
            attn, ffn = layer(make, ffn=declare_ffn(read=read))
            dp = parallel.at.dp
            enter(attn, batch, rows_of(f"x{dp}", 4))
            handle = attn.finish(term_of(rows_of(f"a{dp}", 4), parallel.attention_tp), batch)
            inputs.append(ffn.prepare(handle, batch))
        total = torch.cat([rows_of(f"x{at}", 4) + rows_of(f"a{at}", 4) for at in range(2)])
        want = form(norm("ffn")(total))
        return all(same(made, want) for made in inputs)

    assert all(on_ranks(rank_main, tokens=(4, 4), **topology)[0])


@pytest.mark.parametrize(
    ("dtype", "scale", "text"),
    [
        (torch.int16, None, "nothing is quantized to"),
        (torch.int8, torch.ones(2), "is one float32"),
        (torch.int8, torch.ones(1, 1, 1), "is one float32"),
        (torch.int8, torch.tensor(0.0), "positive and finite"),
        (torch.int8, torch.tensor(-1.0), "positive and finite"),
        (torch.int8, torch.tensor(torch.nan), "positive and finite"),
    ],
)
def test_what_is_no_format_is_refused(dtype, scale, text):
    with pytest.raises(ValueError, match=text):
        Quantization(dtype, scale)
