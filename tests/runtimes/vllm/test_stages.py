"""Pipeline stages on the real engine: the block of one process, its modules on several ranks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import nnsight
import pytest
import torch

import interleave
from tests.harness import Report
from tests.runtimes.vllm import harness
from tests.runtimes.vllm.checkpoints import tiny
from tests.runtimes.vllm.engines import OPTIONS, surroundings

pytestmark = pytest.mark.vllm

IDS = [3, 7, 5, 9, 4, 11, 6]
#: Of the largest magnitude, against transformers.
TOLERANCE = 1e-4
#: Every layer in a stage of its own.
CASES = [("llama", 1), ("llama-tied", 2), ("qwen3-moe", 1)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-tp{case[1]}-pp2")
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any, Any]]:
    """A kind, its engine of two stages, and transformers' model on one process."""
    kind, tp = request.param
    with surroundings():
        model = interleave.load(tiny(kind), runtime="vllm", tp=tp, pp=2, limit=20, **OPTIONS)
        try:
            yield kind, model, interleave.load(tiny(kind), dtype="float32")
        finally:
            model.close()


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    assert found.shape == expected.shape
    expected = expected.detach()
    return float((found - expected).abs().max()) <= TOLERANCE * float(expected.abs().max())


@pytest.mark.parametrize("operation", ["read", "cache", "write", "skip", "call"])
def test_every_location_is_what_transformers_has(pair: tuple[str, Any, Any], operation: str) -> None:
    kind, model, _ = pair
    chosen = ("read", "cache") if operation == "cache" else (operation,)
    expected = harness.expected(kind, chosen, edited=r"\d+")
    findings = harness.by_transformers(expected, harness.play(model, expected))
    Report(2, findings).check(functools.partial(harness.may_be_refused, kind))
    # Most of it is served, on both stages.
    for layer in ("layers.0", "layers.1"):
        right = [finding for finding in findings if finding.verdict == "right" and layer in finding.name]
        assert len(right) >= 8, findings


def test_one_block_reads_writes_caches_and_calls_across_stages(pair: tuple[str, Any, Any]) -> None:
    def ordered(model: Any, prompt: Any) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        with model.trace(prompt) as tracer:
            cache = tracer.cache()
            model.model.layers[0].self_attn.o_proj.input[..., :40] = 0.1
            first = model.model.layers[0].output
            seen.append(first.save())
            model.model.layers[1].self_attn.o_proj.input *= 1.5
            seen.append(model.model.layers[1].output.save())
            logits = model.lm_head.output.save()
            seen.append(model.lm_head(model.model.norm(first)).save())
            seen.append(model.model.layers[0].input_layernorm(first).save())
        return [*seen, logits, *(cache[f"model.model.layers.{i}"].output for i in range(2))]

    _, model, reference = pair
    found, expected = ordered(model, IDS), ordered(reference, torch.tensor([IDS]))
    assert len(found) == len(expected) == 7
    assert all(close(a, b) for a, b in zip(found, expected, strict=True))


def test_generation_with_edits_on_both_stages(pair: tuple[str, Any, Any]) -> None:
    def run(model: Any, prompt: Any) -> list[torch.Tensor]:
        with model.generate(prompt, max_new_tokens=4) as tracer:
            seen = nnsight.save([])
            for _ in tracer.iter[:4]:
                model.model.layers[0].mlp.output[:] *= 1.2
                seen.append(model.model.layers[0].output)
                model.model.layers[1].mlp.output[:] *= 0.7
                seen.append(model.model.layers[1].output)
                seen.append(model.lm_head.output)
        return list(seen)

    _, model, reference = pair
    found, expected = run(model, IDS), run(reference, torch.tensor([IDS]))
    assert len(found) == len(expected) == 12
    assert all(close(a, b) for a, b in zip(found, expected, strict=True))


def test_many_requests_and_an_error_in_one(pair: tuple[str, Any, Any]) -> None:
    _, model, reference = pair
    prompts = [IDS, IDS[:4], [8, 3, 10, 4, 5]]
    with pytest.raises(ZeroDivisionError), model.trace() as tracer:
        with tracer.invoke(prompts[0]):
            a = model.model.layers[1].output.save()
        with tracer.invoke(prompts[1]):
            model.model.layers[1].output * (1 / 0)
        with tracer.invoke(prompts[2]):
            c = model.model.layers[1].output.save()
    for found, prompt in ((a, prompts[0]), (c, prompts[2])):
        with reference.trace(torch.tensor([prompt])):
            expected = reference.model.layers[1].output.save()
        assert close(found, expected)
    with model.trace(IDS):
        again = model.model.layers[0].output.save()
    assert again.shape == (1, len(IDS), again.shape[-1])


def test_a_shape_that_does_not_fit_is_refused_on_every_stage(pair: tuple[str, Any, Any]) -> None:
    _, model, _ = pair
    for layer in range(2):
        with pytest.raises(interleave.ShapeChanged), model.trace(IDS):
            model.model.layers[layer].mlp.output = torch.zeros(1, 2, 3)
            model.lm_head.output.save()
        with model.trace(IDS):
            logits = model.lm_head.output.save()
        assert logits.shape[:2] == (1, len(IDS))


@pytest.mark.parametrize("goes_on", [False, True])
def test_what_is_found_when_the_block_has_gone_on_is_its_own_requests_error(
    pair: tuple[str, Any, Any], goes_on: bool
) -> None:
    _, model, _ = pair
    with pytest.raises(interleave.InterleaveError, match="none of the model's"), model.trace() as tracer:
        with tracer.invoke(IDS):
            other = model.model.layers[1].output.save()
        with tracer.invoke(IDS[:4]):
            model.model.embed_tokens.input.fill_(10**6)
            if goes_on:
                model.model.layers[1].output.save()
    with model.trace(IDS):
        expected = model.model.layers[1].output.save()
    assert close(other, expected)


@pytest.mark.parametrize("pair", [("qwen3-moe", 1)], indirect=True, ids=["qwen3-moe"])
def test_a_router_can_be_looked_at_and_a_block_may_catch_that_it_cannot_be_changed(pair: tuple[str, Any, Any]) -> None:
    _, model, _ = pair
    for layer in range(2):
        with model.trace(IDS):
            gate = model.model.layers[layer].mlp.gate
            logits, weights, indices = gate.output
            try:
                gate.output = (logits * 2, weights, indices)
                caught = False
            except interleave.UnknownLayout:
                caught = True
            found = model.lm_head.output.save()
            flag = nnsight.save(caught)
        with pytest.raises(interleave.UnknownLayout, match="can be read and not changed"), model.trace(IDS):
            model.model.layers[layer].mlp.gate.output[0].mul_(2)
        with model.trace(IDS):
            expected = model.lm_head.output.save()
        assert flag and torch.equal(found, expected)


def test_parameters_of_both_stages(pair: tuple[str, Any, Any]) -> None:
    _, model, reference = pair
    found: dict[str, Any] = {}
    with model.trace(IDS):
        found.save()
        for layer in range(2):
            found[f"norm {layer}"] = model.model.layers[layer].input_layernorm.weight
            found[f"bias {layer}"] = model.model.layers[layer].self_attn.o_proj.bias
        found["stream"] = model.model.layers[1].output
        found["table"] = model.model.embed_tokens.weight
    for layer in range(2):
        assert torch.equal(found[f"norm {layer}"], reference.model.layers[layer].input_layernorm.weight)
        assert found[f"bias {layer}"] is None
    assert torch.equal(found["table"], reference.model.embed_tokens.weight)
    with pytest.raises(interleave.UnknownLayout, match=r"packed|plain"), model.trace(IDS):
        model.model.layers[0].self_attn.o_proj.weight  # on a CPU the engine packs the weights of linears
    with pytest.raises(interleave.UnknownLayout, match=r"packed|plain"), model.trace(IDS):
        model.model.layers[1].self_attn.o_proj.weight
