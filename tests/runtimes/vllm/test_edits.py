"""Blocks that stay on the engine run for every request, whoever sends it, and until they are cleared."""

# Blocks bind names that come back on the output.
# ruff: noqa: F841

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from interleave.errors import InterleaveError
from tests.runtimes.vllm.engines import traced

pytestmark = pytest.mark.vllm

PROMPT = [5, 17, 3, 99, 42, 149, 8, 60, 120]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    with traced("llama", request.param) as model:
        yield model


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.clear_edits()
        assert set(engine._ask("nnsight_request_count")) == {0}


def by_vllm(engine: Any, *prompts: list[int]) -> list[Any]:
    """What vLLM's own client gets."""
    return engine.vllm_entrypoint.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_an_edit_runs_for_every_request_until_it_is_cleared(engine: Any) -> None:
    before = tokens(by_vllm(engine, PROMPT, PROMPT[:4]))
    with engine.trace(PROMPT):
        layer = engine.model.layers[0].output.save()
    with engine.edit() as (tracer, edit):
        seen = engine.model.layers[0].output.save()
        for _ in tracer.iter[:]:
            engine.model.layers[1].output[..., :30] += 5.0
    outputs = by_vllm(engine, PROMPT, PROMPT[:4])
    assert torch.equal(outputs[0].saves["seen"], layer)
    assert outputs[1].saves["seen"].shape == (1, 4, 96)
    assert [output.error for output in outputs] == [None, None]
    assert tokens(outputs) != before
    ours = engine.generate([PROMPT, PROMPT[:4]], max_new_tokens=4, ignore_eos=True)
    assert tokens(ours) == tokens(outputs) and torch.equal(ours[0].saves["seen"], layer)
    with engine.trace(PROMPT):
        steered = engine.model.layers[1].output.save()
    edit.clear()
    edit.clear()
    with engine.trace(PROMPT):
        plain = engine.model.layers[1].output.save()
    torch.testing.assert_close(steered[..., :30], plain[..., :30] + 5.0)
    assert tokens(by_vllm(engine, PROMPT, PROMPT[:4])) == before


def test_requests_choose_edits_by_name(engine: Any) -> None:
    with engine.edit(name="one") as (_, one):
        first = engine.model.layers[0].output.mean().save()
    with engine.edit(name="two") as (_, _two):
        second = engine.model.layers[1].output.mean().save()
    with engine.edit() as (_, _always):
        third = engine.model.layers[0].input.mean().save()

    def names(**options: Any) -> set[str]:
        (output,) = engine.generate(PROMPT, max_new_tokens=1, **options)
        return set(output.saves)

    assert names() == {"first", "second", "third"}
    assert names(edits=["one"]) == {"first", "third"}
    assert names(edits=[]) == {"third"}
    with pytest.raises((InterleaveError, ValueError), match="three"):
        names(edits=["three"])
    one.clear()
    assert names() == {"second", "third"}


def test_an_edits_error_is_told_on_the_output_and_the_request_goes_on(engine: Any) -> None:
    before = tokens(by_vllm(engine, PROMPT))
    with engine.edit():
        engine.model.layers[0].output
        1 // 0
    outputs = by_vllm(engine, PROMPT)
    assert tokens(outputs) == before
    assert isinstance(outputs[0].error, ZeroDivisionError)
    last = traceback.extract_tb(outputs[0].error.__traceback__)[-1]
    assert last.filename == __file__ and last.line.startswith("1 // 0")
    with pytest.raises(ZeroDivisionError), engine.trace(PROMPT):
        engine.model.layers[1].output.save()


def test_what_an_edit_saves_and_cannot_leave_is_named(engine: Any) -> None:
    with engine.edit():
        engine.model.layers[0].output
        function = (lambda: 3).save()
    (output,) = by_vllm(engine, PROMPT)
    assert isinstance(output.error, InterleaveError) and "'function'" in str(output.error)


def test_edits_draw_alike_on_every_rank_otherwise_in_every_request_and_leave_the_engines_alone(engine: Any) -> None:
    hot = SamplingParams(temperature=1.5, max_tokens=6, seed=3, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[:4]}]
    before = tokens(engine.vllm_entrypoint.generate(prompts, hot, use_tqdm=False))

    def noises() -> list[torch.Tensor]:
        torch.manual_seed(11)
        with engine.edit() as (_, edit):
            engine.model.layers[0].output
            noise = torch.randn(3)
            ranks = [torch.empty(3) for _ in range(torch.distributed.get_world_size())]
            torch.distributed.all_gather(ranks, noise)
            ranks.save()
        with engine.edit() as (_, another):
            engine.model.layers[0].output
            other = torch.randn(3).save()
        found = []
        for _ in range(2):
            outputs = engine.vllm_entrypoint.generate(prompts, hot, use_tqdm=False)
            assert tokens(outputs) == before
            for output in outputs:
                assert all(torch.equal(output.saves["ranks"][0], own) for own in output.saves["ranks"])
                found += [output.saves["ranks"][0], output.saves["other"]]
        with engine.trace(PROMPT):
            engine.model.layers[0].output
            found.append(torch.randn(3).save())
        edit.clear()
        another.clear()
        return found

    found = noises()
    numbers = torch.cat(found).tolist()
    assert len(set(numbers)) == len(numbers) == 27
    assert all(map(torch.equal, found, noises()))


def test_an_edit_that_another_engine_would_copy_is_refused(engine: Any) -> None:
    with pytest.raises(InterleaveError, match="inplace"):
        engine.edit(inplace=False)
    with pytest.raises(InterleaveError, match="name=3"):
        engine.edit(name=3)


def test_edits_and_a_prefix_cache() -> None:
    prompt = list(range(3, 3 + 40))
    with traced("llama", enable_prefix_caching=True, block_size=32) as engine:
        before = tokens(by_vllm(engine, prompt))
        with engine.edit() as (tracer, edit):
            seen = engine.model.layers[0].output.shape[1].save()
            for _ in tracer.iter[:]:
                engine.model.layers[1].output[..., :30] += 5.0
        (first,) = by_vllm(engine, prompt)
        assert first.saves["seen"] == 40 and first.error is None
        (second,) = by_vllm(engine, prompt)
        assert isinstance(second.error, InterleaveError) and "prefix cache" in str(second.error)
        assert engine.generate(prompt, max_new_tokens=1)[0].saves["seen"] == 40
        edit.clear()
        (after,) = by_vllm(engine, prompt)
        assert tokens([after]) == before and not after.num_cached_tokens
