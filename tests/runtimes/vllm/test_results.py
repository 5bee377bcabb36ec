"""What blocks saved on its way to the client: who tells it, in whose memory, and what stays behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nnsight
import pytest
import torch

from interleave.errors import InterleaveError
from runtimes.vllm import arenas as module
from runtimes.vllm import payload
from runtimes.vllm.arenas import FREE, Arenas
from tests.runtimes.vllm.engines import traced

pytestmark = pytest.mark.vllm

PROMPTS = [[5, 17, 3, 99, 42, 149, 8, 60, 120, *range(20, 40)], [7, 9], [88, 14, 33, 101], [61]]


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with traced("llama", tp=2) as model:
        yield model


def streams(model: Any, prompts: list) -> Any:
    """The residual stream after every layer; of several prompts a list of each's."""
    with model.trace(prompts):
        streams = nnsight.save([layer.output for layer in model.model.layers])
    return streams


def test_ranks_take_turns_in_telling_what_requests_saved(engine: Any) -> None:
    with engine.trace(PROMPTS):
        told_by = nnsight.save(os.getpid())
        last = engine.model.layers[-1].output.save()
    assert sorted(Counter(told_by).values()) == [2, 2]
    assert os.getpid() not in told_by
    assert [stream.shape[1] for stream in last] == [len(prompt) for prompt in PROMPTS]
    for prompt, stream in zip(PROMPTS, last, strict=True):
        torch.testing.assert_close(stream, streams(engine, prompt)[-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("ending", ["plainly", "stopped", "never reached"])
def test_every_rank_can_fail_to_tell(engine: Any, ending: str) -> None:
    warnings.simplefilter("ignore")
    for _ in range(2):  # one request for each rank
        with pytest.raises(Exception, match=r"'lock' .* cannot leave the engine"), engine.trace(PROMPTS[0]) as tracer:
            lock = nnsight.save(threading.Lock())  # noqa: F841
            if ending == "stopped":
                tracer.stop()
            for _ in tracer.iter[:] if ending == "never reached" else ():
                engine.lm_head.output.save()
    assert len(streams(engine, PROMPTS)) == len(PROMPTS)


@pytest.mark.parametrize("captured", [torch.zeros(1), torch.zeros(1 << 12)])
def test_saved_values_are_the_clients_own(engine: Any, captured: torch.Tensor) -> None:
    """What comes back later is written over the file that they came in."""

    def saved(prompt: list) -> Any:
        with engine.trace(prompt):
            streams = nnsight.save([layer.output + captured[0] for layer in engine.model.layers])
        return streams

    first = saved(PROMPTS[0])
    copies = [stream.clone() for stream in first]
    assert copies[0].nbytes >= module.LARGE
    files = {path.stat().st_ino for path in Path(engine.arenas.path).iterdir()}
    assert files
    for _ in range(3):
        saved(PROMPTS[0][::-1])
    assert {path.stat().st_ino for path in Path(engine.arenas.path).iterdir()} == files
    for stream, copy in zip(first, copies, strict=True):
        assert torch.equal(stream, copy)


def test_one_answer_that_cannot_be_opened_leaves_no_file_of_the_others(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = payload.Answers.open

    def fails_first(self: Any, *arguments: Any) -> Any:
        monkeypatch.setattr(payload.Answers, "open", opened)
        opened(self, *arguments)
        raise MemoryError("no room")

    monkeypatch.setattr(payload.Answers, "open", fails_first)
    with pytest.raises(MemoryError, match="no room"):
        streams(engine, PROMPTS)
    assert {path.name[: len(FREE)] for path in Path(engine.arenas.path).iterdir()} == {FREE}


def test_a_late_write_into_a_replacement_is_refused_every_time(engine: Any) -> None:
    for _ in range(3):
        replacement = torch.ones(1, len(PROMPTS[0]), engine.config.hidden_size)
        with pytest.raises(InterleaveError, match="after the engine had gone on"), engine.trace(PROMPTS[0]):
            engine.model.layers[1].skip(replacement)
            engine.model.layers[1].output.save()
            replacement[:] += 1.0
            engine.lm_head.output.save()
        streams(engine, PROMPTS[0])


@pytest.mark.parametrize("ending", ["plainly", "stopped", "raised", "never reached", "caught", "function", "late"])
def test_what_a_block_held_ends_with_its_request(engine: Any, ending: str) -> None:
    """Not with some later collection of garbage: that may be many batches away."""
    with engine.edit() as (_, edit):
        engine.model.layers[0].output[:] += 1.0
    with engine.trace(PROMPTS[0]):
        gc.collect()
        gc.disable()
    warnings.simplefilter("ignore")
    with contextlib.suppress(ZeroDivisionError, InterleaveError):
        with engine.trace(PROMPTS) as tracer:
            held = nnsight.save([layer.output for layer in engine.model.layers])
            if ending == "stopped":
                tracer.stop()
            if ending == "raised":
                _ = 1 / 0
            if ending == "caught":
                try:
                    _ = 1 / 0
                except ZeroDivisionError as error:
                    kept = error  # noqa: F841
            if ending == "function":

                def count() -> int:
                    return len(held)

                _ = count()
            if ending == "late":
                held[0][:] += 1.0
            for _ in tracer.iter[:] if ending == "never reached" else ():
                engine.lm_head.output.save()
            engine.lm_head.output.save()
    try:
        with engine.trace(PROMPTS[1]):
            objects = gc.get_objects()
            blocks = nnsight.save(sum(type(one).__name__ == "EngineMediator" for one in objects))
            lengths = nnsight.save([one.shape[1] for one in objects if type(one) is torch.Tensor and one.dim() == 3])
    finally:
        with engine.trace(PROMPTS[1]):
            gc.enable()
        edit.clear()
    assert blocks == 3, "the edit's block, its copy for this request, and the request's own"
    assert not {len(prompt) for prompt in PROMPTS if len(prompt) > 2} & set(lengths)


@pytest.fixture
def arenas(tmp_path: Path) -> Arenas:
    return Arenas(str(tmp_path), "")


def made(arenas: Arenas, num_bytes: int) -> tuple[str, int]:
    """An arena's name, and which file it is."""
    name = arenas.name()
    descriptor = arenas.take(name, num_bytes)
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    assert found.st_size >= num_bytes
    return name, found.st_ino


def test_an_arena_that_was_given_back_is_taken_again_by_one_sender(arenas: Arenas) -> None:
    name, file = made(arenas, 10_000)
    assert made(arenas, 10)[1] != file, "it is in use"
    arenas.give_back(name)
    with pytest.raises(FileNotFoundError):
        arenas.open(name)
    assert made(arenas, 10_001)[1] != file, "it is too small"
    assert made(arenas, 9_999)[1] == file
    assert made(arenas, 9_999)[1] != file, "it is taken"


def test_the_smallest_that_is_large_enough_is_taken(arenas: Arenas) -> None:
    names = {num_bytes: made(arenas, num_bytes) for num_bytes in (30_000, 10_000, 20_000)}
    for name, _ in names.values():
        arenas.give_back(name)
    assert made(arenas, 15_000)[1] == names[20_000][1]


def test_no_more_is_kept_than_is_bound_to_be(arenas: Arenas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 25_000)
    for name, _ in [made(arenas, 10_000) for _ in range(4)]:
        arenas.give_back(name)
    kept = [path for path in Path(arenas.path).iterdir() if path.name.startswith(FREE)]
    assert [path.stat().st_size for path in kept] == [10_000, 10_000]
    assert len(list(Path(arenas.path).iterdir())) == 2
