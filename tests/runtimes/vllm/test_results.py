"""What blocks saved on its way to the client: who tells it, in whose memory, and what stays behind."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nnsight
import pytest
import torch

from runtimes.vllm import arenas as module
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


def test_every_rank_can_fail_to_tell(engine: Any) -> None:
    for _ in range(2):  # one request for each rank
        with pytest.raises(Exception, match=r"'lock' .* cannot leave the engine"), engine.trace(PROMPTS[0]):
            lock = nnsight.save(threading.Lock())  # noqa: F841
    assert len(streams(engine, PROMPTS)) == len(PROMPTS)


def test_saved_values_are_the_clients_own(engine: Any) -> None:
    """What comes back later is written over the file that they came in."""
    first = streams(engine, PROMPTS[0])
    copies = [stream.clone() for stream in first]
    assert copies[0].nbytes >= module.LARGE
    files = {path.stat().st_ino for path in Path(engine.arenas.path).iterdir()}
    for _ in range(3):
        streams(engine, PROMPTS[0][::-1])
    assert {path.stat().st_ino for path in Path(engine.arenas.path).iterdir()} == files
    for stream, copy in zip(first, copies, strict=True):
        assert torch.equal(stream, copy)


def test_what_a_block_held_ends_with_its_request(engine: Any) -> None:
    """Not with some later collection of garbage: that may be many batches away."""
    with engine.edit() as (_, edit):
        engine.model.layers[0].output[:] += 1.0
    with engine.trace(PROMPTS):
        gc.collect()
        gc.disable()
        nnsight.save([layer.output for layer in engine.model.layers])
    try:
        with engine.trace(PROMPTS[0]):
            alive = nnsight.save(sum(type(one).__name__ == "EngineMediator" for one in gc.get_objects()))
    finally:
        with engine.trace(PROMPTS[0]):
            gc.enable()
        edit.clear()
    assert alive == 3, "the edit's block, its copy for this request, and the request's own"


@pytest.fixture
def arenas(tmp_path: Path) -> Arenas:
    return Arenas(str(tmp_path), "")


def made(arenas: Arenas, num_bytes: int) -> tuple[str, int]:
    """A new arena's name, and which file it is."""
    name = arenas.name()
    descriptor = arenas.create(name, num_bytes)
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
