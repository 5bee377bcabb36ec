"""The async engine: many traces in flight, each with its own outputs and saved values."""

# Blocks bind names that come back on the output.
# ruff: noqa: F841

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from interleave.errors import InterleaveError
from interleave.layout import Partial
from tests.runtimes.vllm.engines import traced

pytestmark = [
    pytest.mark.vllm,
    # vLLM's client leaves its context of sockets to the collector.
    pytest.mark.filterwarnings("ignore:Exception ignored in.*Context:pytest.PytestUnraisableExceptionWarning"),
]

PROMPT = [5, 17, 3, 99, 42, 149, 8, 60, 120]


def expected(prompt: list[int]) -> torch.Tensor:
    with traced("llama") as model, model.trace(prompt):
        hidden = model.model.layers[1].output.save()
    return hidden


async def steered(engine: Any, prompt: list[int], scale: float, steps: int) -> Any:
    with engine.generate(prompt, max_new_tokens=steps, ignore_eos=True) as tracer:
        x = list().save()
        for _ in tracer.iter[:steps]:
            engine.model.layers[0].output[:] *= scale
            x.append(engine.model.layers[1].output)
        ids = tracer.result.save()
    last = await tracer.backend
    return last.saves["x"], last.saves["ids"]


async def story(engine: Any) -> dict[str, Any]:
    told: dict[str, Any] = {}
    with engine.trace(PROMPT) as tracer:
        hidden = engine.model.layers[1].output.save()
    outputs = [output async for output in tracer.backend]
    told["hidden"] = outputs[-1].saves["hidden"]

    with pytest.raises(InterleaveError, match="once"):
        await tracer.backend

    alone = [await steered(engine, PROMPT[: 3 + n], 1.0 + n, 4) for n in range(4)]

    async def plain(prompt: list[int]) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
        output = None
        async for output in engine.vllm_entrypoint.generate({"prompt_token_ids": prompt}, params, uuid.uuid4().hex):
            await asyncio.sleep(0)
        assert output is not None
        return list(output.outputs[0].token_ids)

    untraced = await plain(PROMPT)
    together = await asyncio.gather(
        *(steered(engine, PROMPT[: 3 + n], 1.0 + n, 4) for n in range(4)), plain(PROMPT), plain(PROMPT[:2])
    )
    told["alone"], told["together"] = alone, together[:4]
    told["plain"] = (untraced, together[4])

    items: list[Any] = []
    with engine.trace(PROMPT) as tracer:
        items.append(engine.model.layers[0].output.save())
    await tracer.backend
    told["items"] = items

    with engine.trace(PROMPT) as tracer:
        engine.model.layers[0].output
        1 // 0
    try:
        await tracer.backend
    except ZeroDivisionError as error:
        told["raised"] = error

    with engine.generate(PROMPT, max_new_tokens=100, ignore_eos=True) as tracer:
        for _ in tracer.iter[:100]:
            engine.model.layers[0].output.save()
    stream = aiter(tracer.backend)
    await anext(stream)
    await stream.aclose()

    torch.manual_seed(5)
    numbers = []
    for _ in range(2):
        with engine.trace(PROMPT) as tracer:
            engine.model.layers[0].output
            noise = torch.randn(3).save()
        numbers.append((await tracer.backend).saves["noise"])
    numbers.append(torch.randn(3))
    told["numbers"] = torch.cat(numbers)

    told["ended"] = []
    for raises in (True, False):
        with engine.generate(PROMPT, max_new_tokens=100, ignore_eos=True) as tracer:
            for step in tracer.iter[:100]:
                engine.model.layers[0].output.save()
                if step == 1:
                    if raises:
                        raise ValueError("enough")
                    tracer.stop()
        try:
            last = None
            async for output in tracer.backend:
                last = output
        except ValueError as error:
            told["enough"] = str(error)
        told["ended"].append(len(last.outputs[0].token_ids))

    total = torch.zeros(())
    with engine.generate(PROMPT, n=2, max_new_tokens=1, temperature=1.0) as tracer:
        total += engine.model.layers[0].output.sum()
    try:
        await tracer.backend
    except InterleaveError as error:
        told["lost"] = str(error)

    async with engine.edit() as (_, edit):
        seen = engine.model.layers[0].output.shape[1].save()
    outputs = await engine.generate([PROMPT, PROMPT[:4]], max_new_tokens=1)
    told["edited"] = [output.saves["seen"] for output in outputs]
    await edit.aclear()
    outputs = await engine.generate(PROMPT, max_new_tokens=1)
    told["cleared"] = getattr(outputs[0], "saves", {})

    with engine.trace(PROMPT) as tracer:
        again = engine.model.layers[1].output.save()
    told["again"] = (await tracer.backend).saves["again"]
    with pytest.raises(InterleaveError, match="alayout"):
        engine.layout("model.layers.0.mlp.gate_proj.output")
    told["layout"] = await engine.alayout("model.layers.0.mlp.gate_proj.output")
    with pytest.raises(InterleaveError, match="adeclare"):
        engine.declare("model.layers.0.mlp.raw.output", Partial())
    with pytest.raises(InterleaveError, match="no module"):
        await engine.adeclare("model.layers.7.mlp.raw.output", Partial())
    await engine.adeclare("model.layers.0.mlp.raw.output", Partial())
    told["left"] = await engine.vllm_entrypoint.collective_rpc("nnsight_request_count")
    return told


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        with traced("llama", mode="async") as engine:
            return await story(engine)

    return asyncio.run(asyncio.wait_for(main(), 240))


def test_saved_values_arrive_on_the_finished_output(told: dict[str, Any]) -> None:
    assert torch.equal(told["hidden"], expected(PROMPT))


def test_traces_in_flight_keep_their_values_apart(told: dict[str, Any]) -> None:
    for (one, ids), (other, others) in zip(told["alone"], told["together"], strict=True):
        assert ids.tolist() == others.tolist()
        for value, same in zip(one, other, strict=True):
            torch.testing.assert_close(value, same, rtol=1e-5, atol=1e-5)
    assert told["plain"][0] == told["plain"][1]


def test_the_callers_objects_are_changed(told: dict[str, Any]) -> None:
    assert [tuple(item.shape) for item in told["items"]] == [(1, len(PROMPT), 96)]


def test_an_error_is_raised_where_the_outputs_are_taken(told: dict[str, Any]) -> None:
    assert isinstance(told["raised"], ZeroDivisionError)


def test_blocks_draw_one_after_another(told: dict[str, Any]) -> None:
    torch.manual_seed(5)
    assert torch.equal(told["numbers"], torch.cat([torch.randn(3) for _ in range(3)]))


def test_a_request_ends_with_its_block(told: dict[str, Any]) -> None:
    assert told["enough"] == "enough"
    assert all(number <= 3 for number in told["ended"])


def test_what_several_sequences_changed_is_told(told: dict[str, Any]) -> None:
    assert "`total`" in told["lost"]


def test_edits_are_installed_and_cleared(told: dict[str, Any]) -> None:
    assert told["edited"] == [len(PROMPT), 4]
    assert told["cleared"] == {}


def test_an_aborted_trace_leaves_nothing_behind(told: dict[str, Any]) -> None:
    assert told["left"] == [0]
    assert told["layout"] == "whole"
    assert torch.equal(told["again"], told["hidden"])
