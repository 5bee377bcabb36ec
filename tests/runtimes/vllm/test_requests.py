"""One step of an engine runs many requests: every block sees the rows of its own, and gets back what it asked for."""

from __future__ import annotations

import contextlib
import copy
import operator
import random
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import interleave
from interleave.errors import InterleaveError, Unserved
from interleave.layout import Shard
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


@pytest.mark.parametrize("place", ["input", "output"])
@pytest.mark.parametrize("way", ["data", "numpy"])
def test_a_write_into_the_stream_that_no_version_counter_tells_reaches_the_model(
    engine: Any, original: Any, place: str, way: str
) -> None:
    found = []
    for model in (engine, original):
        with torch.no_grad(), model.trace(torch.tensor([PROMPT])):
            before = getattr(model.model.layers[1], place)
            memory = before.data if way == "data" else before.detach().numpy()
            memory[:, 2] *= -3.0
            logits = model.lm_head.output.save()
        found.append(logits)
    close(*found)
    with torch.no_grad(), original.trace(torch.tensor([PROMPT])):
        plain = original.lm_head.output.save()
    assert (found[1] - plain).abs().max() > 1e-2 * plain.abs().max()


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


def test_what_requests_do_to_different_parts_of_an_object_is_put_together(engine: Any, original: Any) -> None:
    def together(model: Any, prompts: list[Any]) -> list[Any]:
        items, slots, table, notes = ["before"], [None, 0.5, None, 2**70], {"kept": 0.5, "gone": 1}, Notes()
        members, rows = {0, "kept"}, torch.zeros(2, 96)
        first, second = rows
        with model.trace() as tracer:
            with tracer.invoke(prompts[0]):
                items.append(0)
                slots[0] = model.model.layers[0].output[0, 0].tolist()
                table["one"] = 1
                members.add(1)
                notes.one = 1
                members.discard(0)
                first[:] = model.model.layers[1].output[0, -1].detach()
            with tracer.invoke(prompts[1]):
                second[:] = model.model.layers[1].output[0, -1].detach()
                slots[2] = 2
                slots.append("end")
                items += [1, 2]
                table["two"] = table["kept"] + 2
                del table["gone"]
                members |= {1, 2}
                notes.two = 2
        return [slots[0], rows, items, slots[1:], table, members, (notes.one, notes.two)]

    prompts = [PROMPT[:4], PROMPTS[2]]
    ours = together(engine, prompts)
    theirs = together(original, [torch.tensor([prompt]) for prompt in prompts])
    close(torch.tensor(ours[0]), torch.tensor(theirs[0]))
    close(ours[1], theirs[1])
    assert ours[2:] == theirs[2:]
    assert ours[5] == {1, 2, "kept"} and ours[1].any()


def counted(model: Any, prompts: list[Any], change: Any, state: Any, found: list[Any]) -> None:
    with model.trace() as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                change(state, model.model.layers[1].output)
                found.append(model.lm_head.output.shape[1])


def ordered(state: Any, hidden: torch.Tensor) -> None:
    state.append(hidden.shape[1])
    state.sort()


def drawn_from(state: torch.Generator, hidden: torch.Tensor) -> None:
    torch.rand(hidden.shape[1], generator=state)


CHANGES = {
    "an element": (lambda: [0, 1], lambda state, hidden: operator.setitem(state, 0, state[0] + 1), "`state[0]`"),
    "a float": (lambda: [0.25, 1], lambda state, hidden: operator.setitem(state, 0, state[0] * 2), "`state[0]`"),
    "an entry": (lambda: {"n": 0}, lambda state, hidden: operator.setitem(state, "n", state["n"] + 1), "`state['n']`"),
    "a new entry": (dict, lambda state, hidden: operator.setitem(state, "n", hidden), "`state['n']`"),
    "a tensor": (lambda: torch.zeros(1), lambda state, hidden: state.add_(hidden.sum()), "`state`"),
    "an array": (lambda: np.zeros(2), lambda state, hidden: operator.iadd(state, hidden.shape[1]), "`state`"),
    "an attribute": (lambda: Notes(), lambda state, hidden: setattr(state, "seen", hidden), "`state.seen`"),
    "inside": (lambda: {"a": [[0]]}, lambda state, hidden: operator.setitem(state["a"][0], 0, 1), "`state['a'][0][0]`"),
    "an order": (lambda: [50, 2], ordered, "`state`"),
    "a removal": (lambda: [3, 4, 5], lambda state, hidden: state.pop(), "`state`"),
    "a removed member": (lambda: {3, 4}, lambda state, hidden: state.clear(), "`state`"),
    "a generator": (torch.Generator, drawn_from, "`state`"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_several_requests_do_to_one_thing_is_told_and_not_lost(engine: Any, original: Any, kind: str) -> None:
    make, change, name = CHANGES[kind]
    state, found = make(), []
    before = copy.deepcopy(state.get_state() if kind == "a generator" else state)
    with pytest.raises(InterleaveError, match=re.escape(name)) as raised:
        counted(engine, PROMPTS[:2], change, state, found)
    assert "own copy" in str(raised.value) and "combine it after the trace" in str(raised.value)
    assert found == [len(prompt) for prompt in PROMPTS[:2]]
    after = state.get_state() if kind == "a generator" else state
    assert repr(vars(after) if kind == "an attribute" else after) == repr(
        vars(before) if kind == "an attribute" else before
    )
    alone, theirs = make(), make()
    counted(engine, PROMPTS[:1], change, alone, [])
    counted(original, [torch.tensor([PROMPTS[0]])], change, theirs, [])
    if kind in ("a new entry", "an attribute"):
        alone, theirs = (x["n"] if kind == "a new entry" else x.seen for x in (alone, theirs))
    if isinstance(alone, torch.Tensor):
        close(alone, theirs)
    elif kind == "a generator":
        assert torch.equal(alone.get_state(), theirs.get_state())
    else:
        assert repr(alone) == repr(theirs) != repr(before)


def test_a_warning_in_a_block_is_no_change(engine: Any) -> None:
    def warn() -> None:
        warnings.warn("in a block", stacklevel=1)

    with engine.trace(PROMPTS[:2]):
        engine.model.layers[0].output
        warn()
        warnings.warn("in a block", stacklevel=1)


def test_a_list_of_prompts_changes_an_object_once_for_each(engine: Any) -> None:
    total, items = torch.zeros(()), []
    with pytest.raises(InterleaveError, match="`total`"), engine.trace(PROMPTS):
        hidden = engine.model.layers[1].output.save()
        items.append(hidden.shape[1])
        total += hidden.sum()
    assert items == [len(prompt) for prompt in PROMPTS]
    assert [x.shape[1] for x in hidden] == items and total == 0
    with pytest.raises(ZeroDivisionError) as raised, engine.trace(PROMPTS[:3]):
        hidden = engine.model.layers[1].output
        total += 1
        1 // (hidden.shape[1] - 2)
    assert any("`total`" in note for note in raised.value.__notes__)
    with pytest.raises(InterleaveError, match="`total`"), engine.generate(PROMPT, n=2, temperature=1.0):
        total += engine.model.layers[1].output.sum()


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


def noises(engine: Any, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What the blocks of several requests draw, from Python and numpy as well; and the client's next numbers."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    noise: list[torch.Tensor] = []
    with engine.generate(max_new_tokens=2, ignore_eos=True) as tracer:
        for prompts in (PROMPT, PROMPTS[1:3]):
            with tracer.invoke(prompts):
                own = [torch.randn(3)]
                for step in tracer.iter[:2]:
                    engine.model.layers[step].output
                    own += [torch.randn(3), torch.tensor([random.random(), np.random.rand()])]
                noise.append(torch.cat(own).save())
    return noise, torch.cat([torch.randn(3), torch.tensor([random.random(), np.random.rand()])])


def test_every_request_draws_its_own_numbers_and_the_client_goes_on_behind_the_first(engine: Any) -> None:
    noise, after = noises(engine, 5)
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    expected = [torch.randn(3)]
    for _ in range(3):
        expected += [torch.randn(3), torch.tensor([random.random(), np.random.rand()])]
    assert torch.equal(torch.cat([noise[0], after]), torch.cat(expected))
    numbers = torch.cat([*noise, after])
    assert len(noise) == 3 and len(set(numbers.tolist())) == len(numbers)
    again, other = noises(engine, 5), noises(engine, 6)
    assert all(map(torch.equal, [*noise, after], [*again[0], again[1]]))
    assert not any(map(torch.equal, noise, other[0]))


def test_every_sequence_of_a_prompt_draws_its_own_numbers(engine: Any) -> None:
    def numbers() -> torch.Tensor:
        torch.manual_seed(5)
        with engine.generate(max_new_tokens=1, ignore_eos=True) as tracer:
            with tracer.invoke(PROMPT, n=3, temperature=2.0, seed=3):
                engine.model.layers[0].output
                three = torch.randn(3).save()
            with tracer.invoke(PROMPTS[1]):
                engine.model.layers[0].output
                one = torch.randn(3).save()
        return torch.cat([*three, one])

    found = numbers()
    assert len(set(found.tolist())) == 12
    assert torch.equal(found, numbers())
    torch.manual_seed(5)
    assert torch.equal(found[:3], torch.randn(3))


def test_the_client_goes_on_if_any_block_drew_and_only_then(engine: Any) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with engine.trace(PROMPTS[:2]):
        engine.model.layers[0].output.save()
    assert torch.equal(torch.get_rng_state(), before)
    drawn = []
    for _ in range(2):
        with engine.trace() as tracer:
            with tracer.invoke(PROMPT):
                engine.model.layers[0].output.save()
            with tracer.invoke(PROMPTS[1]):
                engine.model.layers[0].output
                drawn.append(torch.randn(3).save())
    assert not torch.equal(*drawn)


# The end of a request


@contextlib.contextmanager
def steps(engine: Any) -> Iterator[list[set[str]]]:
    """The requests of each step that the engine makes."""
    scheduler = engine.vllm_entrypoint.llm_engine.engine_core.engine_core.scheduler
    update, made = scheduler.update_from_output, []

    def counted(scheduled: Any, output: Any) -> Any:
        made.append(set(scheduled.num_scheduled_tokens))
        return update(scheduled, output)

    with mock.patch.object(scheduler, "update_from_output", counted):
        yield made


ENGINES = {"one rank": {}, "two ranks": {"tp": 2}, "two stages": {"pp": 2}}


@pytest.mark.parametrize("ranks", ENGINES)
def test_a_request_ends_where_its_block_raises_or_stops_and_the_others_go_on(ranks: str) -> None:
    with traced("llama", **ENGINES[ranks]) as engine:
        seen: list[int] = []
        with steps(engine) as made, pytest.raises(ValueError, match="enough"):
            with engine.generate(PROMPT, max_new_tokens=100, ignore_eos=True) as tracer:
                for step in tracer.iter[:100]:
                    engine.model.layers[1].output
                    seen.append(step)
                    if step == 1:
                        raise ValueError("enough")
        assert seen == [0, 1] and len(made) <= 4

        with steps(engine) as made, engine.generate(PROMPT, max_new_tokens=100, min_tokens=50) as tracer:
            hidden = engine.model.layers[0].output.save()
            tracer.stop()
        assert hidden.shape == (1, len(PROMPT), 96) and len(made) <= 3

        with steps(engine) as made, pytest.raises(ValueError, match="the first"):
            with engine.generate(max_new_tokens=20, ignore_eos=True) as tracer:
                with tracer.invoke(PROMPT):
                    first = engine.model.layers[0].output.save()
                    raise ValueError("the first")
                with tracer.invoke(PROMPTS[1]):
                    ids = tracer.result.save()
                with tracer.invoke(PROMPTS[2]):
                    for _ in tracer.iter[4]:
                        fifth = engine.model.layers[1].output.save()
                        tracer.stop()
        assert first.shape == (1, len(PROMPT), 96) and fifth.shape == (1, 1, 96)
        # The requests of the steps, but for what was scheduled before the end was known.
        assert sum(map(len, made)) <= 20 + 1 + 5 + 2 + 1
        assert ids.tolist() == steps_of(engine, PROMPTS[1], 20, ignore_eos=True)[2].tolist()

        with steps(engine) as made, engine.generate(PROMPT, n=2, max_new_tokens=50, temperature=1.0) as tracer:
            for _ in tracer.iter[1]:
                two = engine.model.layers[1].output.save()
                tracer.stop()
        assert len(two) == 2 and len(made) <= 5
        assert set(engine._ask("nnsight_request_count")) == {0}


def test_a_request_that_no_block_can_run_for_ends_too() -> None:
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    with traced("llama", **chunked) as engine, steps(engine) as made:
        with pytest.raises(InterleaveError, match="several steps"):
            with engine.generate(list(range(3, 3 + 100)), max_new_tokens=20, ignore_eos=True):
                engine.model.layers[1].output.save()
    assert len(made) <= 3


# What the user knows


INNER = "model.layers.*.mlp.raw.source.maybe_fused_act_quant_0.output"


def inner(engine: Any, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    with engine.trace(PROMPT):
        seen = engine.model.layers[1].mlp.raw.source.maybe_fused_act_quant_0.output
        seen[:] *= scale
        seen.save()
        out = engine.model.layers[1].mlp.output.save()
    return seen, out


def test_a_declared_layout_makes_a_refused_value_whole(original: Any) -> None:
    with original.trace(torch.tensor([PROMPT])):
        expected = original.model.layers[1].mlp.down_proj.input.save()
        out = original.model.layers[1].mlp.output.save()
    with traced("llama", 2) as engine:
        with pytest.raises(InterleaveError, match=r"model\.declare") as refused:
            inner(engine)
        assert f"`model.{INNER.replace('*', '1')}`" in str(refused.value)
        engine.declare(INNER, Shard(-1))
        assert "over tp" in engine.layout(INNER.replace("*", "0"))
        found, result = inner(engine)
        close(found, expected[0])
        close(result, out)
        doubled, result = inner(engine, 2.0)
        close(doubled, 2 * expected[0])
        close(result, 2 * out)

        before = dict(engine.interleaver.fragments.tree)
        for wrong, error, text in [
            (("model.layers.*.mpl.raw.source.x.output", Shard(-1)), InterleaveError, "no module"),
            ((INNER, Shard(-1), "ep"), InterleaveError, "not sharded over 'ep'"),
            ((INNER.removesuffix(".output"), Shard(-1)), InterleaveError, "no location"),
            ((INNER, -1), InterleaveError, "no layout"),
            ((INNER.replace(".raw", ""), Shard(-1)), Unserved, "raw"),
            (("model.rotary_emb.output", Shard(-1)), Unserved, "no such module"),
        ]:
            with pytest.raises(error, match=text):
                engine.declare(*wrong)
        assert engine.interleaver.fragments.tree == before
        close(inner(engine)[0], expected[0])


def test_a_declaration_on_one_rank_is_checked_and_changes_nothing(engine: Any) -> None:
    with pytest.raises(InterleaveError, match="no module"):
        engine.declare("model.nothing.output", Shard(-1))
    engine.declare(INNER, Shard(-1))  # nothing is a piece on one rank
    found, _ = inner(engine)
    assert found.shape == (len(PROMPT), 144)


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


def test_traces_of_several_threads_run_one_after_another(engine: Any) -> None:
    expected = [stream(engine, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        for _ in range(3):
            found = list(threads.map(lambda prompt: stream(engine, prompt), PROMPTS))
            assert all(map(torch.equal, found, expected))
            generated = list(threads.map(lambda prompt: engine.generate(prompt, max_tokens=3), PROMPTS))
            assert [len(output[0].outputs[0].token_ids) for output in generated] == [3] * len(PROMPTS)
