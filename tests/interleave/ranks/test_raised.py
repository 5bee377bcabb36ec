"""Several ranks' errors, and errors that cross."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from interleave.errors import DivergedBlock
from interleave.ranks.driver import _judge
from interleave.ranks.raised import MOST_FRAMES, Raised, combine
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


def test_what_a_rank_raised_is_the_error_and_that_others_lost_it_a_note() -> None:
    error = combine({0: DivergedBlock("lost rank 1"), 1: ValueError("x")}, 2)
    assert isinstance(error, ValueError)
    assert error.__notes__ == ["rank 0 raised DivergedBlock: lost rank 1"]


def test_divergence_is_the_error_where_nobody_raised_anything_else() -> None:
    error = combine({0: DivergedBlock("waited for rank 1"), 1: DivergedBlock("waited for rank 0")}, 2)
    assert isinstance(error, DivergedBlock)
    assert error.__notes__ == ["rank 1 raised DivergedBlock: waited for rank 0"]


def test_of_an_endless_recursion_a_few_frames_travel() -> None:
    def fall() -> None:
        fall()

    frames = traceback.extract_tb(Raised.of(_caught(fall)).rebuild().__traceback__)
    assert 2 <= len(frames) <= MOST_FRAMES


def _caught(function: Callable[[], None]) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def test_ranks_that_ended_well_are_named() -> None:
    assert combine({1: ValueError("x")}, 3).__notes__ == ["only rank 1 raised; ranks 0, 2 did not"]


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
