"""The layout algebra: `assemble` and `cut` undo each other, and gradients are one process's on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from boundary.collectives import Group, ThreadGroup, record
from interleave.layout import (
    Block,
    Layout,
    Partial,
    Rows,
    Shard,
    Whole,
    assemble,
    assemble_axes,
    assemble_many,
    chunk_widths,
    cut,
    cut_axes,
    piece_shape,
    whole_shape,
)
from tests.worlds import run_world

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]

many = settings(max_examples=80, deadline=None)
worlds = st.integers(1, 4)


class Case(NamedTuple):
    """A layout for `size` ranks and, said a second way, where each rank's columns come from.

    `columns[rank][j]` is the place in the whole of the rank's j-th column; None is a padded one.
    """

    size: int
    layout: Layout
    shape: tuple[int, ...]
    columns: list[list[int | None]]

    @property
    def dim(self) -> int:
        assert self.layout.shared_dim is not None
        return self.layout.shared_dim


@st.composite
def shapes_around(draw: st.DrawFn, width: int) -> tuple[tuple[int, ...], int]:
    """A shape with `width` at some dim, and that dim, counted from either end."""
    shape = draw(st.lists(st.integers(1, 3), min_size=0, max_size=3))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, width)
    return tuple(shape), draw(st.sampled_from([dim, dim - len(shape)]))


def divisors(size: int) -> list[int]:
    return [n for n in range(1, size + 1) if size % n == 0]


@st.composite
def shards(draw: st.DrawFn, sizes: st.SearchStrategy[int] = worlds) -> Case:
    size = draw(sizes)
    kind = draw(st.sampled_from(["even", "widths", "blocks"]))
    num_blocks = draw(st.integers(1, 3)) if kind == "blocks" else 1
    columns: list[list[int | None]] = [[] for _ in range(size)]
    blocks = []
    start = 0
    for _ in range(num_blocks):
        replicas = draw(st.sampled_from(divisors(size)))
        distinct = size // replicas
        if kind == "even":
            widths = [draw(st.integers(0, 4))] * distinct
        else:
            widths = draw(st.lists(st.integers(0, 4), min_size=distinct, max_size=distinct))
        for index, width in enumerate(widths):
            for rank in range(index * replicas, (index + 1) * replicas):
                columns[rank] += range(start, start + width)
            start += width
        blocks.append(Block(tuple(widths), replicas))
    shape, dim = draw(shapes_around(start))
    layout = {
        "even": lambda: Shard(dim, replicas=blocks[0].replicas),
        "widths": lambda: Shard(dim, widths=blocks[0].widths, replicas=blocks[0].replicas),
        "blocks": lambda: Shard(dim, blocks=tuple(blocks)),
    }[kind]()
    return Case(size, layout, shape, columns)


@st.composite
def rows(draw: st.DrawFn, sizes: st.SearchStrategy[int] = worlds) -> Case:
    size = draw(sizes)
    live = draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    padding = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    total = sum(live)
    order = draw(st.none() | st.permutations(range(total)))
    shape, dim = draw(shapes_around(total))
    columns: list[list[int | None]] = []
    start = 0
    for rank in range(size):
        places = range(start, start + live[rank])
        whole_places = [place if order is None else list(order).index(place) for place in places]
        columns.append([*whole_places, *[None] * padding[rank]])
        start += live[rank]
    counts = tuple(a + b for a, b in zip(live, padding, strict=True))
    layout = Rows(dim, counts, tuple(live), None if order is None else tuple(order))
    return Case(size, layout, shape, columns)


cases = st.one_of(shards(), rows())


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int, strided: bool = False) -> Tensor:
    """Distinct values of every kind of dtype; `strided` says that it is not contiguous (if it can be)."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tuple(reversed(shape)) if strided else shape, generator=generator)
    if not dtype.is_floating_point:
        values = (values * 100).to(torch.int64).remainder(2 if dtype is torch.bool else 200)
    values = values.to(dtype)
    return values.permute(*reversed(range(values.dim()))) if strided else values


def select(whole: Tensor, case: Case, rank: int) -> Tensor:
    """Rank's piece, column by column: what a layout means, without the layout."""
    column = list(whole.shape)
    column[case.dim] = 1
    padded = torch.cat([whole, whole.new_zeros(column)], case.dim)
    last = whole.shape[case.dim]
    index = torch.tensor([last if c is None else c for c in case.columns[rank]], dtype=torch.long)
    return padded.index_select(case.dim, index)


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    """Bit-equal, of one shape and dtype."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b))


@many
@given(cases, st.sampled_from(DTYPES), st.booleans())
def test_cut_takes_the_columns_that_the_layout_means(case: Case, dtype: torch.dtype, strided: bool) -> None:
    whole = random_tensor(case.shape, dtype, 0, strided)
    pieces = run_world(case.size, lambda group: cut(whole, case.layout, group))
    for rank, piece in enumerate(pieces):
        assert same(piece, select(whole, case, rank))


@many
@given(cases, st.sampled_from(DTYPES), st.booleans())
def test_assemble_undoes_cut_bit_for_bit(case: Case, dtype: torch.dtype, strided: bool) -> None:
    whole = random_tensor(case.shape, dtype, 1, strided)

    def rank_main(group: Group) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
        piece = cut(whole, case.layout, group)
        seen = whole_shape(piece.shape, case.layout, group), piece_shape(whole.shape, case.layout, group)
        assert seen == (whole.shape, piece.shape)
        return (assemble(piece, case.layout, group, "k"), *seen)

    for found, *_ in run_world(case.size, rank_main):
        assert same(found, whole)


@many
@given(shards(), st.sampled_from(DTYPES), st.booleans())
def test_cut_undoes_assemble_bit_for_bit(case: Case, dtype: torch.dtype, strided: bool) -> None:
    # Pieces as a model makes them, with strides of their own; replicas hold equal ones.
    whole = random_tensor(case.shape, dtype, 2)
    pieces = [select(whole, case, rank) for rank in range(case.size)]
    if strided:
        pieces = [piece.transpose(0, -1).contiguous().transpose(0, -1) for piece in pieces]

    def rank_main(group: Group) -> Tensor:
        return cut(assemble(pieces[group.rank], case.layout, group), case.layout, group)

    for rank, found in enumerate(run_world(case.size, rank_main)):
        assert same(found, pieces[rank])


@many
@given(st.integers(1, 4), st.sampled_from([torch.float32, torch.float64]), st.booleans())
def test_partial_is_the_sum_and_its_cut_sums_to_the_whole(size: int, dtype: torch.dtype, added: bool) -> None:
    terms = [random_tensor((3, 5), dtype, rank) for rank in range(size)]
    bias = random_tensor((5,), dtype, 99)
    layout = Partial(lambda: bias) if added else Partial()

    def rank_main(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        whole = assemble(terms[group.rank], layout, group)
        piece = cut(whole, layout, group)
        return whole, piece, assemble(piece, layout, group)

    expected = sum(terms, torch.zeros(3, 5, dtype=dtype)) + (bias if added else 0)
    results = run_world(size, rank_main)
    for rank, (whole, piece, again) in enumerate(results):
        torch.testing.assert_close(whole, expected)
        torch.testing.assert_close(again, expected)
        assert same(whole, results[0][0]), "all ranks hold the same bits"
        assert rank == 0 or not piece.any()
    if not added:
        assert same(results[0][2], results[0][0])


def test_a_written_constant_counts_once() -> None:
    bias = torch.arange(4.0)
    layout = Partial(bias)

    def rank_main(group: Group) -> Tensor:
        return group.all_reduce(cut(torch.full((2, 4), 7.0), layout, group)) + bias

    for found in run_world(3, rank_main):
        assert torch.equal(found, torch.full((2, 4), 7.0))


def test_packed_blocks_come_back_as_blocks_and_not_rank_by_rank() -> None:
    # Four query heads, two key and two value heads, of one column each, on four ranks.
    layout = Shard(-1, blocks=(Block((1, 1, 1, 1)), Block((1, 1), replicas=2), Block((1, 1), replicas=2)))
    pieces = [[0, 10, 20], [1, 10, 20], [2, 11, 21], [3, 11, 21]]
    for found in run_world(4, lambda g: assemble(torch.tensor(pieces[g.rank]), layout, g)):
        assert found.tolist() == [0, 1, 2, 3, 10, 11, 20, 21]


def test_zigzag_rows_come_back_in_the_order_of_the_tokens() -> None:
    # Two ranks; rank 0 computes the first and the last quarter of six padded-to-eight tokens.
    layout = Rows(0, counts=(4, 4), live=(2, 4), order=(0, 1, 2, 3, 4, 5))
    zigzag = Rows(0, counts=(4, 4), order=(0, 1, 4, 5, 6, 7, 2, 3))
    pieces = [torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])]
    for found in run_world(2, lambda g: assemble(pieces[g.rank], zigzag, g)):
        assert found.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    padded = [torch.tensor([0, 1, -1, -1]), torch.tensor([2, 3, 4, 5])]
    for found in run_world(2, lambda g: assemble(padded[g.rank], layout, g)):
        assert found.tolist() == [0, 1, 2, 3, 4, 5]


# Gradients, by `torch.autograd.backward`: nnsight replaces the tensors' method, which threads cannot share.
#
# The model around the bracket: a rank's piece feeds a function of its own, whose terms the model sums
# (with an identity backward, as row-parallel layers do); the loss looks at the sum and at the whole. The same
# in one process is the truth, computed from `select`.


def term(piece: Tensor, rank: int, live: Tensor) -> Tensor:
    """What the model makes of a piece: nonlinear, different on every rank, blind to padding."""
    return ((piece * live) * (rank + 1.5)).tanh().sum() + ((piece * live) ** 2).sum() * 0.3


def loss_of(output: Tensor, whole: Tensor) -> Tensor:
    return (output**2).sum() + (whole.sin() * 1.7).sum()


@many
@given(cases)
def test_gradients_are_the_single_process_ones_on_every_rank(case: Case) -> None:
    start = random_tensor(case.shape, torch.float64, 5)
    factor = random_tensor(case.shape, torch.float64, 6)
    live = [select(torch.ones_like(start), case, rank) for rank in range(case.size)]

    truth = start.clone().requires_grad_()
    read = truth * 1.0
    read.retain_grad()
    edited = read * factor
    output = sum((term(select(edited, case, r), r, live[r]) for r in range(case.size)), torch.zeros(()))
    loss = loss_of(output, read)
    torch.autograd.backward(loss)

    def rank_main(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        piece = select(start, case, group.rank).requires_grad_()
        whole = assemble(piece * 1.0, case.layout, group, "k")
        whole.retain_grad()
        back = cut(whole * factor, case.layout, group, "k/back")
        output = assemble(term(back, group.rank, live[group.rank]), Partial(), group, "model")
        loss = loss_of(output, whole)
        torch.autograd.backward(loss)
        assert whole.grad is not None and piece.grad is not None
        return loss.detach(), whole.grad, piece.grad

    results = run_world(case.size, rank_main)
    assert truth.grad is not None and read.grad is not None
    for found, whole_grad, _ in results:
        torch.testing.assert_close(found, loss.detach())
        torch.testing.assert_close(whole_grad, read.grad)
    # What reaches the pieces, added up over whoever holds a copy, is what reaches the single tensor.
    gathered = torch.zeros_like(start)
    for rank, (_, _, piece_grad) in enumerate(results):
        kept = [j for j, column in enumerate(case.columns[rank]) if column is not None]
        places = torch.tensor([case.columns[rank][j] for j in kept], dtype=torch.long)
        gathered.index_add_(case.dim, places, piece_grad.index_select(case.dim, torch.tensor(kept).long()))
    torch.testing.assert_close(gathered, truth.grad)


@pytest.mark.parametrize("added", [False, True])
def test_gradients_through_a_partial_sum(added: bool) -> None:
    size = 3
    inputs = [random_tensor((4, 5), torch.float64, rank) for rank in range(size)]
    bias = random_tensor((5,), torch.float64, 9) if added else torch.zeros(5, dtype=torch.float64)
    factor = random_tensor((4, 5), torch.float64, 10)

    def finish(whole: Tensor, edited: Tensor) -> Tensor:
        return (edited.tanh() ** 2).sum() + (whole**3).sum()

    leaves = [x.clone().requires_grad_() for x in inputs]
    true_bias = bias.clone().requires_grad_()
    whole = sum((leaf.sin() for leaf in leaves), torch.zeros(())) + true_bias
    whole.retain_grad()
    torch.autograd.backward(finish(whole, whole * factor))

    def rank_main(group: Group) -> tuple[Tensor | None, ...]:
        leaf, own_bias = inputs[group.rank].clone().requires_grad_(), bias.clone().requires_grad_()
        layout = Partial(own_bias) if added else Partial()
        whole = assemble(leaf.sin(), layout, group, "k")
        whole.retain_grad()
        back = cut(whole * factor, layout, group, "k/back")
        # The model's own way on: it sums the terms and adds its bias.
        edited = assemble(back, layout, group, "model")
        torch.autograd.backward(finish(whole, edited))
        return whole.grad, leaf.grad, own_bias.grad

    for rank, (whole_grad, leaf_grad, bias_grad) in enumerate(run_world(size, rank_main)):
        torch.testing.assert_close(whole_grad, whole.grad)
        torch.testing.assert_close(leaf_grad, leaves[rank].grad)
        if added:
            torch.testing.assert_close(bias_grad, true_bias.grad)


@pytest.mark.parametrize("layout", [Shard(-1), Shard(0, widths=(1, 3)), Partial(), Rows(0, (2, 2), (1, 2))])
@pytest.mark.parametrize("grad", [False, True])
def test_an_assembled_value_may_be_edited_in_place(layout: Layout, grad: bool) -> None:
    def rank_main(group: Group) -> None:
        shape = layout.piece_shape((4, 6) if not isinstance(layout, Rows) else (3, 6), group.rank, 2)
        leaf = torch.ones(shape, requires_grad=grad)
        for value in (
            assemble(leaf * 2, layout, group),
            cut(assemble(leaf * 2, layout, group), layout, group, "back"),
        ):
            assert value.requires_grad is grad
            value[0, :2] = 0
            value *= 3
            assert not value[0, :2].any()
        assert leaf.grad is None

    run_world(2, rank_main)


def test_cut_shares_nothing_with_the_whole() -> None:
    # A model reduces its terms and adds its residuals in place, and a block may have saved the whole.
    def rank_main(group: Group) -> None:
        for layout in (Shard(0), Shard(0, blocks=(Block((2, 2)),)), Partial(), Rows(0, (2, 2))):
            whole = torch.ones(4, 3)
            cut(whole, layout, group).zero_()
            assert torch.equal(whole, torch.ones(4, 3)), layout

    run_world(2, rank_main)


def test_values_carry_version_counters_in_inference_mode() -> None:
    def rank_main(group: Group) -> None:
        with torch.inference_mode():
            piece = torch.ones(2, 4)
            for layout in (Shard(-1), Partial(torch.ones(4)), Rows(0, (2, 2), order=(3, 1, 0, 2))):
                whole = assemble(piece, layout, group)
                assert not whole.is_inference() and not whole.requires_grad
                assert whole._version >= 0
                assert not cut(whole, layout, group).is_inference()
            (whole,) = assemble_many([(piece, Shard(-1))], group)
            assert not whole.is_inference()

    run_world(2, rank_main)


def test_without_gradients_no_graph_is_recorded() -> None:
    def rank_main(group: Group) -> None:
        leaf = torch.ones(2, 4, requires_grad=True)
        with torch.no_grad():
            assert not assemble(leaf, Shard(-1), group).requires_grad
            assert not cut(leaf, Shard(-1), group).requires_grad
        assert assemble(leaf, Shard(-1), group).requires_grad

    run_world(2, rank_main)


@many
@given(st.integers(2, 4), st.data())
def test_many_pieces_are_assembled_in_one_exchange_per_dtype(size: int, data: st.DataObject) -> None:
    here = st.just(size)
    drawn = data.draw(st.lists(st.one_of(shards(here), rows(here)), min_size=1, max_size=5))
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), min_size=len(drawn), max_size=len(drawn)))
    wholes = [random_tensor(case.shape, dtype, i) for i, (case, dtype) in enumerate(zip(drawn, dtypes, strict=True))]
    bias = torch.ones(3)
    terms = random_tensor((2, 3), torch.float32, 50)

    def rank_main(group: Group) -> tuple[list[Tensor], list[Tensor]]:
        pieces = [(cut(whole, case.layout, group), case.layout) for whole, case in zip(wholes, drawn, strict=True)]
        pieces += [(terms * (group.rank + 1), Partial(bias)), (terms, Whole())]
        return assemble_many(pieces, group, "cache"), [assemble(*pair, group, "one") for pair in pieces]

    with record() as events:
        results = run_world(size, rank_main)
    for together, one_by_one in results:
        assert all(same(a, b) for a, b in zip(together, one_by_one, strict=True))
        assert all(same(a, b) for a, b in zip(together, wholes, strict=False))
        assert together[-1] is terms
    for rank in range(size):
        flat = [event for event in events if event.rank == rank and event.key.startswith("cache")]
        assert len(flat) == len({*dtypes, torch.float32})


def test_sixteen_pieces_are_one_exchange() -> None:
    def rank_main(group: Group) -> list[Tensor]:
        return assemble_many([(torch.full((3, 4), float(i)), Shard(-1)) for i in range(16)], group, "cache")

    with record() as events:
        results = run_world(2, rank_main)
    assert [tuple(whole.shape) for whole in results[0]] == [(3, 8)] * 16
    assert [(event.rank, event.op, event.nbytes) for event in sorted(events, key=lambda event: event.rank)] == [
        (rank, "all_gather", 2 * 16 * 12 * 4) for rank in range(2)
    ]


def test_many_pieces_at_which_gradients_are_recorded_keep_them() -> None:
    def rank_main(group: Group) -> Tensor | None:
        leaf = torch.ones(2, 3, requires_grad=True)
        recorded, plain = assemble_many([(leaf * 2, Shard(-1)), (torch.ones(2, 3), Shard(-1))], group)
        assert recorded.requires_grad and not plain.requires_grad
        torch.autograd.backward(recorded.sum())
        return leaf.grad

    for gradient in run_world(2, rank_main):
        assert gradient is not None and torch.equal(gradient, torch.full((2, 3), 2.0))


def test_layouts_compose_over_two_axes() -> None:
    whole = torch.arange(5 * 6.0).view(5, 6)
    inner = [ThreadGroup.create((0, 1), name="tp"), ThreadGroup.create((2, 3), name="tp")]
    outer = [ThreadGroup.create((0, 2), name="cp"), ThreadGroup.create((1, 3), name="cp")]

    def rank_main(group: Group) -> tuple[Tensor, Tensor, Tensor | None]:
        row, column = divmod(group.rank, 2)
        axes = [(Shard(-1), inner[row][column]), (Rows(0, (3, 2)), outer[column][row])]
        piece = cut_axes(whole, axes).requires_grad_()
        found = assemble_axes(piece * 1.0, axes, "k")
        torch.autograd.backward((found * whole).sum())
        return piece.detach(), found.detach(), piece.grad

    for rank, (piece, found, gradient) in enumerate(run_world(4, rank_main)):
        row, column = divmod(rank, 2)
        own = whole[:3] if row == 0 else whole[3:]
        assert torch.equal(piece, own[:, 3 * column : 3 * column + 3])
        assert torch.equal(found, whole)
        assert gradient is not None and torch.equal(gradient, piece)


@pytest.mark.parametrize(
    "layout", [Whole(), Shard(-1), Shard(0, widths=(3,)), Partial(), Rows(0, (3,), order=(0, 1, 2))], ids=str
)
def test_alone_every_value_is_whole(layout: Layout) -> None:
    value = torch.ones(3, 4)
    (group,) = ThreadGroup.create((0,))
    with record() as events:
        assert assemble(value, layout, group) is value
        assert cut(value, layout, group) is value
        assert assemble_many([(value, layout)], group)[0] is value
    assert not events


def test_alone_an_addend_is_added_all_the_same() -> None:
    (group,) = ThreadGroup.create((0,))
    whole = assemble(torch.ones(2, 3), Partial(torch.full((3,), 2.0)), group)
    assert torch.equal(whole, torch.full((2, 3), 3.0))
    assert torch.equal(cut(whole, Partial(torch.full((3,), 2.0)), group), torch.ones(2, 3))


@given(st.integers(0, 40), st.integers(1, 8))
def test_the_chunk_rule_is_torchs(size: int, degree: int) -> None:
    chunks = [chunk.shape[0] for chunk in torch.arange(size).chunk(degree)] if size else []
    assert list(chunk_widths(size, degree)) == chunks + [0] * (degree - len(chunks))


def test_layouts_are_values() -> None:
    assert Shard(-1, widths=[1, 2]) == Shard(-1, widths=(1, 2))  # type: ignore[arg-type]
    assert hash(Shard(-1, blocks=(Block((1, 2)),))) == hash(Shard(-1, blocks=(Block((1, 2)),)))
    assert Partial(torch.ones(3)) == Partial() and hash(Partial(torch.ones(3))) == hash(Partial())
    assert Shard(-1) != Shard(0) and Rows(0, (1, 2)) != Rows(0, (2, 1))
    blocks = (Block.split(4, 4), Block.split(2, 4, replicas=2))
    assert [
        str(layout)
        for layout in (
            Whole(),
            Shard(-1),
            Shard(0, widths=(3, 2)),
            Shard(-1, replicas=2),
            Shard(-1, blocks=blocks),
        )
    ] == [
        "whole",
        "shard(dim -1)",
        "shard(dim 0: 3+2)",
        "shard(dim -1 x2)",
        "shard(dim -1: 1+1+1+1 | 1+1 x2)",
    ]
    assert str(Partial(torch.ones(1))) == "partial + addend"
    assert str(Rows(0, (4, 4), (3, 4))) == "rows(dim 0: 4+4, live 3+4)"


def test_a_layout_knows_what_a_replacement_must_keep() -> None:
    assert (Shard(-1).shared_dim, Shard(-1).size) == (-1, None)
    assert (Shard(1, widths=(2, 3)).shared_dim, Shard(1, widths=(2, 3)).size) == (1, 5)
    assert Shard(1, blocks=(Block((2, 3)), Block((4,), replicas=2))).size == 9
    assert (Rows(0, (4, 4), (3, 4)).shared_dim, Rows(0, (4, 4), (3, 4)).size) == (0, 7)
    assert Partial().shared_dim is None and Whole().shared_dim is None


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Block(()), r"widths=\(\)"),
        (lambda: Block((1, -1)), r"-1"),
        (lambda: Block((1,), replicas=0), "replicas=0"),
        (lambda: Block.split(4, 3, replicas=2), "does not divide"),
        (lambda: Shard(0, widths=()), r"widths=\(\)"),
        (lambda: Shard(0, replicas=0), "replicas=0"),
        (lambda: Shard(0, blocks=()), "degrees"),
        (lambda: Shard(0, widths=(1,), blocks=(Block((1,)),)), "belong to each block"),
        (lambda: Shard(0, blocks=(Block((1, 1)), Block((1,)))), r"degrees: \[2, 1\]"),
        (lambda: Rows(0, ()), r"counts=\(\)"),
        (lambda: Rows(0, (2, 2), live=(3, 2)), r"live=\(3, 2\)"),
        (lambda: Rows(0, (2, 2), live=(2,)), r"live=\(2,\)"),
        (lambda: Rows(0, (1, 1), order=(0, 0)), r"no permutation of the 2 live"),
        (lambda: chunk_widths(3, 0), "degree=0"),
    ],
)
def test_nonsense_is_refused_with_its_values(make: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()


@pytest.mark.parametrize(
    ("layout", "shape", "match"),
    [
        (Shard(-1, widths=(2, 3)), (4, 4), r"rank 0's piece is 2 wide, .*\(4, 4\)"),
        (Shard(3), (4, 4), r"no dim 3 in shape \(4, 4\)"),
        (Shard(-1, widths=(2, 3, 4)), (4, 2), "degree of 3, and the group has 2"),
        (Shard(-1, replicas=3), (4, 2), "3 replicas do not divide the degree 2"),
        (Rows(0, (2, 2)), (3, 4), r"2 rows expected.*\(3, 4\)"),
        (Rows(0, (2, 2, 2)), (2, 4), "for 3 ranks, and the group has 2"),
    ],
)
def test_a_piece_that_does_not_fit_its_layout_is_refused(layout: Layout, shape: tuple[int, ...], match: str) -> None:
    group = ThreadGroup.create((0, 1))[0]
    with record() as events, pytest.raises(ValueError, match=match):
        assemble(torch.ones(shape), layout, group)
    assert not events


def test_a_whole_that_cannot_be_cut_is_refused() -> None:
    group = ThreadGroup.create((0, 1))[0]
    with pytest.raises(ValueError, match="5 of shape"):
        cut(torch.ones(4, 5), Shard(-1), group)
    with pytest.raises(ValueError, match="5 wide"):
        cut(torch.ones(4, 6), Shard(-1, widths=(2, 3)), group)
    with pytest.raises(ValueError, match="4 rows"):
        cut(torch.ones(3, 6), Rows(0, (2, 2)), group)


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    def rank_main(group: Group) -> None:
        leaf = torch.ones(2, requires_grad=True)
        (first,) = torch.autograd.grad((assemble(leaf * leaf, Shard(0), group) ** 2).sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            torch.autograd.backward(first.sum())

    run_world(2, rank_main)
