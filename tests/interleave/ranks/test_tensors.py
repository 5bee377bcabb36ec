"""Tensors through a table and an arena, in one process: what arrives is what was sent, and large things go once."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from interleave.errors import InterleaveError
from interleave.ranks.tensors import LARGE, Incoming, Kept, Outgoing, Shelf, overwrite


def carry(*tensors: torch.Tensor, kept: Kept | None = None, shelf: Shelf | None = None) -> Incoming:
    outgoing = Outgoing(kept)
    for tensor in tensors:
        outgoing.add(tensor)
    return Incoming(*outgoing.finish(), shelf)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(3, 5),
        lambda: torch.randn(LARGE),
        lambda: torch.randn(7, 9).t(),
        lambda: torch.randn(40, 6)[3::7, 1::2],
        lambda: torch.randn(4, 1).expand(4, 6),
        lambda: torch.tensor(2.5),
        lambda: torch.empty(0, 4),
        lambda: torch.randn(5, dtype=torch.complex64).conj(),
        lambda: torch.randn(5).bfloat16()[1:],
        lambda: torch.arange(300, dtype=torch.uint8)[77:],
        lambda: torch.tensor([True, False]),
    ],
)
def test_a_tensor_arrives_as_it_was(make: Any) -> None:
    sent = make()
    (arrived,) = carry(sent).tensors
    assert arrived.dtype == sent.dtype
    assert torch.equal(arrived, sent)
    arrived.clone().zero_()


def test_views_of_one_memory_stay_views_of_one_memory() -> None:
    base = torch.zeros(10_000)
    first, second = carry(base[100:200], base[150:300:3]).tensors
    first[50] = 4.0
    assert second[0] == 4.0
    assert first.untyped_storage().nbytes() < 1000


def test_parameters_stay_parameters_with_their_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    arrived = carry(parameter).tensors[0]
    assert isinstance(arrived, torch.nn.Parameter)
    assert arrived.grad is not None
    assert arrived.grad.tolist() == [2.0] * 3


def test_a_tensor_made_in_inference_mode_arrives_with_a_version_counter() -> None:
    with torch.inference_mode():
        sent = torch.ones(3)
        (arrived,) = carry(sent).tensors
    assert not arrived.is_inference()
    version = arrived._version
    arrived += 1
    assert arrived._version > version


def test_meta_tensors_are_refused() -> None:
    with pytest.raises(InterleaveError, match="meta"):
        carry(torch.empty(3, device="meta"))


@pytest.mark.parametrize("size", [8, LARGE])
def test_only_changed_bits_count_as_changed(size: int) -> None:
    arrived = carry(torch.ones(size), torch.ones(size + 1), kept=Kept(), shelf=Shelf())
    arrived.tensors[0].fill_(1.0)
    assert arrived.changed() == set()
    arrived.tensors[1].numpy()[3] = 2.0
    assert arrived.changed() == {1}


def test_a_kept_tensor_survives_what_a_block_does_to_it() -> None:
    kept, shelf, sent = Kept(), Shelf(), torch.randn(LARGE)
    carry(sent, kept=kept, shelf=shelf).tensors[0].zero_()
    outgoing = Outgoing(kept)
    outgoing.add(sent)
    table, arena = outgoing.finish()
    assert arena is None
    assert torch.equal(Incoming(table, None, shelf).tensors[0], sent)


def test_the_least_recently_used_is_forgotten_on_both_sides() -> None:
    kept, shelf = Kept(bound=10 * LARGE), Shelf()
    first, second, third = (torch.full((LARGE,), float(value)) for value in range(3))
    for tensor in (first, second, first, third):
        assert torch.equal(carry(tensor, kept=kept, shelf=shelf).tensors[0], tensor)
    assert len(shelf.places) == 2
    for tensor in (second, first, third):
        assert torch.equal(carry(tensor, kept=kept, shelf=shelf).tensors[0], tensor)


def test_after_doubt_everything_is_sent_again() -> None:
    kept, shelf, sent = Kept(), Shelf(), torch.randn(LARGE)
    outgoing = Outgoing(kept)
    outgoing.add(sent)
    _, lost = outgoing.finish()
    assert lost is not None
    os.close(lost)
    kept.distrust()
    assert torch.equal(carry(sent, kept=kept, shelf=shelf).tensors[0], sent)


def test_arenas_leave_no_descriptor_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        carry(torch.randn(LARGE))
    assert len(os.listdir("/proc/self/fd")) == before


def test_overwriting_an_expanded_tensor_writes_its_one_place() -> None:
    target = torch.zeros(1, 2).expand(3, 2)
    overwrite(target, torch.ones(1, 2).expand(3, 2))
    assert target.tolist() == [[1.0, 1.0]] * 3
