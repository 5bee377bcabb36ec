"""Hyper-connections by their kernels, against the definition: bits, gradients, and what reaches the residual."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from boundary.kernels import blocks
from boundary.kernels.mhc import collapse, mix, naive, triton
from boundary.kernels.moe_finalize import triton as weighing
from boundary.layout import FULL
from boundary.residual import LayerResidual
from boundary.residual.mhc import MhcRead, MhcUpdate

from .interpreting import interpreted
from .rounding import rounded_once
from .test_add_norm import draw, strided
from .test_moe_finalize import between_nans

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """A row of a few elements is several programs' already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks.block_of, "__defaults__", (16,))
        yield


def parts(rows: int, count: int, hidden: int, dtype: torch.dtype, wide: torch.dtype) -> tuple[Tensor, ...]:
    """Streams, `comb`, `post` and a contribution; the coefficients in `wide`."""
    return (
        draw(rows, count, hidden, dtype=dtype),
        draw(rows, count, count, dtype=wide, seed=1),
        draw(rows, count, dtype=wide, seed=2),
        draw(rows, hidden, dtype=dtype, seed=3),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=15)
@given(
    rows=st.integers(0, 4),
    count=st.integers(1, 5),
    hidden=st.integers(1, 35),
    in_half=st.booleans(),
    apart=st.booleans(),
)
def test_both_are_their_definitions_to_the_bit(
    dtype: torch.dtype, rows: int, count: int, hidden: int, in_half: bool, apart: bool
):
    streams, comb, post, contribution = parts(rows, count, hidden, dtype, dtype if in_half else torch.float32)
    wanted = naive.mix(streams, comb, post, contribution)
    right = torch.einsum("rij,rjh->rih", comb.double(), streams.double())
    right = right + post.double()[..., None] * contribution.double()[:, None]
    assert rounded_once(wanted, right)
    collapsed = (post.double()[..., None] * streams.double()).sum(1)
    if apart:
        streams = between_nans(streams)
        comb, contribution = comb.mT.contiguous().mT, strided(contribution)
    with interpreted():
        made, sums = triton.mix(streams, comb, post, contribution), weighing.moe_finalize(streams, post, None, None)
    assert made is not None and made.dtype == dtype and made.is_contiguous() and torch.equal(made, wanted)
    assert sums is not None and torch.equal(sums, collapse(streams, post)) and rounded_once(sums, collapsed)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=6)
@given(rows=st.integers(0, 2), count=st.integers(1, 3), hidden=st.integers(1, 35), apart=st.booleans())
def test_gradients_of_the_kernels_are_the_definitions(
    dtype: torch.dtype, rows: int, count: int, hidden: int, apart: bool
):
    inputs, pre = parts(rows, count, hidden, dtype, torch.float32), draw(rows, count, dtype=torch.float32, seed=6)
    direction, of_rows = draw(rows, count, hidden, dtype=dtype, seed=4), draw(rows, hidden, dtype=dtype, seed=5)

    def run(by, streams: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in (streams, *others)]
        mixed = torch.autograd.grad(by(*leaves), leaves, direction.to(streams.dtype))
        lone = [leaves[0], pre.to(others[0].dtype).requires_grad_()]
        return *mixed, *torch.autograd.grad(collapse(*lone), lone, of_rows.to(streams.dtype))

    wanted = run(naive.mix, *(one.double() for one in inputs))
    if apart:
        inputs = (between_nans(inputs[0]), *inputs[1:])
    with interpreted():
        found = run(mix, *inputs)
    for back, right in zip(found, wanted, strict=True):
        assert rounded_once(back, right)


def test_gradients_of_the_definition_are_right_twice():
    inputs = [one.requires_grad_() for one in parts(2, 2, 3, torch.float64, torch.float64)]
    for run, leaves in ((mix, inputs), (collapse, [inputs[0], inputs[2]])):
        assert torch.autograd.gradcheck(run, leaves)
        assert torch.autograd.gradgradcheck(run, leaves)


def test_what_the_kernel_does_not_take_is_the_definitions():
    with interpreted():
        many = parts(1, triton.STREAMS + 1, 2, torch.float32, torch.float32)
        assert triton.mix(*many) is None and torch.equal(mix(*many), naive.mix(*many))
        wide = parts(1, 2, 2, torch.float32, torch.float64)
        assert torch.equal(mix(*wide), naive.mix(*wide))


def test_shapes_that_do_not_go_together_are_refused():
    streams, comb, post, contribution = parts(2, 3, 4, torch.float32, torch.float32)
    for wrong in ((comb[:1], post, contribution), (comb, post[:, :2], contribution), (comb, post, contribution[:1])):
        with pytest.raises(ValueError, match="are not mixed by"):
            mix(streams, *wrong)
    with pytest.raises(ValueError, match="choices"):
        collapse(streams, post[:, :2])


def test_a_residual_is_read_and_updated_by_the_kernels(monkeypatch: pytest.MonkeyPatch):
    streams, comb, post, contribution = parts(3, 2, 5, torch.bfloat16, torch.float32)
    read, update = MhcRead(lambda _: (2 * post, post, comb), 2, 5), MhcUpdate(2)

    def run() -> tuple[Tensor, Tensor]:
        value, residual = read.read(LayerResidual(streams.flatten(1), FULL), lambda value: value)
        return value, update.apply(contribution, residual).tensor

    wanted = collapse(streams, 2 * post), naive.mix(streams, comb, post, contribution).flatten(1)
    assert all(torch.equal(a, b) for a, b in zip(run(), wanted, strict=True))
    ran = []
    for owner, name in ((triton, "mix"), (weighing, "moe_finalize")):
        kernel = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, kernel=kernel, name=name: ran.append(name) or kernel(*args))
    with interpreted():
        made = run()
    assert ran == ["moe_finalize", "mix"]
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))
