"""Rows by an index: each place filled once, whatever was in memory; and both directions are each other's gradient."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from boundary.adapters.cp import interleaved
from boundary.kernels import blocks
from boundary.kernels.rows import cpu, gather_rows, naive, scatter_rows, triton

from .interpreting import interpreted
from .test_add_norm import draw, strided

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Some of these are no row's, on either side, and some come twice.
INDEXES = st.lists(st.sampled_from([-9, -1, 0, 1, 2, 3, 4, 5, 77]), max_size=7)


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """A row of a few elements is several programs' already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks.block_of, "__defaults__", (16,))
        yield


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool])
@settings(deadline=None, max_examples=15)
@given(named=INDEXES, rows=st.integers(0, 6), width=st.integers(0, 35), apart=st.booleans(), short=st.booleans())
def test_gathered_rows_are_the_named_ones_and_zeros(
    dtype: torch.dtype, named: list[int], rows: int, width: int, apart: bool, short: bool
):
    value, index = (3 * draw(rows, width, dtype=torch.float64)).to(dtype), torch.tensor(named, dtype=torch.int64)
    wanted = torch.zeros(len(named), width, dtype=dtype)
    for place, row in enumerate(named):
        if 0 <= row < rows:
            wanted[place] = value[row]
    if apart and dtype.is_floating_point:
        value = strided(value)
    index = index.int() if short else index
    with interpreted():
        made = triton.gather_rows(value, index)
    of_library = cpu.gather_rows(value, index)
    assert made is not None and made.is_contiguous()
    assert of_library is not None and of_library.is_contiguous(), "the library declined"
    for found in (made, of_library, naive.gather_rows(value, index)):
        assert found.dtype == dtype and torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=15)
@given(named=INDEXES, rows=st.integers(0, 6), width=st.integers(0, 35), apart=st.booleans(), short=st.booleans())
def test_scattered_rows_are_added_where_they_go_and_zeros_elsewhere(
    dtype: torch.dtype, named: list[int], rows: int, width: int, apart: bool, short: bool
):
    value, index = draw(len(named), width, dtype=dtype), torch.tensor(named, dtype=torch.int64)
    wanted = torch.zeros(rows, width)
    for place, row in enumerate(named):
        if 0 <= row < rows:
            wanted[row] += value[place].float()
    value, index = strided(value) if apart else value, index.int() if short else index
    with interpreted():
        made = triton.scatter_rows(value, index, rows)
    of_library = cpu.scatter_rows(value, index, rows)
    assert made.is_contiguous() and of_library is not None and of_library.is_contiguous(), "the library declined"
    for found in (made, of_library, naive.scatter_rows(value, index, rows)):
        assert found.dtype == dtype and torch.equal(found, wanted.to(dtype))


def test_gathered_bits_are_the_rows_own():
    """A NaN keeps its payload and a zero its sign, as integers would."""
    bits = torch.tensor([[0x7F81, -0x8000, 0x0001]], dtype=torch.int16)
    index = torch.tensor([0, -1])
    with interpreted():
        made = triton.gather_rows(bits.view(torch.bfloat16), index)
    for found in (made, cpu.gather_rows(bits.view(torch.bfloat16), index)):
        assert found is not None and torch.equal(found.view(torch.int16), torch.cat([bits, torch.zeros_like(bits)]))


def test_rows_that_meet_are_rounded_once():
    value, index = torch.tensor([[256.0], [1.0], [1.0], [8.0]]).bfloat16(), torch.tensor([1, 1, 1, 0])
    with interpreted():
        assert triton.scatter_rows(value, index, 3).tolist() == [[8.0], [258.0], [0.0]]
    for path in (naive, cpu):
        assert path.scatter_rows(value, index, 3).tolist() == [[8.0], [258.0], [0.0]]
    with interpreted():
        for path in (naive, cpu, triton):
            made = path.scatter_rows(torch.tensor([[1e8], [-1e8], [1.0]]), torch.tensor([0, 0, 0]), 1)
            assert made is not None and made.tolist() == [[1.0]], "in their order"
    finer = torch.tensor([[1.0], [2.0**-40], [2.0**-41]], dtype=torch.float64)
    made = cpu.scatter_rows(finer, torch.tensor([0, 0, 1]), 2)
    assert made is not None and made.tolist() == [[1 + 2.0**-40], [2.0**-41]]
    large = torch.tensor([[2**53], [1]])
    assert scatter_rows(large, torch.tensor([0, 0]), 1).tolist() == [[2**53 + 1]], "integers stay integers"


@pytest.mark.parametrize("shape", [(4,), (4, 2, 3), (4, 0, 3)])
def test_any_number_of_dims_is_taken(shape: tuple[int, ...]):
    value, index = draw(*shape, dtype=torch.float32), torch.tensor([3, -1, 1, 3])
    rows = torch.zeros(5, *shape[1:])
    rows[[3, 1]] = torch.stack([value[0] + value[3], value[2]])
    with interpreted():
        gathered = gather_rows(value, index)
        assert torch.equal(scatter_rows(value, index, 5), rows)
    assert torch.equal(gathered[[0, 2, 3]], value[[3, 1, 3]]) and not gathered[1].any()
    for made, wanted in ((cpu.gather_rows(value, index), gathered), (cpu.scatter_rows(value, index, 5), rows)):
        assert made is not None and torch.equal(made, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_is_the_others_gradient_in_the_kernels(dtype: torch.dtype):
    index = torch.tensor([2, -1, 0, 2, 9])
    value, given = draw(4, 20, dtype=dtype).requires_grad_(), draw(5, 20, dtype=dtype, seed=1).requires_grad_()
    with interpreted():
        (found,) = torch.autograd.grad(gather_rows(value, index), value, given.detach())
        assert torch.equal(found, triton.scatter_rows(given.detach(), index, 4))
        (found,) = torch.autograd.grad(scatter_rows(given, index, 4), given, value.detach())
        assert torch.equal(found, triton.gather_rows(value.detach(), index))  # type: ignore[arg-type]


def test_a_gradient_in_float64_is_added_in_float64():
    value, index = draw(1, 3, dtype=torch.float64).requires_grad_(), torch.tensor([0, 0, -1])
    given = torch.tensor([[1.0], [2.0**-40], [5.0]], dtype=torch.float64).expand(3, 3)
    with interpreted():
        (found,) = torch.autograd.grad(gather_rows(value, index), value, given)
    assert torch.equal(found, torch.full_like(value, 1 + 2.0**-40))


@pytest.mark.parametrize("path", [cpu, naive])
def test_gradients_of_the_definitions_are_right_twice_and_the_librarys(path):
    index = torch.tensor([2, -1, 0, 2, 9])

    def run(value: Tensor, given: Tensor) -> tuple[Tensor, ...]:
        return path.gather_rows(value, index) ** 2, path.scatter_rows(given, index, 4) ** 2

    inputs = [draw(rows, 3, dtype=torch.float64, seed=rows).requires_grad_() for rows in (4, 5)]
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_columns_apart_and_expanded_rows_are_taken_by_the_library():
    index = torch.tensor([1, -1, 0, 1])
    for value in (draw(7, 4, dtype=torch.float32).t(), draw(1, 7, dtype=torch.float32).expand(4, 7)):
        gathered, scattered = cpu.gather_rows(value, index), cpu.scatter_rows(value, index, 2)
        assert gathered is not None and torch.equal(gathered, naive.gather_rows(value, index))
        assert scattered is not None and torch.equal(scattered, naive.scatter_rows(value, index, 2))


def test_the_dispatcher_asks_the_library_and_torch_takes_the_rest(monkeypatch: pytest.MonkeyPatch):
    value, index = draw(3, 4, dtype=torch.float32), torch.tensor([1, 1, -1])
    turned, whole = torch._neg_view(value), value.int()
    assert cpu.gather_rows(turned, index) is None and cpu.scatter_rows(turned, index, 2) is None
    assert cpu.scatter_rows(whole, index, 2) is None
    assert torch.equal(gather_rows(turned, index)[:2], -value[[1, 1]])
    assert torch.equal(scatter_rows(turned, index, 2)[1], -value[0] - value[1])
    with TorchDispatchMode():
        assert cpu.gather_rows(value, index) is None and cpu.scatter_rows(value, index, 2) is None
    monkeypatch.setattr(naive, "gather_rows", None)
    monkeypatch.setattr(naive, "scatter_rows", None)
    assert gather_rows(value, index).shape == value.shape and not scatter_rows(value, index, 1).any()


def test_a_tensor_of_zeros_that_has_no_memory_has_rows_of_zeros():
    value, index = torch._efficientzerotensor((4, 3)), torch.tensor([2, -1, 0])
    with interpreted():
        in_kernels = gather_rows(value, index), scatter_rows(value[:3], index, 2)
    for made in (in_kernels, (gather_rows(value, index), scatter_rows(value[:3], index, 2))):
        assert [tuple(one.shape) for one in made] == [(3, 3), (2, 3)]
        assert not any(one.any() for one in made)


def test_an_index_that_is_none_is_refused():
    value = torch.zeros(2, 3)
    for index in (torch.zeros(2), torch.zeros(1, 2, dtype=torch.int64)):
        with pytest.raises(ValueError, match="one dim and integers"):
            gather_rows(value, index)
        with pytest.raises(ValueError, match="one dim and integers"):
            scatter_rows(value, index, 2)
    with pytest.raises(ValueError, match="one for each"):
        scatter_rows(value, torch.zeros(1, dtype=torch.int64), 2)


def test_tokens_are_dealt_out_by_the_kernel(monkeypatch: pytest.MonkeyPatch):
    deal, value = interleaved([5], 2), draw(5, 3, dtype=torch.bfloat16)
    assert deal is not None
    wanted, ran = [value[[0, 2, 4]], torch.cat([value[[1, 3]], torch.zeros(1, 3)]).bfloat16()], []
    kernel = triton.gather_rows
    monkeypatch.setattr(triton, "gather_rows", lambda *args: ran.append(args) or kernel(*args))
    assert all(torch.equal(deal.shard(value, rank), wanted[rank]) for rank in (0, 1))
    with interpreted():
        assert all(torch.equal(deal.shard(value, rank), wanted[rank]) for rank in (0, 1))
    assert len(ran) == 2
    with pytest.raises(IndexError, match="token 4 is dealt to rank 0, of 4 rows"):
        deal.shard(value[:4], 0)
