"""One step of an engine runs many requests: every block sees the rows of its own, and gets back what it asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import interleave
from interleave.errors import InterleaveError
from tests.runtimes.vllm.checkpoints import tiny
from tests.runtimes.vllm.engines import traced

pytestmark = pytest.mark.vllm

PROMPT = [5, 17, 3, 99, 42, 149, 8, 60, 120]
PROMPTS = [
    PROMPT,
    [7, 9],
    [88, 14, 33, 101],
    [61],
    [12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23],
    [4, 4, 4],
    PROMPT[:5],
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """Three requests at a time, so that the others arrive in the middle of their generations."""
    with traced("llama", max_num_seqs=3) as model:
        yield model


@pytest.fixture(scope="module")
def original() -> Any:
    """HuggingFace's model on this process, traced."""
    return interleave.load(tiny("llama"), dtype="float32", attn_implementation="eager")


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-4 * expected.detach().abs().max().item())


def stream(model: Any, prompt: Any) -> torch.Tensor:
    with model.trace(prompt):
        stream = model.model.layers[1].output.save()
    return stream[0] if isinstance(stream, list) else stream


# Generation


def steps_of(model: Any, prompt: Any, steps: int, **options: Any) -> tuple[list, list, torch.Tensor]:
    """Of each step of a greedy generation the residual stream and the logits of the last position; and the ids."""
    streams, logits = [], []
    with model.generate(prompt, max_new_tokens=steps, **options) as tracer:
        streams.save()
        logits.save()
        for _ in tracer.iter[:steps]:
            streams.append(model.model.layers[0].output)
            logits.append(model.lm_head.output[:, -1])
        ids = tracer.result.save()
    return streams, logits, ids


def test_a_generation_gives_what_transformers_gives_at_every_step(engine: Any, original: Any) -> None:
    ours = steps_of(engine, [PROMPT], 6, ignore_eos=True)
    theirs = steps_of(original, torch.tensor([PROMPT]), 6, eos_token_id=-1)
    assert len(ours[0]) == len(theirs[0]) == 6
    for found, expected in zip(ours[0] + ours[1], theirs[0] + theirs[1], strict=True):
        close(found, expected)
    assert ours[2].tolist() == theirs[2].tolist()


def test_edits_at_some_steps_change_what_transformers_changes(engine: Any, original: Any) -> None:
    def edited(model: Any, prompt: Any, **options: Any) -> tuple[list, torch.Tensor]:
        logits = []
        with model.generate(prompt, max_new_tokens=6, **options) as tracer:
            logits.save()
            for step in tracer.iter[:6]:
                if step in (0, 3):
                    model.model.layers[0].mlp.down_proj.output[:, -1, :7] += 2.0
                if step == 4:
                    model.model.layers[1].output = model.model.layers[1].output * -1.0
                logits.append(model.lm_head.output[:, -1])
            ids = tracer.result.save()
        return logits, ids

    ours = edited(engine, [PROMPT], ignore_eos=True)
    theirs = edited(original, torch.tensor([PROMPT]), eos_token_id=-1)
    for found, expected in zip(ours[0], theirs[0], strict=True):
        close(found, expected)
    assert ours[1].tolist() == theirs[1].tolist()
    assert ours[1].tolist() != steps_of(engine, PROMPT, 6, ignore_eos=True)[2].tolist()


def test_a_single_step_can_be_named(engine: Any) -> None:
    streams, _, _ = steps_of(engine, PROMPT, 5, ignore_eos=True)
    with engine.generate(PROMPT, max_new_tokens=5, ignore_eos=True) as tracer:
        for _ in tracer.iter[3]:
            third = engine.model.layers[0].output.save()
    assert torch.equal(third, streams[3])
    with engine.generate(PROMPT, max_new_tokens=5, ignore_eos=True) as tracer:
        found = list().save()
        with tracer.all():
            found.append(engine.model.layers[0].output)
    assert [tuple(x.shape) for x in found] == [(1, 9, 96)] + 4 * [(1, 1, 96)]
    for one, other in zip(found, streams, strict=True):
        assert torch.equal(one, other)


def test_logits_and_samples_of_every_step(engine: Any) -> None:
    logits, samples = [], []
    with engine.generate(PROMPT, max_new_tokens=4, ignore_eos=True) as tracer:
        logits.save()
        samples.save()
        for _ in tracer.iter[:4]:
            logits.append(engine.logits)
            samples.append(engine.samples)
        ids = tracer.result.save()
    assert [int(one.argmax()) for one in logits] == [int(one) for one in samples] == ids[0, len(PROMPT) :].tolist()


def test_written_logits_and_samples_decide_what_is_generated(engine: Any) -> None:
    with engine.generate(PROMPT, max_new_tokens=4, ignore_eos=True) as tracer:
        for step in tracer.iter[:4]:
            if step == 1:
                engine.logits[:, 77] = 1e6
            elif step == 2:
                engine.samples = torch.full_like(engine.samples, 78)
            elif step == 3:
                chosen = torch.zeros_like(engine.logits)
                chosen[:, 79] = 1.0
                engine.logits = chosen
        ids = tracer.result.save()
    assert ids[0, -3:].tolist() == [77, 78, 79]


def test_without_a_block_generate_gives_the_engines_outputs(engine: Any) -> None:
    _, _, ids = steps_of(engine, PROMPT, 5, ignore_eos=True)
    (output,) = engine.generate(PROMPT, max_new_tokens=5, ignore_eos=True)
    assert [*output.prompt_token_ids, *output.outputs[0].token_ids] == ids[0].tolist()
    outputs = engine.generate(PROMPTS, max_new_tokens=2)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS


def test_sampling_is_asked_for_in_transformers_words(engine: Any) -> None:
    def drawn(**options: Any) -> list[int]:
        (output,) = engine.generate(PROMPT, max_new_tokens=12, ignore_eos=True, **options)
        return list(output.outputs[0].token_ids)

    greedy = drawn()
    assert greedy == drawn(do_sample=False) == drawn(temperature=0.0)
    hot = drawn(do_sample=True, temperature=2.0, seed=1)
    assert hot == drawn(do_sample=True, temperature=2.0, seed=1) != greedy
    assert hot != drawn(do_sample=True, temperature=2.0, seed=2)
    assert drawn(do_sample=True, seed=1) == drawn(temperature=1.0, seed=1)


# Prompts


@pytest.mark.parametrize(
    "prompt",
    [
        tuple(PROMPT),
        [PROMPT],
        torch.tensor(PROMPT),
        torch.tensor([PROMPT]),
        {"input_ids": torch.tensor([PROMPT])},
        {"input_ids": [PROMPT], "attention_mask": [[1] * len(PROMPT)]},
        {"input_ids": torch.tensor([[0, 0, *PROMPT]]), "attention_mask": torch.tensor([[0, 0] + [1] * len(PROMPT)])},
        {"prompt_token_ids": PROMPT},
    ],
    ids=["tuple", "list of one", "[n]", "[1, n]", "tokenizer", "lists and mask", "padded on the left", "vLLM's own"],
)
def test_a_prompt_may_be_written_in_many_ways(engine: Any, prompt: Any) -> None:
    assert torch.equal(stream(engine, prompt), stream(engine, PROMPT))


def test_ids_may_be_named(engine: Any) -> None:
    with engine.trace(input_ids=torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), use_cache=False):
        named = engine.model.layers[1].output.save()
    assert torch.equal(named, stream(engine, PROMPT))


# Many at once


def test_a_list_of_prompts_gives_lists_in_order(engine: Any, original: Any) -> None:
    with engine.trace(PROMPTS):
        streams = engine.model.layers[1].output.save()
        last = engine.lm_head.output[:, -1].save()
    assert len(streams) == len(last) == len(PROMPTS)
    for prompt, found in zip(PROMPTS, streams, strict=True):
        close(found, stream(original, torch.tensor([prompt])))
    batch = torch.tensor([PROMPTS[0][:4], PROMPTS[2]])
    with engine.trace(batch):
        both = engine.model.layers[1].output.save()
    for row, found in zip(batch, both, strict=True):
        close(found, stream(original, row[None]))


def test_invokes_see_their_own_rows_only(engine: Any, original: Any) -> None:
    with engine.trace() as tracer:
        with tracer.invoke(PROMPT):
            first = engine.model.layers[1].output.save()
        with tracer.invoke([PROMPTS[1], PROMPTS[2]]):
            pair = engine.model.layers[1].output.save()
        with tracer.invoke(PROMPTS[3]):
            engine.model.layers[0].output[:] = 0
            silenced = engine.model.layers[1].output.save()
    close(first, stream(original, torch.tensor([PROMPT])))
    for prompt, found in zip(PROMPTS[1:3], pair, strict=True):
        close(found, stream(original, torch.tensor([prompt])))
    assert (silenced - stream(engine, PROMPTS[3])).abs().max() > 0.1


def test_requests_of_other_lengths_that_arrive_later_keep_their_rows(engine: Any, original: Any) -> None:
    lengths = [7, 2, 5, 1, 4, 3, 6]
    found: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
    with engine.generate(ignore_eos=True) as tracer:
        for prompt, length, own in zip(PROMPTS, lengths, found, strict=True):
            with tracer.invoke(prompt, max_new_tokens=length):
                for step in tracer.iter[:length]:
                    if step == 1:
                        engine.model.layers[0].mlp.output[..., : len(prompt)] += length
                    own.append(engine.model.layers[1].output.save())
    for prompt, length, own in zip(PROMPTS, lengths, found, strict=True):
        expected: list[torch.Tensor] = []
        with original.generate(torch.tensor([prompt]), max_new_tokens=length, eos_token_id=-1) as tracer:
            for step in tracer.iter[:length]:
                if step == 1:
                    original.model.layers[0].mlp.output[..., : len(prompt)] += length
                expected.append(original.model.layers[1].output.save())
        assert len(own) == length
        for one, other in zip(own, expected, strict=True):
            close(one, other)


def test_several_samples_of_one_prompt_give_lists(engine: Any) -> None:
    with engine.generate(PROMPT, max_new_tokens=3, n=3, temperature=2.0, seed=3, ignore_eos=True) as tracer:
        hidden = engine.model.layers[1].output.save()
        for _ in tracer.iter[1:3]:
            stream = engine.model.layers[0].output.save()
            sample = engine.samples.save()
        ids = tracer.result.save()
    assert len(hidden) == len(stream) == len(ids) == 3
    assert [int(one[0, -1]) for one in ids] == [int(one) for one in sample]
    assert torch.equal(hidden[0], hidden[1]) and torch.equal(hidden[0], hidden[2])
    assert hidden[0].shape == (1, len(PROMPT), 96) and stream[0].shape == (1, 1, 96)
    assert len({float(one.sum()) for one in stream}) > 1


# What blocks do to the caller's own objects


class Notes:
    def __init__(self) -> None:
        self.seen: list[Any] = []


def test_a_blocks_changes_reach_the_callers_objects(engine: Any) -> None:
    items, table, notes, tensor, array = [], {"kept": 1}, Notes(), torch.zeros(3), [0, 0]
    alias = items
    with engine.trace(PROMPT):
        items.append(engine.model.layers[0].output.save())
        table["mean"] = engine.model.layers[1].output.mean()
        notes.seen.append(len(items))
        notes.last = "there"
        tensor += 1
        array[1] = 5
    assert items is alias and len(items) == 1 and items[0].shape == (1, len(PROMPT), 96)
    assert sorted(table) == ["kept", "mean"] and notes.seen == [1] and notes.last == "there"
    assert tensor.tolist() == [1, 1, 1] and array == [0, 5]


def test_blocks_of_several_requests_change_one_object_together(engine: Any) -> None:
    items, table = ["before"], {}
    with engine.trace() as tracer:
        for number, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt):
                hidden = engine.model.layers[1].output
                items.append((number, hidden.shape[1]))
                table[number] = hidden[0, 0, :2].tolist()
    assert sorted(items[1:]) == [(number, len(prompt)) for number, prompt in enumerate(PROMPTS)]
    assert items[0] == "before"
    for number, prompt in enumerate(PROMPTS):
        assert table[number] == stream(engine, prompt)[0, 0, :2].tolist()


# Random numbers


def drawn(model: Any, prompt: Any) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    with model.trace(prompt):
        first = torch.randn(4).save()
        model.model.layers[0].output
        second = torch.randn(4).save()
    return torch.cat([first, second]), torch.randn(3)


def test_blocks_draw_the_clients_random_numbers(engine: Any, original: Any) -> None:
    ours, theirs = drawn(engine, PROMPT), drawn(original, torch.tensor([PROMPT]))
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


# The engine's own ways of saving work


def test_a_prompt_is_read_whole_though_its_prefix_is_cached() -> None:
    with traced("llama", enable_prefix_caching=True, block_size=32) as engine:
        prompt = list(range(3, 3 + 40))
        first = stream(engine, prompt)
        assert torch.equal(stream(engine, prompt), first)
        (plain,) = engine.generate(prompt, max_new_tokens=3, logprobs=1)
        (again,) = engine.generate(prompt, max_new_tokens=3, logprobs=1)
        assert again.num_cached_tokens, "the engine caches what nobody changes"

        with engine.trace(prompt):
            engine.model.layers[0].output[:] *= -3
            engine.model.layers[0].output.save()
        other = list(range(100, 100 + 40))
        with engine.trace(other):
            engine.model.layers[0].output[:] *= -3
        with traced("llama", enable_prefix_caching=True) as fresh:
            (untouched,) = fresh.generate(other, max_new_tokens=3, logprobs=1)
        (steered,) = engine.generate(other, max_new_tokens=3, logprobs=1)
        assert values(steered) == pytest.approx(values(untouched), rel=1e-5)
        (after,) = engine.generate(prompt, max_new_tokens=3, logprobs=1)
        assert values(after) == pytest.approx(values(plain), rel=1e-5)
        assert torch.equal(stream(engine, other), stream(engine, other))


def values(output: Any) -> list[float]:
    return [
        row[token].logprob for token, row in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
    ]


def test_a_prompt_that_is_computed_in_parts_is_its_own_requests_error() -> None:
    long, short = list(range(3, 3 + 60)), PROMPT
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    with traced("llama", **chunked) as engine:
        with pytest.raises(InterleaveError, match="60 tokens in several steps"), engine.trace() as tracer:
            with tracer.invoke(short):
                read = engine.model.layers[1].output.save()
            with tracer.invoke(long):
                engine.model.layers[1].output.save()
        assert read.shape == (1, len(short), 96)
        (output,) = engine.generate(long, max_new_tokens=2, ignore_eos=True)
        assert len(output.outputs[0].token_ids) == 2
        assert torch.equal(stream(engine, short), read)
        assert engine._ask("nnsight_request_count") == [0]
    with traced("llama", **chunked | {"max_num_batched_tokens": 64}) as engine:
        assert stream(engine, long).shape == (1, 60, 96)


def test_requests_that_were_put_aside_read_the_same_rows_or_are_told() -> None:
    prompts = [list(range(3 + n, 3 + n + 30)) for n in range(3)]
    steps = 60

    def read(engine: Any) -> list[list[torch.Tensor]]:
        seen: list[list[torch.Tensor]] = [[] for _ in prompts]
        with engine.generate(ignore_eos=True, max_new_tokens=steps) as tracer:
            for prompt, own in zip(prompts, seen, strict=True):
                with tracer.invoke(prompt):
                    for _ in tracer.iter[:steps]:
                        own.append(engine.model.layers[1].output)
        return seen

    with traced("llama") as engine:
        expected = read(engine)
    # Two layers of keys and values of six heads of 32 for 32 tokens make a block; there is room for eight.
    block = 2 * 2 * 6 * 32 * 4 * 32
    with traced("llama", kv_cache_memory_bytes=8 * block, block_size=32, max_num_seqs=3) as engine:
        scheduler = engine.vllm_entrypoint.llm_engine.engine_core.engine_core.scheduler
        with mock.patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request) as put_aside:
            found = read(engine)
            found = read(engine)
        assert put_aside.called, "the cache is too large to put a request aside"
        for own, other in zip(found, expected, strict=True):
            assert [value.shape for value in own] == [value.shape for value in other]
            for value, same in zip(own, other, strict=True):
                close(value, same)

        done = []
        with pytest.raises(InterleaveError, match="put this request aside"):
            with engine.generate(ignore_eos=True, max_new_tokens=steps) as tracer:
                for prompt in prompts:
                    with tracer.invoke(prompt):
                        for step in tracer.iter[:steps]:
                            engine.model.layers[0].output[:] *= 1.01
                            if step == steps - 1:
                                done.append(prompt[0])
        assert 0 < len(done) < len(prompts)
        assert engine._ask("nnsight_request_count") == [0]
