"""The gated activation's kernels against their definition: shapes, dtypes, strides, gradients, and what they leave."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from boundary.kernels import blocks
from boundary.kernels.silu_mul import naive, silu_mul, silu_mul_halves, triton

from .interpreting import interpreted
from .rounding import rounded_once
from .test_add_norm import close, draw, strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """A row of a few elements is several programs' already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks.block_of, "__defaults__", (16,))
        yield


def through_the_kernel(*inputs: Tensor) -> Tensor:
    with interpreted():
        return triton.silu_mul(*inputs) if len(inputs) == 2 else triton.silu_mul_halves(*inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=12)
@given(rows=st.integers(0, 4), width=st.integers(0, 40), apart=st.booleans())
def test_it_is_the_definition(dtype: torch.dtype, rows: int, width: int, apart: bool):
    gate, up = 4 * draw(rows, width, dtype=dtype), draw(rows, width, dtype=dtype, seed=1)
    right = naive.silu_mul(gate.double(), up.double())
    halves = torch.cat([gate, up], dim=-1)
    if apart:
        gate, up, halves = strided(gate), strided(up), strided(halves)
    made, of_halves = through_the_kernel(gate, up), through_the_kernel(halves)
    assert rounded_once(made, right) and torch.equal(made, of_halves)
    assert rounded_once(naive.silu_mul(gate, up), right) and made.dtype == dtype
    assert made.is_contiguous() and of_halves.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_result_is_rounded_once(dtype: torch.dtype):
    """An activation that is rounded before it is multiplied is off by more than a rounding."""
    gate, up = draw(8, 64, dtype=dtype), draw(8, 64, dtype=dtype, seed=1)
    right = naive.silu_mul(gate.double(), up.double())
    assert rounded_once(naive.silu_mul(gate, up), right) and rounded_once(through_the_kernel(gate, up), right)
    assert not rounded_once(torch.nn.functional.silu(gate) * up, right)


def test_the_ends_of_the_range_come_out_as_they_do_of_the_definition():
    gate = torch.tensor([[torch.inf, -torch.inf, torch.nan, 3e38, -3e38, -100.0, 0.0, -0.0]])
    for up in (torch.ones_like(gate), torch.full_like(gate, -torch.inf)):
        made, wanted = through_the_kernel(gate, up), naive.silu_mul(gate, up)
        torch.testing.assert_close(made, wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=8)
@given(rows=st.integers(0, 3), width=st.integers(1, 35), apart=st.booleans())
def test_gradients_are_the_definitions(dtype: torch.dtype, rows: int, width: int, apart: bool):
    gate, up, direction = (draw(rows, width, dtype=dtype, seed=seed) for seed in range(3))
    wide = [one.double().requires_grad_() for one in (gate, up)]
    wanted = torch.autograd.grad(naive.silu_mul(*wide), wide, direction.double())
    if apart:
        gate, up, direction = strided(gate), strided(up), strided(direction)
    for inputs in ([gate, up], [torch.cat([gate, up], dim=-1)]):
        leaves = [one.detach().requires_grad_() for one in inputs]
        with interpreted():
            made = silu_mul(*leaves) if len(leaves) == 2 else silu_mul_halves(*leaves)
            found = torch.autograd.grad(made, leaves, direction)
        assert torch.equal(made, through_the_kernel(*inputs)), "recording changes no bit"
        for back, right in zip(torch.cat(found, dim=-1).chunk(2, dim=-1), wanted, strict=True):
            assert rounded_once(back, right) and back.dtype == dtype


def test_gradients_of_the_definition_are_right_twice():
    gate, up = (draw(3, 5, dtype=torch.float64, seed=seed).requires_grad_() for seed in (1, 2))
    for run, inputs in ((silu_mul, (gate, up)), (silu_mul_halves, (draw(3, 6, dtype=torch.float64).requires_grad_(),))):
        assert torch.autograd.gradcheck(run, inputs)
        assert torch.autograd.gradgradcheck(run, inputs)
    given = draw(3, 5, dtype=torch.float64, seed=3)
    wanted = torch.autograd.grad(naive.silu_mul(gate, up), (gate, up), given)
    for found, right in zip(naive.gradients(gate, up, given), wanted, strict=True):
        assert close(found, right)


def test_the_kernels_gradient_has_a_gradient():
    def second(path, gate: Tensor, up: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(path(gate, up).sum(), gate, create_graph=True)
        return torch.autograd.grad(first.square().sum(), gate)[0]

    gate, up = (draw(2, 5, dtype=torch.float32, seed=seed).requires_grad_() for seed in (1, 2))
    wanted = second(naive.silu_mul, gate, up)
    with interpreted():
        assert close(second(silu_mul, gate, up), wanted)
        halves = torch.cat([gate, up], dim=-1)
        assert close(second(lambda *_: silu_mul_halves(halves), gate, up), wanted)


def test_other_dtypes_and_shapes_are_the_definitions():
    with interpreted():
        value = draw(2, 6, dtype=torch.float64)
        assert torch.equal(silu_mul(value, value), naive.silu_mul(value, value))
        deep = draw(12, dtype=torch.float32).view(2, 2, 3)
        assert torch.equal(silu_mul(deep, deep), naive.silu_mul(deep, deep))
    with pytest.raises(ValueError, match="does not go with"):
        silu_mul(value, value[:1])
    with pytest.raises(ValueError, match="side by side"):
        silu_mul_halves(value[:, :5])
