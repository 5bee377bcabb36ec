"""Add and norm through Triton's kernels, interpreted, against the definition: shapes, dtypes, strides, gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from boundary.kernels import gpu
from boundary.kernels.add_norm import add_norm, cpu, naive, norm, triton
from boundary.kernels.norms import Kind, NormFormula
from tests.norms import KINDS

from .interpreting import interpreted
from .test_add_norm import draw, formula, is_norm, strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: How far a gradient may be off, relative to the largest: its rounding, and sums of another order.
GRADIENT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-9}


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with interpreted():
        yield


def leaf(value: Tensor) -> Tensor:
    """The same values and strides, as what gradients are taken of."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value).requires_grad_()


def test_the_kernels_run_while_interpreted_and_not_otherwise():
    value = draw(2, 8, dtype=torch.float32)
    assert gpu.runs(value, None, value) and not gpu.runs(value, value.to("meta")) and not gpu.runs()
    assert not gpu.runs(value.to_sparse()) and not gpu.runs(torch.view_as_complex(value.view(2, 4, 2)).conj().imag)
    with torch.autograd.forward_ad.dual_level():
        assert not gpu.runs(value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=12)
@given(rows=st.integers(0, 3), hidden=st.integers(1, 2100), value_apart=st.booleans(), residual_apart=st.booleans())
@example(rows=1, hidden=1, value_apart=False, residual_apart=False)
@example(rows=3, hidden=64, value_apart=True, residual_apart=False)
@example(rows=3, hidden=65, value_apart=False, residual_apart=True)
def test_it_is_the_definition(
    kind: str, dtype: torch.dtype, rows: int, hidden: int, value_apart: bool, residual_apart: bool
):
    value, residual = draw(rows, hidden, dtype=dtype, seed=3), draw(rows, hidden, dtype=dtype, seed=4)
    if value_apart:
        value = strided(value)
    if residual_apart:
        residual = strided(residual)
    before = value.clone(), residual.clone()
    norm_of = formula(kind, hidden, dtype)
    made = triton.add_norm(value, residual, norm_of)
    assert made is not None, "the kernels declined"
    normed, total = made
    assert torch.equal(total, naive.add_norm(value, residual, norm_of)[1]), "the sum has the definition's bits"
    assert normed.dtype == dtype and normed.shape == value.shape
    assert is_norm(normed, value.float() + residual.float(), norm_of)
    assert torch.equal(value, before[0]) and torch.equal(residual, before[1]), "inputs are not written to"
    assert normed.is_contiguous() and total.is_contiguous()
    alone = triton.norm(value, norm_of)
    assert alone is not None and alone.dtype == dtype and is_norm(alone, value.float(), norm_of)


def test_the_norm_is_that_of_the_sum_before_it_is_rounded():
    """In bfloat16 both sums are 256, and would have no variance."""
    value, residual = torch.tensor([[256.0, 256.0]]).bfloat16(), torch.tensor([[0.5, -0.5]]).bfloat16()
    made = triton.add_norm(value, residual, NormFormula(Kind.LAYER, None, 0.0))
    assert made is not None
    assert made[1].tolist() == [[256.0, 256.0]] and made[0].tolist() == [[1.0, -1.0]]


def test_no_rows_are_no_launch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton, "_forward", None)
    monkeypatch.setattr(triton, "_backward", None)
    value = draw(2, 0, 7, dtype=torch.float32).requires_grad_()
    norm_of = formula("layer", 7, torch.float32)
    assert norm_of.weight is not None
    norm_of.weight.requires_grad_()
    made = triton.add_norm(value, value, norm_of)
    assert made is not None and made[0].shape == made[1].shape == (2, 0, 7)
    made[0].sum().backward()
    assert norm_of.weight.grad is not None and torch.equal(norm_of.weight.grad, torch.zeros(7))


@pytest.mark.parametrize("shape", [(7,), (2, 3, 7)])
def test_any_number_of_leading_dims_is_taken(shape: tuple[int, ...]):
    value, residual = draw(*shape, dtype=torch.float32), draw(*shape, dtype=torch.float32, seed=1)
    made = triton.add_norm(value, residual, formula("rms", 7, torch.float32))
    assert made is not None
    assert torch.equal(made[1], value + residual) and made[0].shape == shape
    assert is_norm(made[0], value + residual, formula("rms", 7, torch.float32))


def test_columns_apart_and_expanded_rows_are_taken():
    for value in (draw(7, 4, dtype=torch.float32).t(), draw(1, 7, dtype=torch.float32).expand(4, 7)):
        made = triton.add_norm(value, value, formula("rms", 7, torch.float32))
        assert made is not None
        assert torch.equal(made[1], value + value)
        assert is_norm(made[0], value + value, formula("rms", 7, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nans_come_out_as_they_do_of_the_definition(dtype: torch.dtype):
    value = draw(4, 70, dtype=dtype)
    value[0, 3], value[1, 69], value[2, 40] = torch.inf, -torch.inf, torch.nan
    for kind in KINDS:
        made = triton.add_norm(value, torch.zeros_like(value), formula(kind, 70, dtype))
        wanted = naive.add_norm(value, torch.zeros_like(value), formula(kind, 70, dtype))
        assert made is not None
        for found, right in zip(made, wanted, strict=True):
            assert torch.equal(found.isnan(), right.isnan()) and torch.equal(found.isinf(), right.isinf())


def test_the_parameters_may_be_wider_than_the_rows():
    value, norm_of = draw(3, 33, dtype=torch.bfloat16), formula("gemma", 33, torch.float32)
    made = triton.add_norm(value, value, norm_of)
    assert made is not None and is_norm(made[0], value.float() + value.float(), norm_of)


def test_what_they_cannot_do_is_left_to_others():
    value = draw(3, 8, dtype=torch.float32)
    norm_of = formula("rms", 8, torch.float32)
    assert triton.add_norm(value, value.bfloat16(), norm_of) is None
    assert triton.add_norm(value, value[:1], norm_of) is None
    assert triton.add_norm(value, value, formula("rms", 7, torch.float32)) is None
    assert triton.add_norm(value.double(), value.double(), norm_of) is None
    assert triton.add_norm(value, value, formula("rms", 8, torch.float64)) is None
    assert triton.norm(torch.zeros(()), norm_of) is None
    longer = torch.zeros(1, triton.LONGEST + 1)
    assert triton.norm(longer, NormFormula(norm_of.kind, None, 1e-6)) is None
    assert add_norm(value.double(), value.double(), formula("rms", 8, torch.float64))[0].dtype == torch.float64


def test_the_dispatcher_asks_the_kernels_first(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise AssertionError("another path was asked")

    for path in (cpu, naive):
        monkeypatch.setattr(path, "add_norm", refuse)
        monkeypatch.setattr(path, "norm", refuse)
    value = draw(3, 8, dtype=torch.float32)
    add_norm(value, value, formula("rms", 8, torch.float32))
    norm(value, formula("rms", 8, torch.float32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=8)
@given(
    rows=st.integers(1, 5),
    hidden=st.integers(2, 300),
    programs=st.sampled_from([1, 2, 256]),
    both=st.booleans(),
    frozen=st.booleans(),
    apart=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_gradients_are_those_of_the_definition(
    kind: str, dtype: torch.dtype, rows: int, hidden: int, programs: int, both: bool, frozen: bool, apart: list[bool]
):
    drawn = [draw(rows, hidden, dtype=dtype, seed=seed) for seed in range(3, 7)]
    value, residual, *seeds = (strided(one) if is_apart else one for one, is_apart in zip(drawn, apart, strict=True))
    if not both:
        seeds = seeds[:1]
    given_formula = formula(kind, hidden, dtype)

    def found(
        path: Callable[[Tensor, Tensor, NormFormula], tuple[Tensor, Tensor] | None], wide: bool
    ) -> tuple[Tensor, ...]:
        def own(tensor: Tensor) -> Tensor:
            return leaf(tensor.float() if wide else tensor)

        terms = [own(value), own(residual)]
        weight, bias = (None if p is None else own(p) for p in (given_formula.weight, given_formula.bias))
        if frozen and weight is not None:
            weight.requires_grad_(False)
        norm_of = NormFormula(given_formula.kind, weight, given_formula.eps, bias, given_formula.offset)
        made = path(terms[0], terms[1], norm_of)
        assert made is not None
        leaves = terms + [p for p in (weight, bias) if p is not None and p.requires_grad]
        return torch.autograd.grad(made[: len(seeds)], leaves, [s.float() if wide else s for s in seeds])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "PROGRAMS", programs)
        patch.setattr("boundary.kernels.add_norm.backward.backward", None)
        own = found(triton.add_norm, False)
    for made, wanted in zip(own, found(naive.add_norm, True), strict=True):
        assert made.dtype == dtype
        bound = GRADIENT_TOLERANCE[dtype] * wanted.abs().max().clamp_min(1.0)
        assert (made.float() - wanted).abs().max() <= bound


def test_the_gradient_of_a_norm_alone_is_the_definitions():
    value = draw(3, 33, dtype=torch.float32)
    norm_of = formula("gemma", 33, torch.float32)
    own, wanted = leaf(value), leaf(value)
    made = triton.norm(own, norm_of)
    assert made is not None
    made.square().sum().backward()
    naive.norm(wanted, norm_of, torch.float32).square().sum().backward()
    assert own.grad is not None and wanted.grad is not None and torch.allclose(own.grad, wanted.grad, atol=1e-5)


def test_a_gradient_of_the_sum_alone_passes_through():
    value = draw(3, 33, dtype=torch.bfloat16).requires_grad_()
    made = triton.add_norm(value, draw(3, 33, dtype=torch.bfloat16), formula("rms", 33, torch.bfloat16))
    assert made is not None
    seed = draw(3, 33, dtype=torch.bfloat16, seed=5)
    assert torch.equal(torch.autograd.grad(made[1], value, seed)[0], seed)


def test_rows_too_long_for_the_backward_kernel_have_torchs_gradient():
    hidden = triton.LONGEST_BACK + 1
    own, wanted = (draw(1, hidden, dtype=torch.float32).requires_grad_() for _ in range(2))
    norm_of = formula("rms", hidden, torch.float32)
    made = triton.norm(own, norm_of)
    assert made is not None
    seed = draw(1, hidden, dtype=torch.float32, seed=5)
    found = torch.autograd.grad(made, own, seed)[0]
    right = torch.autograd.grad(naive.norm(wanted, norm_of, torch.float32), wanted, seed)[0]
    assert torch.allclose(found, right, atol=1e-5)


def test_a_gradient_has_a_gradient():
    value = draw(2, 5, dtype=torch.float32).requires_grad_()
    norm_of = formula("rms", 5, torch.float32)

    def second(path: Callable[[Tensor, NormFormula], Tensor | None]) -> Tensor:
        made = path(value, norm_of)
        assert made is not None
        (first,) = torch.autograd.grad(made.square().sum(), value, create_graph=True)
        return torch.autograd.grad(first.square().sum(), value)[0]

    assert torch.allclose(second(triton.norm), second(lambda x, f: naive.norm(x, f, x.dtype)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_autograds_recording_changes_no_bit(dtype: torch.dtype):
    value, residual = draw(3, 77, dtype=dtype), draw(3, 77, dtype=dtype, seed=1)
    plain = triton.add_norm(value, residual, formula("rms", 77, dtype))
    recorded = triton.add_norm(value.clone().requires_grad_(), residual, formula("rms", 77, dtype))
    assert plain is not None and recorded is not None and recorded[0].requires_grad
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
