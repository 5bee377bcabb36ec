"""The combination of expert outputs by its kernels, against the definition: bits, norms, gradients, and scaling."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from boundary.fusions.all_reduce import SumHandoff
from boundary.kernels import blocks
from boundary.kernels.moe_finalize import moe_finalize, moe_finalize_add_norm, naive, triton
from boundary.kernels.norms import NormFormula
from boundary.layout import SumGroup
from boundary.parallel import BoundSum, SoloGroup

from .interpreting import interpreted
from .rounding import rounded_once
from .test_add_norm import KINDS, close, draw, formula, strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """A row of a few elements is several programs' already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks.block_of, "__defaults__", (16,))
        yield


def between_nans(value: Tensor) -> Tensor:
    """The same values, with rows and choices apart in memory that is NaN in between."""
    around = value.new_full((value.shape[0] + 1, value.shape[1] + 2, value.shape[2] + 3), torch.nan)
    around[1:, 1:-1, 2:-1] = value
    return around[1:, 1:-1, 2:-1]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=15)
@given(
    rows=st.integers(0, 4),
    choices=st.integers(0, 5),
    hidden=st.integers(1, 35),
    with_shared=st.booleans(),
    scaling=st.sampled_from([None, 2.5]),
    in_single=st.booleans(),
    strange=st.booleans(),
)
def test_it_is_the_definition_to_the_bit(
    dtype: torch.dtype,
    rows: int,
    choices: int,
    hidden: int,
    with_shared: bool,
    scaling: float | None,
    in_single: bool,
    strange: bool,
):
    outputs = draw(rows, choices, hidden, dtype=dtype)
    weights = draw(rows, choices, dtype=torch.float32 if in_single else dtype, seed=1)
    shared = draw(rows, hidden, dtype=dtype, seed=2) if with_shared else None
    wanted = naive.moe_finalize(outputs, weights, shared, scaling)
    right = (outputs.double() * weights.double()[..., None]).sum(1) * (scaling or 1)
    right = right if shared is None else right + shared.double()
    assert rounded_once(wanted, right)
    if strange:
        outputs, weights = between_nans(outputs), weights.t().contiguous().t()
        shared = None if shared is None else strided(shared)
    with interpreted():
        made = triton.moe_finalize(outputs, weights, shared, scaling)
    assert made is not None and made.dtype == dtype and made.is_contiguous()
    assert torch.equal(made, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=6)
@given(
    rows=st.integers(0, 3),
    choices=st.integers(1, 3),
    hidden=st.integers(5, 70),
    with_shared=st.booleans(),
    scaling=st.sampled_from([None, 2.5]),
)
def test_with_residual_and_norm_it_is_the_definition(
    kind: str, dtype: torch.dtype, rows: int, choices: int, hidden: int, with_shared: bool, scaling: float | None
):
    outputs, weights = draw(rows, choices, hidden, dtype=dtype), draw(rows, choices, dtype=torch.float32, seed=1)
    shared = draw(rows, hidden, dtype=dtype, seed=2) if with_shared else None
    residual, norm_of = draw(rows, hidden, dtype=dtype, seed=3), formula(kind, hidden, dtype)
    wanted = naive.moe_finalize_add_norm(outputs, weights, residual, norm_of, shared, scaling)
    weight, bias = (one if one is None else one.double() for one in (norm_of.weight, norm_of.bias))
    right, _ = naive.moe_finalize_add_norm(
        outputs.double(),
        weights.double(),
        residual.double(),
        replace(norm_of, weight=weight, bias=bias),
        None if shared is None else shared.double(),
        scaling,
    )
    with interpreted():
        made = triton.moe_finalize_add_norm(between_nans(outputs), weights, strided(residual), norm_of, shared, scaling)
    assert made is not None
    assert torch.equal(made[1], wanted[1]) and rounded_once(made[0], right) and rounded_once(wanted[0], right)
    assert made[0].dtype == wanted[0].dtype == dtype


def test_the_sum_is_rounded_once_and_its_norm_is_that_of_the_unrounded():
    """Terms of which each rounding would lose one: 256 + 1 is 256 in bfloat16."""
    outputs = torch.tensor([256.0, 1.0, 1.0, -256.0]).bfloat16().view(1, 4, 1).repeat(1, 1, 3)
    weights = torch.ones(1, 4).bfloat16()
    norm_of = formula("rms", 3, torch.bfloat16)
    with interpreted():
        for path in (moe_finalize, triton.moe_finalize):
            made = path(outputs, weights, None, None)
            assert made is not None and made.tolist() == [[2.0] * 3]
        residual = torch.tensor([[512.0, 0.0, 0.0]]).bfloat16()
        normed, total = moe_finalize_add_norm(outputs, weights, residual, norm_of)
    assert total.tolist() == [[512.0, 2.0, 2.0]]
    right = naive.norm(torch.tensor([[514.0, 2.0, 2.0]]), norm_of, torch.bfloat16)
    assert close(normed, right)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_the_kernels_are_the_definitions(dtype: torch.dtype):
    tensors = [draw(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate([(3, 2, 9), (3, 2), (3, 9), (3, 9)])]
    weight, bias = draw(9, dtype=dtype, seed=5), draw(9, dtype=dtype, seed=6)
    given = formula("layer", 9, dtype)

    def run(with_norm, without, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        outputs, weights, shared, residual, weight, bias = leaves
        norm_of = NormFormula(given.kind, weight, given.eps, bias)
        made = (*with_norm(outputs, weights, residual, norm_of, shared, 2.5), without(outputs, weights, shared, None))
        return torch.autograd.grad(sum((one.float() ** 2).sum() for one in made), leaves)  # type: ignore[arg-type]

    leaves = [one.requires_grad_() for one in (*tensors, weight, bias)]
    wanted = run(naive.moe_finalize_add_norm, naive.moe_finalize, leaves)
    with interpreted():
        found = run(moe_finalize_add_norm, moe_finalize, leaves)
    for back, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(back, right, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_the_definition_are_right(kind: str):
    shapes = [(2, 3, 4), (2, 3), (2, 4), (2, 4)]
    inputs = [draw(*shape, dtype=torch.float64, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    norm_of = formula(kind, 4, torch.float64)

    def run(outputs: Tensor, weights: Tensor, shared: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return *moe_finalize_add_norm(outputs, weights, residual, norm_of, shared, 2.5), moe_finalize(outputs, weights)

    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_what_the_kernels_do_not_take_is_the_definitions():
    with interpreted():
        choices = triton.CHOICES + 1
        many, weights = draw(2, choices, 3, dtype=torch.float32), draw(2, choices, dtype=torch.float32, seed=1)
        norm_of, residual = formula("rms", 3, torch.float32), draw(2, 3, dtype=torch.float32)
        assert triton.moe_finalize(many, weights, None, None) is None
        assert triton.moe_finalize_add_norm(many, weights, residual, norm_of, None, None) is None
        assert torch.equal(moe_finalize(many, weights), naive.moe_finalize(many, weights))
        made = moe_finalize_add_norm(many, weights, residual, norm_of)
        assert torch.equal(made[0], naive.moe_finalize_add_norm(many, weights, residual, norm_of)[0])
        wide = many.double()
        assert torch.equal(moe_finalize(wide, weights), naive.moe_finalize(wide, weights))


def test_shapes_that_do_not_go_together_are_refused():
    outputs, weights, rows = torch.zeros(2, 3, 4), torch.zeros(2, 3), torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"not \[rows, choices, hidden\]"):
        moe_finalize(outputs, weights[:, :1])
    with pytest.raises(ValueError, match="do not add to"):
        moe_finalize(outputs, weights, rows[:1])
    with pytest.raises(ValueError, match="do not add to"):
        moe_finalize_add_norm(outputs, weights, rows[:, :1], formula("rms", 4, torch.float32))


def test_a_handoff_is_combined_by_the_kernel(monkeypatch: pytest.MonkeyPatch):
    outputs, weights = draw(3, 2, 5, dtype=torch.bfloat16), draw(3, 2, dtype=torch.float32, seed=1)
    handoff = SumHandoff(outputs, weights, BoundSum(SumGroup.MOE_OUTPUT, SoloGroup(), None))
    wanted = (outputs.float() * weights[..., None]).sum(-2).bfloat16()
    assert torch.equal(handoff.combined(), wanted)
    ran = []
    kernel = triton.moe_finalize
    monkeypatch.setattr(triton, "moe_finalize", lambda *args: ran.append(args) or kernel(*args))
    with interpreted():
        assert torch.equal(handoff.combined(), wanted) and ran
