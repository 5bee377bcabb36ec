"""What the scheduler does to a request - puts it aside, computes it in parts, finds its prompt in a cache - never shows
as a wrong value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from interleave.errors import InterleaveError
from tests.harness import difference
from tests.runtimes.vllm.engines import traced

pytestmark = pytest.mark.vllm

PROMPTS = [list(range(3 + n, 23 + n)) for n in range(3)]
STEPS = 60
#: Bytes of one block of 32 tokens' keys and values: two layers, six heads of 32, float32.
BLOCK = 2 * 2 * 6 * 32 * 4 * 32
#: Room for two requests and a bit: the third is put aside on the way.
TIGHT: dict[str, Any] = {"kv_cache_memory_bytes": 7 * BLOCK, "block_size": 32, "max_num_seqs": 3}
#: Besides: what was put aside is computed again in parts.
IN_PARTS: dict[str, Any] = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}


def read(engine: Any, edit: str = "nothing", done: list[int] | None = None) -> list[list[torch.Tensor]]:
    """The last layer's output in every step of every request; the first layer edited in the first step.

    `done` gets the first token of each prompt that came to its last step.
    """
    seen: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
    with engine.generate(ignore_eos=True, max_new_tokens=STEPS) as tracer:
        for prompt, own in zip(PROMPTS, seen, strict=True):
            with tracer.invoke(prompt):
                for step in tracer.iter[:STEPS]:
                    if step == 0 and edit == "raw, in place":
                        engine.model.layers[0].raw.output[0][:] *= 3
                    elif step == 0 and edit == "raw":
                        engine.model.layers[0].raw.output = tuple(
                            3 * part for part in engine.model.layers[0].raw.output
                        )
                    elif step == 0 and edit == "in place":
                        engine.model.layers[0].mlp.output[:] *= 3
                    own.append(engine.model.layers[1].output)
                    if done is not None and step == STEPS - 1:
                        done.append(prompt[0])
    return seen


@contextmanager
def tight(**options: Any) -> Iterator[Any]:
    """An engine in which requests are put aside, or this fails."""
    with traced("llama", **TIGHT | options) as engine:
        scheduler = engine.vllm_entrypoint.llm_engine.engine_core.engine_core.scheduler
        with mock.patch.object(scheduler, "_preempt_request", wraps=scheduler._preempt_request) as put_aside:
            yield engine
        assert put_aside.called, "the cache is too large to put a request aside"


@pytest.mark.parametrize("options", [{}, IN_PARTS], ids=["at once", "in parts"])
def test_a_request_that_was_put_aside_sees_each_step_once(options: dict[str, Any]) -> None:
    with traced("llama") as engine:
        expected = read(engine)
    with tight(**options) as engine:
        found = read(engine)
    for own, other in zip(found, expected, strict=True):
        assert len(own) == STEPS
        for value, truth in zip(own, other, strict=True):
            assert torch.allclose(value, truth, atol=1e-4), value.shape


@pytest.mark.parametrize("edit", ["in place", "raw", "raw, in place"])
def test_a_request_that_was_put_aside_after_an_edit_is_told_and_the_others_go_on(edit: str) -> None:
    done: list[int] = []
    with tight() as engine:
        with pytest.raises(InterleaveError, match="without the edits that its block made"):
            read(engine, edit, done)
        assert engine._ask("nnsight_request_count") == [0]
    assert 0 < len(done) < len(PROMPTS)


def test_a_salt_of_the_users_does_not_share_what_a_block_changed() -> None:
    prompt = {"prompt_token_ids": [7 * n % 140 + 3 for n in range(70)], "cache_salt": "mine"}
    with traced("llama", enable_prefix_caching=True, block_size=32) as engine:
        before = engine.generate(dict(prompt), max_new_tokens=4, ignore_eos=True)[0].outputs[0].token_ids
    with traced("llama", enable_prefix_caching=True, block_size=32) as engine:
        with engine.trace(dict(prompt)):
            engine.model.layers[0].output[:] *= -3
            engine.lm_head.output
        after = engine.generate(dict(prompt), max_new_tokens=4, ignore_eos=True)[0].outputs[0].token_ids
    assert list(after) == list(before)


def test_in_bfloat16_an_edit_of_the_last_position_leaves_the_others_their_bits() -> None:
    prompt = PROMPTS[0]
    with traced("llama", dtype="bfloat16") as engine:
        with engine.trace(prompt):
            before = engine.lm_head.output.save()
        with engine.trace(prompt):
            engine.model.layers[0].output[:, -1] += 0.5
            after = engine.lm_head.output.save()
    assert torch.equal(after[:, :-1], before[:, :-1])
    assert difference(before[:, -1], after[:, -1])
