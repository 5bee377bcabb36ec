"""Several ranks' errors, and errors that cross."""

from __future__ import annotations

import traceback

from interleave.errors import DivergedBlock
from interleave.ranks.driver import _judge
from interleave.ranks.raised import Raised, combine
from interleave.ranks.work import Reply


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_the_same_error_on_all_ranks_is_one_error() -> None:
    error = combine({0: ValueError("x"), 1: ValueError("x")}, 2)
    assert str(error) == "x"
    assert not hasattr(error, "__notes__")


def test_divergence_is_the_error_and_its_occasion_a_note() -> None:
    error = combine({0: ValueError("x"), 1: DivergedBlock("lost rank 0")}, 2)
    assert isinstance(error, DivergedBlock)
    assert error.__notes__ == ["rank 0 raised ValueError: x"]


def test_ranks_that_ended_well_are_named() -> None:
    assert "ranks [0, 2]" in combine({1: ValueError("x")}, 3).__notes__[0]


def test_ranks_with_different_ledgers_diverged_although_none_raised() -> None:
    error = _judge({0: Reply(digest="a"), 1: Reply(digest="b"), 2: Reply(digest="a")}, 3)
    assert isinstance(error, DivergedBlock)
    assert "ranks [0, 2] and ranks [1]" in str(error)
    assert _judge({0: Reply(digest="a"), 1: Reply(digest="a")}, 2) is None


def test_an_error_keeps_its_cause_notes_and_frames() -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ValueError("outer") from inner
    except ValueError as error:
        error.add_note("a note")
        back = Raised.of(error).rebuild()
    assert isinstance(back, ValueError)
    assert isinstance(back.__cause__, KeyError)
    assert back.__notes__ == ["a note"]
    assert traceback.extract_tb(back.__traceback__)[0].line == 'raise ValueError("outer") from inner'


def test_an_exception_that_refuses_to_be_pickled_becomes_a_description() -> None:
    class Stubborn(Exception):
        def __reduce__(self) -> str:
            raise TypeError("no")

    back = Raised.of(raised(Stubborn("how sad"))).rebuild()
    assert "Stubborn: how sad" in str(back)
