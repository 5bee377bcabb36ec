"""Add and norm in one pass, against the definition: shapes, dtypes, strides, gradients, and what it declines."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from boundary.compiled import dtypes, library
from boundary.kernels.add_norm import add_norm, cpu, naive, norm
from boundary.kernels.norms import Kind, NormFormula, formula_of
from boundary.residual.add_norm import GemmaRMSNorm, RMSNorm
from boundary.residual.add_norm import add_norm as boundary_add_norm
from tests.norms import KINDS, norm_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
#: How far a normalized value may be off, relative to its size: a rounding, and what sums of another order differ by.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float64: 1e-14}


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def formula(kind: str, hidden: int, dtype: torch.dtype) -> NormFormula:
    weight, bias = draw(hidden, dtype=dtype, seed=1), draw(hidden, dtype=dtype, seed=2)
    return norm_of(kind, weight, bias)


def strided(value: Tensor) -> Tensor:
    """The same values, with rows apart in memory that is NaN in between."""
    around = torch.full((value.shape[0], value.shape[1] + 5), torch.nan, dtype=value.dtype)
    around[:, 3:-2] = value
    return around[:, 3:-2]


def close(found: Tensor, wanted: Tensor) -> bool:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    bound = TOLERANCE[found.dtype] * (wanted.double().abs() + 1)
    return bool(((found.double() - wanted.double()).abs() <= bound).all())


def is_norm(found: Tensor, total: Tensor, norm_of: NormFormula) -> bool:
    """Whether `found` is the norm of `total`, `[..., hidden]` unrounded, rounded once to the nearest of its dtype."""
    wanted = naive.norm(total, norm_of, total.dtype)
    rounding = torch.finfo(found.dtype).eps / 2 * wanted.abs() + torch.finfo(found.dtype).tiny
    return bool(
        ((found.to(total.dtype) - wanted).abs() <= rounding + TOLERANCE[total.dtype] * (wanted.abs() + 1)).all()
    )


def test_there_is_a_library_for_all_dtypes():
    """Without it every test here compares the definition with itself."""
    assert library() is not None and set(dtypes()) == set(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=25)
@given(rows=st.integers(0, 5), hidden=st.integers(1, 2100), apart=st.booleans())
def test_it_is_the_definition(kind: str, dtype: torch.dtype, rows: int, hidden: int, apart: bool):
    value, residual = draw(rows, hidden, dtype=dtype, seed=3), draw(rows, hidden, dtype=dtype, seed=4)
    if apart:
        value, residual = strided(value), strided(residual)
    before = value.clone(), residual.clone()
    norm_of = formula(kind, hidden, dtype)
    made = cpu.add_norm(value, residual, norm_of)
    assert made is not None, "the library declined"
    normed, total = made
    wanted, wanted_total = naive.add_norm(value, residual, norm_of)
    assert torch.equal(total, wanted_total), "the sum has the definition's bits"
    assert normed.shape == wanted.shape and normed.dtype == wanted.dtype
    assert is_norm(normed, naive.wide(value) + naive.wide(residual), norm_of)
    assert torch.equal(value, before[0]) and torch.equal(residual, before[1]), "inputs are not written to"
    assert normed.is_contiguous() and total.is_contiguous()
    alone = cpu.norm(value, norm_of)
    assert alone is not None and is_norm(alone, naive.wide(value), norm_of)


@pytest.mark.parametrize("shape", [(7,), (2, 3, 7), (2, 0, 7)])
def test_any_number_of_leading_dims_is_taken(shape: tuple[int, ...]):
    value, residual = draw(*shape, dtype=torch.float32), draw(*shape, dtype=torch.float32, seed=1)
    made = cpu.add_norm(value, residual, formula("rms", 7, torch.float32))
    assert made is not None
    wanted = naive.add_norm(value, residual, formula("rms", 7, torch.float32))
    assert close(made[0], wanted[0]) and torch.equal(made[1], wanted[1])


def test_columns_apart_and_expanded_rows_are_taken():
    for value in (draw(7, 4, dtype=torch.float32).t(), draw(1, 7, dtype=torch.float32).expand(4, 7)):
        made = cpu.add_norm(value, value, formula("rms", 7, torch.float32))
        assert made is not None
        assert torch.equal(made[1], value + value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nans_come_out_as_they_do_of_the_definition(dtype: torch.dtype):
    value = draw(4, 70, dtype=dtype)
    value[0, 3], value[1, 69], value[2, 40] = torch.inf, -torch.inf, torch.nan
    for kind in KINDS:
        made, wanted = (
            path(value, torch.zeros_like(value), formula(kind, 70, dtype)) for path in (cpu.add_norm, naive.add_norm)
        )
        assert made is not None
        for found, right in zip(made, wanted, strict=True):
            assert torch.equal(found.isnan(), right.isnan()) and torch.equal(found.isinf(), right.isinf())


def test_every_bfloat16_survives_and_halves_are_rounded_to_even():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(1, -1)
    made = cpu.add_norm(every, torch.full_like(every, -0.0), formula("rms", 2**16, torch.bfloat16))
    assert made is not None
    same = (made[1] == every) | (made[1].isnan() & every.isnan())
    assert same.all()
    ties = torch.arange(0, 64, dtype=torch.float32).view(1, -1)
    value = (256 + 2 * ties).bfloat16()
    made = cpu.add_norm(value, torch.ones_like(value), formula("rms", 64, torch.bfloat16))
    assert made is not None and torch.equal(made[1], (value.float() + 1).bfloat16())


def test_the_parameters_may_be_wider_than_the_rows():
    value, norm_of = draw(3, 33, dtype=torch.bfloat16), formula("gemma", 33, torch.float32)
    made = cpu.add_norm(value, value, norm_of)
    assert made is not None and close(made[0], naive.add_norm(value, value, norm_of)[0])


def test_what_it_cannot_do_is_left_to_torch():
    value = draw(3, 8, dtype=torch.float32)
    norm_of = formula("rms", 8, torch.float32)
    assert cpu.add_norm(value, value.double(), norm_of) is None
    assert cpu.add_norm(value, value[:1], norm_of) is None
    assert cpu.add_norm(value, value, formula("rms", 7, torch.float32)) is None
    assert cpu.add_norm(value.to("meta"), value.to("meta"), norm_of) is None
    assert cpu.add_norm(value.to(torch.complex64), value.to(torch.complex64), norm_of) is None
    with torch.autograd.forward_ad.dual_level():
        assert cpu.add_norm(value, value, norm_of) is None
    with TorchDispatchMode():
        assert cpu.add_norm(value, value, norm_of) is None
    negative = torch._neg_view(value)
    assert cpu.add_norm(negative, negative, norm_of) is None and close(
        add_norm(negative, negative, norm_of)[1], -2 * value
    )
    turned = NormFormula(Kind.RMS, torch._neg_view(norm_of.weight), 1e-6)  # type: ignore[arg-type]
    assert cpu.add_norm(value, value, turned) is None
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    assert cpu.add_norm(value, value, NormFormula(Kind.RMS, freed, 1e-6)) is None
    mixed = add_norm(value.bfloat16(), value, norm_of)
    assert mixed[0].dtype == mixed[1].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, at its first forward AD
def test_torchs_transforms_and_its_compiler_see_torchs_operations():
    value = draw(3, 8, dtype=torch.float32)
    norm_of = formula("layer", 8, torch.float32)
    wanted = naive.add_norm(value, value, norm_of)
    each = torch.func.vmap(lambda row: add_norm(row, row, norm_of)[0])(value)
    assert close(each, wanted[0])
    _, tangent = torch.func.jvp(lambda x: add_norm(x, x, norm_of)[1], (value,), (torch.ones_like(value),))
    assert torch.equal(tangent, torch.full_like(value, 2.0))
    graph = make_fx(lambda x: add_norm(x, x, norm_of)[0])(value)
    assert close(graph(value + 1), naive.add_norm(value + 1, value + 1, norm_of)[0])
    for module in (RMSNorm(8), GemmaRMSNorm(8)):
        graph = torch.compile(lambda x, module=module: boundary_add_norm(module(x), x, module), fullgraph=True,
                              backend="eager")  # fmt: skip
        with torch.no_grad():
            assert close(graph(value)[0], boundary_add_norm(module(value), value, module)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_right_twice(kind: str):
    value, residual = (draw(3, 5, dtype=torch.float64, seed=seed).requires_grad_() for seed in (1, 2))
    given = formula(kind, 5, torch.float64)
    parameters = [p.clone().requires_grad_() for p in (given.weight, given.bias) if p is not None]

    def run(value: Tensor, residual: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        weight = parameters[0] if given.weight is not None else None
        bias = parameters[1] if given.bias is not None else None
        norm_of = NormFormula(given.kind, weight, given.eps, bias, given.offset)
        return (*add_norm(value, residual, norm_of), norm(value, norm_of))

    assert torch.autograd.gradcheck(run, (value, residual, *parameters))
    assert torch.autograd.gradgradcheck(run, (value, residual, *parameters))


def test_a_weight_that_is_changed_before_its_gradient_is_an_error():
    value, weight = draw(3, 8, dtype=torch.float32), torch.ones(8, requires_grad=True)
    normed, total = add_norm(value.requires_grad_(), value, NormFormula(Kind.RMS, weight, 1e-6))
    with torch.no_grad():
        weight.mul_(100)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (normed.sum() + total.sum()).backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_autograds_recording_changes_no_bit(dtype: torch.dtype):
    value, residual = draw(3, 77, dtype=dtype), draw(3, 77, dtype=dtype, seed=1)
    plain = add_norm(value, residual, formula("rms", 77, dtype))
    recorded = add_norm(value.clone().requires_grad_(), residual, formula("rms", 77, dtype))
    assert recorded[0].requires_grad
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))


def test_the_norms_of_a_model_are_known_and_their_subclasses_are_not():
    class Other(RMSNorm):
        def of_sum(self, total: Tensor, dtype: torch.dtype) -> Tensor:
            return torch.zeros_like(total, dtype=dtype)

    for known in (RMSNorm(8), GemmaRMSNorm(8), nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8), nn.LayerNorm(8)):
        found = formula_of(known, torch.float32)
        assert found is not None
        value = draw(3, 8, dtype=torch.float32)
        assert close(naive.norm(value, found, torch.float32), known(value))
    assert formula_of(nn.LayerNorm([2, 8]), torch.float32) is None
    assert formula_of(lambda value: value, torch.float32) is None
    assert formula_of(Other(8), torch.float32) is None
    value = draw(2, 8, dtype=torch.float32)
    assert torch.equal(boundary_add_norm(value, value, Other(8))[0], torch.zeros(2, 8))
    assert torch.equal(Other(8)(value), torch.zeros(2, 8))
