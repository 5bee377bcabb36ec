"""Add, norm and quantize: what the definition promises; Triton's kernel, interpreted, and the library against it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from boundary.kernels.add_norm.naive import norm, wide
from boundary.kernels.add_norm_quantize import add_norm_quantize, cpu, naive, triton
from boundary.kernels.norms import Kind, NormFormula
from tests.norms import KINDS

from .interpreting import interpreted
from .test_add_norm import DTYPES as LIBRARY_DTYPES
from .test_add_norm import draw, formula, strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
QUANTIZED = [torch.float8_e4m3fn, torch.int8]
#: What a row's mean of squares of another order of addition moves a scale or an element by.
TOLERANCE = 3e-6


@pytest.fixture(autouse=True)
def interpreter() -> Iterator[None]:
    with interpreted():
        yield


def kernel(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    made = triton.add_norm_quantize(*arguments)
    assert made is not None, "the kernel declined"
    return made


def of_library(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    made = cpu.add_norm_quantize(*arguments)
    assert made is not None, "the library declined"
    return made


Path = Callable[..., tuple[Tensor, Tensor, Tensor]]
PATHS: list[Path] = [naive.add_norm_quantize, kernel, of_library]


def of_values(values: Tensor, path: Path, dtype: torch.dtype, scale: float | None) -> tuple[Tensor, Tensor]:
    """What `path` makes of a row whose norm has exactly these values, `[hidden]` float32: a row of ones with a gain."""
    ones = torch.ones(1, len(values))
    given_scale = None if scale is None else torch.tensor(scale)
    quantized, found, _ = path(ones, None, NormFormula(Kind.RMS, values, 0.0), dtype, given_scale)
    return quantized[0], found


def step(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of `dtype` at these values."""
    if dtype == torch.int8:
        return torch.ones_like(scaled)
    return torch.exp2(scaled.abs().clamp_min(2.0**-6).log2().floor() - 3)


@pytest.mark.parametrize("quantized_dtype", QUANTIZED)
@pytest.mark.parametrize(
    ("path", "dtype"), [*((kernel, dtype) for dtype in DTYPES), *((of_library, dtype) for dtype in LIBRARY_DTYPES)]
)
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=10)
@given(
    rows=st.integers(0, 3),
    hidden=st.integers(1, 1100),
    apart=st.booleans(),
    alone=st.booleans(),
    static=st.sampled_from([None, 0.01, 0.5]),
)
@example(rows=1, hidden=1, apart=False, alone=False, static=None)
def test_it_is_the_definition(
    kind: str,
    path: Path,
    dtype: torch.dtype,
    quantized_dtype: torch.dtype,
    rows: int,
    hidden: int,
    apart: bool,
    alone: bool,
    static: float | None,
):
    value, residual = draw(rows, hidden, dtype=dtype, seed=3), draw(rows, hidden, dtype=dtype, seed=4)
    if apart:
        value, residual = strided(value), strided(residual)
    if alone:
        residual = None
    norm_of = formula(kind, hidden, dtype)
    scale = None if static is None else torch.tensor([static])
    found, found_scale, total = path(value, residual, norm_of, quantized_dtype, scale)
    _, wanted_scale, wanted_total = naive.add_norm_quantize(value, residual, norm_of, quantized_dtype, scale)
    assert torch.equal(total, wanted_total) and total.dtype == dtype and (total is value) == alone
    assert found.dtype == quantized_dtype and found.shape == (rows, hidden) and found.is_contiguous()
    if scale is None:
        assert found_scale.shape == (rows, 1) and found_scale.dtype == torch.float32
        assert torch.allclose(found_scale, wanted_scale, rtol=TOLERANCE, atol=0.0)
    else:
        assert found_scale is scale
    normed = norm(wide(value) if residual is None else wide(value) + wide(residual), norm_of, torch.float32).double()
    scaled = (normed / found_scale).clamp(*naive.LIMITS[quantized_dtype])
    off = (found.double() - scaled).abs()
    assert (off <= step(scaled, quantized_dtype) / 2 + TOLERANCE * (normed.abs() + 1) / found_scale).all()


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("static", [None, 1.0, 0.3])
def test_the_library_rounds_random_float32s_as_the_definition(dtype: torch.dtype, static: float | None):
    """With a scale, of all exponents and signs; a row's own scale would make most of those zero."""
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(1)) * 2.0**-7
    if static is not None:
        bits = torch.randint(-(2**31), 2**31, (200_001,), generator=torch.Generator().manual_seed(0)).int()
        values = torch.cat([bits.view(torch.float32), values[:100_000], 1e5 * values[100_000:]])
    values[:2] = torch.tensor([0.0, -0.0])
    found, scale = of_values(values, of_library, dtype, static)
    wanted, wanted_scale = of_values(values, naive.add_norm_quantize, dtype, static)
    assert torch.equal(scale, wanted_scale)
    nans = wanted.float().isnan()
    assert torch.equal(found.float().isnan(), nans)
    # A NaN's sign says nothing, a zero's does.
    assert torch.equal(found.view(torch.uint8)[~nans], wanted.view(torch.uint8)[~nans])
    assert (wanted.float() != 0).float().mean() > (0.9 if static is None else 0.4)


@pytest.mark.parametrize("path", PATHS)
def test_every_tie_is_rounded_to_even(path: Path):
    halves = torch.arange(-128, 128) + 0.5
    found, _ = of_values(halves, path, torch.int8, 1.0)
    assert torch.equal(found.float(), halves.round().clamp_max(127))
    every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()].unique()
    between = (every[1:] + every[:-1]) / 2
    found, _ = of_values(between, path, torch.float8_e4m3fn, 1.0)
    even = found.view(torch.uint8) % 2 == 0
    neighbour = (found.float() == every[1:]) | (found.float() == every[:-1])
    assert even.all() and neighbour.all()


@pytest.mark.parametrize("path", PATHS)
def test_every_value_of_the_dtype_comes_through_and_beyond_it_is_its_limit(path: Path):
    every = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    found, _ = of_values(every * 0.25, path, torch.float8_e4m3fn, 0.25)
    assert torch.equal(found.float(), every)
    for dtype in QUANTIZED:
        found, _ = of_values(torch.tensor([-3e38, -500.0, 500.0, 3e38]), path, dtype, 1e-3)
        low, high = naive.LIMITS[dtype]
        assert found.tolist() == [low, low, high, high]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_a_rows_largest_magnitude_is_the_largest_value(path: Path, dtype: torch.dtype):
    values = torch.tensor([0.1, -3.7, 2.0])
    found, scale = of_values(values, path, dtype, None)
    high = naive.LIMITS[dtype][1]
    assert found[1] == -high and scale.item() == pytest.approx(3.7 / high, rel=1e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("kind", Kind)
def test_zeros_are_zeros_at_the_least_scale(path: Path, dtype: torch.dtype, kind: Kind):
    value = torch.zeros(3, 5, dtype=torch.bfloat16)
    found, scale, total = path(value, value, NormFormula(kind, None, 1e-30), dtype, None)
    assert torch.equal(found.float(), torch.zeros(3, 5)) and torch.equal(total, value)
    assert torch.equal(scale, torch.full((3, 1), naive.FLOOR))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("scale", [None, 1e-4, 1e4])
def test_no_finite_row_makes_a_nan(path: Path, scale: float | None):
    """Nor does a norm whose gain takes it beyond float32."""
    for values in ([1e-38, 0.0, -1e-38], [3e38, 1.0, -3e38], [torch.inf, 1.0, -torch.inf], [1e-45, 3e38, 0.0]):
        found, made = of_values(torch.tensor(values), path, torch.float8_e4m3fn, scale)
        assert not found.float().isnan().any() and made.isfinite().all() and (made > 0).all()
        signs = torch.tensor(values).sign()
        assert (found.float().sign() * signs >= 0).all()
    large = torch.tensor([[1e30, -1e30, 1.0]])
    found, _, _ = path(large, large, NormFormula(Kind.RMS, None, 1e-6), torch.float8_e4m3fn, None)
    assert not found.float().isnan().any()


@pytest.mark.parametrize("path", PATHS)
def test_a_nan_stays_one_where_there_is_one_and_is_zero_in_integers(path: Path):
    values = torch.tensor([1.0, torch.nan, -2.0])
    found, scale = of_values(values, path, torch.float8_e4m3fn, None)
    assert found.float().isnan().tolist() == [False, True, False] and found[2] == -448.0
    assert scale.item() == pytest.approx(2.0 / 448.0)
    found, _ = of_values(values, path, torch.int8, None)
    assert found.tolist() == [64, 0, -127]


def test_the_norm_is_quantized_before_it_is_rounded_to_the_models_dtype():
    """257 is no bfloat16: rounded first it is 256, which is another integer of this scale."""
    value = torch.ones(1, 4, dtype=torch.bfloat16)
    norm_of = NormFormula(Kind.RMS, torch.full((4,), 256.0).bfloat16(), 0.0, torch.ones(4).bfloat16())
    for path in PATHS:
        found, _, _ = path(value, None, norm_of, torch.int8, torch.tensor(257 / 100.6))
        assert found.tolist() == [[101] * 4]


@pytest.mark.parametrize("shape", [(7,), (2, 3, 7), (2, 0, 7)])
def test_any_number_of_leading_dims_is_taken(shape: tuple[int, ...]):
    value = draw(*shape, dtype=torch.float32)
    wanted = naive.add_norm_quantize(value, value, formula("rms", 7, torch.float32), torch.int8, None)
    for path in (kernel, of_library):
        found = path(value, value, formula("rms", 7, torch.float32), torch.int8, None)
        assert [made.shape for made in found] == [made.shape for made in wanted]
        assert (found[0].int() - wanted[0].int()).abs().sum() <= 1


def test_the_sum_has_a_gradient_and_the_quantized_rows_have_none():
    value = draw(2, 9, dtype=torch.float32).requires_grad_()
    norm_of = formula("rms", 9, torch.float32)
    assert triton.add_norm_quantize(value, value.detach(), norm_of, torch.int8, None) is None
    for dtype in QUANTIZED:
        quantized, scale, total = add_norm_quantize(value, value.detach(), norm_of, dtype)
        assert not quantized.requires_grad and not scale.requires_grad
        assert torch.equal(torch.autograd.grad(total.sum(), value)[0], torch.ones(2, 9))


@pytest.mark.parametrize("dtype", QUANTIZED)
def test_autograds_recording_changes_no_bit_of_the_library(dtype: torch.dtype):
    value, residual = draw(3, 77, dtype=torch.bfloat16), draw(3, 77, dtype=torch.bfloat16, seed=1)
    norm_of = formula("layer", 77, torch.bfloat16)
    plain = of_library(value, residual, norm_of, dtype, None)
    recorded = of_library(value.clone().requires_grad_(), residual, norm_of, dtype, None)
    assert recorded[2].requires_grad and not recorded[0].requires_grad and not recorded[1].requires_grad
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(plain, recorded, strict=True))
    later = residual.clone().requires_grad_()
    total = of_library(value, later, norm_of, dtype, None)[2]
    assert torch.equal(torch.autograd.grad(total.sum(), later)[0], torch.ones_like(later))


def test_what_the_library_does_not_take_is_the_definitions():
    value, norm_of = draw(2, 9, dtype=torch.float32), formula("rms", 9, torch.float32)
    scale = torch.tensor(0.5, requires_grad=True)
    turned = NormFormula(Kind.RMS, torch._neg_view(norm_of.weight), 1e-6)  # type: ignore[arg-type]
    for arguments in (
        (value, value.double(), norm_of, torch.int8, None),
        (value, value[:1], norm_of, torch.int8, None),
        (value, value, norm_of, torch.int8, scale),
        (value, value, turned, torch.int8, None),
        (torch._neg_view(value), None, norm_of, torch.int8, None),
        (value.new_empty(2, 0), None, NormFormula(Kind.RMS, None, 1e-6), torch.int8, torch.tensor(0.5)),
    ):
        assert cpu.add_norm_quantize(*arguments) is None
        assert add_norm_quantize(*arguments)[0].dtype == torch.int8


def test_the_dispatcher_asks_the_kernel_and_torch_takes_the_rest(monkeypatch: pytest.MonkeyPatch):
    value, norm_of = draw(2, 9, dtype=torch.float64), formula("rms", 9, torch.float64)
    assert add_norm_quantize(value, value, norm_of, torch.int8)[2].dtype == torch.float64
    longer, bare = torch.zeros(1, triton.LONGEST + 1), NormFormula(Kind.RMS, None, 1e-6)
    assert triton.add_norm_quantize(longer, None, bare, torch.int8, None) is None
    assert add_norm_quantize(longer, None, bare, torch.int8)[2] is longer
    monkeypatch.setattr(naive, "add_norm_quantize", None)
    made = add_norm_quantize(value.float(), value.float(), formula("rms", 9, torch.float32), torch.int8)
    assert made[0].dtype == torch.int8


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, "meta"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", QUANTIZED)
def test_torchs_default_dtype_and_device_change_nothing(path: Path, dtype: torch.dtype, default: torch.dtype | str):
    value, norm_of = draw(3, 17, dtype=torch.bfloat16), formula("gemma", 17, torch.bfloat16)
    scales = [None, torch.tensor(0.02)]
    wanted = [path(value, value, norm_of, dtype, scale) for scale in scales]
    before = torch.get_default_dtype()
    try:
        if isinstance(default, torch.dtype):
            torch.set_default_dtype(default)
        with torch.device(default if isinstance(default, str) else "cpu"):
            found = [path(value, value, norm_of, dtype, scale) for scale in scales]
    finally:
        torch.set_default_dtype(before)
    for made, right in zip(found, wanted, strict=True):
        for a, b in zip(made, right, strict=True):
            assert a.dtype == b.dtype and a.device == b.device
            assert torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def test_what_cannot_be_meant_is_refused():
    value, norm_of = draw(2, 9, dtype=torch.float32), formula("rms", 9, torch.float32)
    with pytest.raises(ValueError, match="nothing is quantized to torch"):
        add_norm_quantize(value, value, norm_of, torch.uint8)
    for scale in (torch.ones(2), torch.tensor(1)):
        with pytest.raises(ValueError, match="is one float32"):
            add_norm_quantize(value, value, norm_of, torch.int8, scale)


@pytest.mark.parametrize("static", [None, torch.tensor(0.02)])
def test_nothing_depends_on_torchs_default_device_or_dtype(static: Tensor | None):
    value = draw(3, 40, dtype=torch.float32, seed=1)
    arguments = value, value, formula("rms", 40, torch.float32), torch.int8, static
    wanted = add_norm_quantize(*arguments)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = add_norm_quantize(*arguments)
    finally:
        torch.set_default_dtype(before)
    assert all(a.device == b.device and torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_the_library_leaves_a_scale_alone_that_it_may_not_read():
    value, norm_of = draw(3, 40, dtype=torch.float32, seed=1), formula("rms", 40, torch.float32)
    learned = torch.tensor(0.02, requires_grad=True)
    assert cpu.add_norm_quantize(value, value, norm_of, torch.int8, learned) is None
    assert cpu.add_norm_quantize(value, value, norm_of, torch.int8, torch.empty((), device="meta")) is None
    found = add_norm_quantize(value, value, norm_of, torch.int8, learned)
    wanted = add_norm_quantize(value, value, norm_of, torch.int8, learned.detach())
    assert not found[0].requires_grad and (found[0] != wanted[0]).float().mean() < 0.02
