"""The combination of expert outputs by its kernels, against the definition: bits, norms, gradients, and scaling."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from boundary.fusions.all_reduce import SumHandoff
from boundary.kernels import blocks
from boundary.kernels.add_norm.naive import wide
from boundary.kernels.moe_finalize import cpu, moe_finalize, moe_finalize_add_norm, naive, triton
from boundary.kernels.norms import NormFormula
from boundary.layout import SumGroup
from boundary.parallel import BoundSum, SoloGroup
from tests.norms import KINDS

from .interpreting import interpreted
from .rounding import rounded_once
from .test_add_norm import DTYPES as LIBRARY_DTYPES
from .test_add_norm import close, draw, formula, is_norm, strided

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


@pytest.mark.parametrize("dtype", LIBRARY_DTYPES)
@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(0, 4),
    choices=st.integers(0, 9),
    hidden=st.integers(1, 140),
    kind=st.sampled_from(KINDS),
    with_shared=st.booleans(),
    scaling=st.sampled_from([None, 2.5]),
    in_single=st.booleans(),
    strange=st.booleans(),
)
@example(rows=2, choices=8, hidden=576, kind="rms", with_shared=True, scaling=2.5, in_single=True, strange=True)
def test_the_library_adds_up_to_the_definitions_bits(
    dtype: torch.dtype,
    rows: int,
    choices: int,
    hidden: int,
    kind: str,
    with_shared: bool,
    scaling: float | None,
    in_single: bool,
    strange: bool,
):
    outputs, residual = draw(rows, choices, hidden, dtype=dtype), draw(rows, hidden, dtype=dtype, seed=3)
    weights = draw(rows, choices, dtype=torch.float32 if in_single else dtype, seed=1)
    shared = draw(rows, hidden, dtype=dtype, seed=2) if with_shared else None
    if strange:
        outputs, weights, residual = between_nans(outputs), weights.t().contiguous().t(), strided(residual)
        shared = None if shared is None else strided(shared)
    before, norm_of = outputs.clone(), formula(kind, hidden, dtype)
    made = cpu.moe_finalize(outputs, weights, shared, scaling)
    with_norm = cpu.moe_finalize_add_norm(outputs, weights, residual, norm_of, shared, scaling)
    assert made is not None and with_norm is not None, "the library declined"
    wanted = naive.moe_finalize(outputs, weights, shared, scaling)
    assert torch.equal(made, wanted) and made.dtype == dtype and made.is_contiguous()
    normed, total = with_norm
    unrounded = naive.total(outputs, weights, shared, scaling) + wide(residual)
    assert torch.equal(total, unrounded.to(dtype)) and total.dtype == dtype and total.is_contiguous()
    assert is_norm(normed, unrounded, norm_of) and normed.dtype == dtype and normed.is_contiguous()
    assert torch.equal(outputs, before), "inputs are not written to"


def test_columns_apart_and_expanded_choices_are_taken():
    weights = draw(4, 3, dtype=torch.float32, seed=1)
    for outputs in (draw(4, 9, 3, dtype=torch.float32).mT, draw(4, 1, 9, dtype=torch.float32).expand(4, 3, 9)):
        made = cpu.moe_finalize(outputs, weights, None, None)
        assert made is not None and torch.equal(made, naive.moe_finalize(outputs, weights))


@pytest.mark.parametrize("dtype", LIBRARY_DTYPES)
def test_infinities_and_nans_come_out_of_the_library_as_they_do_of_the_definition(dtype: torch.dtype):
    outputs, weights = draw(5, 3, 70, dtype=dtype), draw(5, 3, dtype=dtype, seed=1)
    outputs[0, 1, 3], outputs[1, 2, 69], outputs[2, 0, 40], weights[3, 1] = torch.inf, -torch.inf, torch.nan, torch.inf
    outputs[4, 0, 7], weights[4, 0] = torch.inf, 0.0
    residual = torch.zeros(5, 70, dtype=dtype)
    for kind in KINDS:
        made = cpu.moe_finalize_add_norm(outputs, weights, residual, formula(kind, 70, dtype), None, None)
        wanted = naive.moe_finalize_add_norm(outputs, weights, residual, formula(kind, 70, dtype))
        assert made is not None
        for found, right in zip(made, wanted, strict=True):
            assert torch.equal(found.isnan(), right.isnan()) and torch.equal(found.isinf(), right.isinf())


def test_the_sum_is_rounded_once_and_its_norm_is_that_of_the_unrounded():
    """Terms of which each rounding would lose one: 256 + 1 is 256 in bfloat16."""
    outputs = torch.tensor([256.0, 1.0, 1.0, -256.0]).bfloat16().view(1, 4, 1).repeat(1, 1, 3)
    weights = torch.ones(1, 4).bfloat16()
    norm_of = formula("rms", 3, torch.bfloat16)
    with interpreted():
        for path in (naive.moe_finalize, cpu.moe_finalize, triton.moe_finalize):
            made = path(outputs, weights, None, None)
            assert made is not None and made.tolist() == [[2.0] * 3]
        residual = torch.tensor([[512.0, 0.0, 0.0]]).bfloat16()
        both = [
            path(outputs, weights, residual, norm_of, None, None)
            for path in (cpu.moe_finalize_add_norm, triton.moe_finalize_add_norm)
        ]
    right = naive.norm(torch.tensor([[514.0, 2.0, 2.0]]), norm_of, torch.bfloat16)
    for made in both:
        assert made is not None and made[1].tolist() == [[512.0, 2.0, 2.0]] and close(made[0], right)


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
    for made in (found, run(cpu.moe_finalize_add_norm, cpu.moe_finalize, leaves)):
        for back, right in zip(made, wanted, strict=True):
            torch.testing.assert_close(back, right, rtol=4 * torch.finfo(dtype).eps, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(("path", "kind"), [*((naive, kind) for kind in KINDS), (cpu, "layer")])
def test_gradients_of_the_definition_are_right_and_the_librarys(kind: str, path):
    shapes = [(2, 3, 4), (2, 3), (2, 4), (2, 4)]
    inputs = [draw(*shape, dtype=torch.float64, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    norm_of = formula(kind, 4, torch.float64)

    def run(outputs: Tensor, weights: Tensor, shared: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        made = path.moe_finalize_add_norm(outputs, weights, residual, norm_of, shared, 2.5)
        return *made, path.moe_finalize(outputs, weights, None, None)

    assert torch.autograd.gradcheck(run, inputs)
    if kind == "layer":
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
        assert close(made[0], naive.moe_finalize_add_norm(many, weights, residual, norm_of)[0])
        wide = many.double()
        assert torch.equal(moe_finalize(wide, weights), naive.moe_finalize(wide, weights))


def test_what_the_library_does_not_take_is_the_definitions():
    outputs, weights = draw(2, 3, 5, dtype=torch.float32), draw(2, 3, dtype=torch.float64, seed=1)
    residual, norm_of = draw(2, 5, dtype=torch.float32), formula("rms", 5, torch.float32)
    assert cpu.moe_finalize(outputs, weights, None, None) is None, "the definition accumulates these in float64"
    assert torch.equal(moe_finalize(outputs, weights), naive.moe_finalize(outputs, weights))
    weights = weights.float()
    assert cpu.moe_finalize(outputs, weights, residual.double(), None) is None
    assert cpu.moe_finalize_add_norm(outputs, weights, residual.bfloat16(), norm_of, None, None) is None
    for shape in ((4,), (1, 5)):
        other = replace(norm_of, weight=torch.ones(shape))
        assert cpu.moe_finalize_add_norm(outputs, weights, residual, other, None, None) is None
    for turned in ((torch._neg_view(outputs), weights), (outputs, torch._neg_view(weights))):
        assert cpu.moe_finalize(*turned, None, None) is None
        assert torch.equal(moe_finalize(*turned), naive.moe_finalize(*turned))
    with TorchDispatchMode():
        assert cpu.moe_finalize(outputs, weights, None, None) is None


def test_the_dispatcher_asks_the_library(monkeypatch: pytest.MonkeyPatch):
    outputs, weights, residual = (draw(*shape, dtype=torch.bfloat16) for shape in [(2, 3, 5), (2, 3), (2, 5)])
    norm_of = formula("rms", 5, torch.bfloat16)
    wanted = naive.moe_finalize_add_norm(outputs, weights, residual, norm_of)
    alone = naive.moe_finalize(outputs, weights)
    monkeypatch.setattr(naive, "moe_finalize", None)
    monkeypatch.setattr(naive, "moe_finalize_add_norm", None)
    made = moe_finalize_add_norm(outputs, weights, residual, norm_of)
    assert torch.equal(made[1], wanted[1]) and close(made[0], wanted[0])
    assert torch.equal(moe_finalize(outputs, weights), alone)


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
