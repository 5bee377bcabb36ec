"""The cases of people who trace vLLM engines, on two ranks: each was a wrong number somewhere, and is right here."""

# Blocks bind names that come back on their own.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import interleave
from interleave.errors import UnknownLayout
from tests.runtimes.vllm.checkpoints import SIZES, tiny
from tests.runtimes.vllm.engines import OPTIONS, surroundings, traced

pytestmark = pytest.mark.vllm

PROMPT = [5, 17, 3, 99, 42, 149, 8, 60, 120]
PROMPTS = [PROMPT, [7, 9], [88, 14, 33, 101], [61, 2, 3]]
#: The third of twelve heads, of 32 columns each: the first rank's.
HEAD = slice(64, 96)

#: Locations of a layer in HuggingFace's order.
ATTENTION = (
    "input input_layernorm.input input_layernorm.output self_attn.input self_attn.q_proj.input self_attn.q_proj.output "
    "self_attn.k_proj.output self_attn.v_proj.output self_attn.o_proj.input self_attn.o_proj.output self_attn.output "
    "post_attention_layernorm.input post_attention_layernorm.output mlp.input "
)
DENSE = (
    "mlp.gate_proj.input mlp.gate_proj.output mlp.act_fn.input mlp.act_fn.output mlp.up_proj.input mlp.up_proj.output "
    "mlp.down_proj.input mlp.down_proj.output mlp.output output"
)
EXPERTS = "mlp.gate.input mlp.gate.output mlp.experts.output mlp.output output"


@pytest.fixture(scope="module")
def llama() -> Iterator[Any]:
    with traced("llama", 2) as model:
        yield model


@pytest.fixture(scope="module")
def moe() -> Iterator[Any]:
    with traced("qwen3-moe", 2) as model:
        yield model


@pytest.fixture(scope="module")
def original() -> Any:
    """HuggingFace's Llama on this process, traced."""
    return interleave.load(tiny("llama"), dtype="float32")


@pytest.fixture(scope="module")
def original_moe() -> Any:
    return interleave.load(tiny("qwen3-moe"), dtype="float32")


def batch(prompt: list[int]) -> torch.Tensor:
    """The prompt as transformers takes it."""
    return torch.tensor([prompt])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    expected = expected.detach()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


# A kept reference (case 16)


@pytest.mark.parametrize(("kind", "names"), [("llama", ATTENTION + DENSE), ("moe", ATTENTION + EXPERTS)])
def test_what_is_kept_of_every_module_stays_what_it_returned(
    kind: str, names: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    locations = [(f"model.layers.{layer}.{name}").rpartition(".") for layer in range(2) for name in names.split()]
    with model.generate(PROMPT, max_new_tokens=3, ignore_eos=True) as tracer:
        kept, cloned = [], []
        kept.save()
        cloned.save()
        for _ in tracer.iter[:3]:
            for path, _, side in locations:
                value = getattr(model.get(path), side)
                value = value[0] if isinstance(value, tuple) else value
                kept.append(value)
                cloned.append(value.clone())
    assert len(kept) == len(cloned) == 3 * len(locations)
    for one, clone, (path, _, side) in zip(kept, cloned, 3 * locations, strict=True):
        assert torch.equal(one, clone), f"{path}.{side}"


# The residual stream and the logits (cases 19, 32, 33)


def test_the_stream_is_one_value_between_layers(llama: Any, original: Any) -> None:
    layers = llama.model.layers
    with llama.trace(PROMPT):
        residual = layers[0].residual.save()
        output = layers[0].output.save()
        after = layers[1].input.save()
        normed = layers[1].input_layernorm.input.save()
    with original.trace(batch(PROMPT)):
        expected = original.model.layers[0].output.save()
    assert torch.equal(residual, output) and torch.equal(residual, after) and torch.equal(residual, normed)
    close(residual, expected)


@pytest.mark.parametrize("layer", [0, 1])
def test_steering_moves_the_stream_by_what_was_added(llama: Any, original: Any, layer: int) -> None:
    def steer(model: Any, prompt: Any, vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layers = model.model.layers
        with model.trace(prompt):
            layers[layer].output[:] += vector
            steered = layers[layer].output.save()
            after = (layers[1].input_layernorm if layer == 0 else model.model.norm).input.save()
            logits = model.lm_head.output.save()
        return steered, after, logits

    vector = torch.randn(96, generator=torch.Generator().manual_seed(0))
    plain, _, before = steer(llama, PROMPT, torch.zeros(96))
    steered, after, logits = steer(llama, PROMPT, vector)
    assert torch.equal(steered, plain + vector)
    close(after, plain + vector)
    assert not torch.equal(logits, before)
    for found, expected in zip((steered, after, logits), steer(original, batch(PROMPT), vector), strict=True):
        close(found, expected)


def test_logits_of_all_positions_and_at_every_layer(llama: Any, original: Any) -> None:
    def lens(model: Any, prompt: Any) -> list[torch.Tensor]:
        with model.trace(prompt):
            found = []
            found.save()
            for layer in model.model.layers:
                found.append(model.lm_head(model.model.norm(layer.output)))
            found.append(model.lm_head.output)
        return found

    found, expected = lens(llama, PROMPT), lens(original, batch(PROMPT))
    assert [tuple(one.shape) for one in found] == 3 * [(1, len(PROMPT), 150)]
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    # What the last layer's stream says is what the model says.
    close(found[1], found[2])


# vLLM's own fused linears (case 2)


def test_fused_linears_are_those_of_the_whole_model(llama: Any, original: Any) -> None:
    with llama.trace(PROMPT):
        qkv = llama.model.layers[1].self_attn.qkv_proj.output.save()
        raw = llama.model.layers[1].self_attn.o_proj.raw.output.save()
        gate_up = llama.model.layers[1].mlp.gate_up_proj.output.save()
    with original.trace(batch(PROMPT)):
        attention = original.model.layers[1].self_attn
        heads = [attention.q_proj.output, attention.k_proj.output, attention.v_proj.output]
        projected = attention.o_proj.output.save()
        mlp = original.model.layers[1].mlp
        heads = torch.cat(heads, -1).save()
        halves = torch.cat([mlp.gate_proj.output, mlp.up_proj.output], -1).save()
    qkv, gate_up = (one[0] if isinstance(one, tuple) else one for one in (qkv, gate_up))
    close(qkv.reshape(heads.shape), heads)
    close(gate_up.reshape(halves.shape), halves)
    close(raw[0], projected[0])
    assert len(raw) == 2 and raw[1] is None


# Edits (cases 14, 15, 22, 31, 34)


def test_ablating_a_head_gives_the_same_bits_ten_times(llama: Any, original: Any) -> None:
    def ablate(model: Any, prompt: Any) -> torch.Tensor:
        with model.trace(prompt):
            model.model.layers[0].self_attn.o_proj.input[..., HEAD] = 0
            logits = model.lm_head.output.save()
        return logits

    first, *others = (ablate(llama, PROMPT) for _ in range(10))
    assert all(torch.equal(first, other) for other in others)
    close(first, ablate(original, batch(PROMPT)))


def test_a_constant_over_the_experts_is_the_blocks_output(moe: Any, original_moe: Any) -> None:
    def overwrite(model: Any, prompt: Any) -> tuple[torch.Tensor, torch.Tensor]:
        mlp = model.model.layers[0].mlp
        with model.trace(prompt):
            mlp.experts.output[:] = 3.0
            output = mlp.output.save()
            logits = model.lm_head.output.save()
        return output, logits

    output, logits = overwrite(moe, PROMPT)
    expected, theirs = overwrite(original_moe, batch(PROMPT))
    assert torch.equal(output, torch.full_like(output, 3.0))
    close(output, expected)
    close(logits, theirs)


def edit(model: Any, which: int) -> None:
    """One of four edits, each at another location."""
    layer = model.model.layers[0]
    if which == 0:
        layer.self_attn.o_proj.input[..., HEAD] = 0
    elif which == 1:
        layer.mlp.gate_proj.output[:, -1] *= -2.0
    elif which == 2:
        layer.output[..., :7] += 4.0
    else:
        layer.self_attn.q_proj.output = layer.self_attn.q_proj.output * 0.5


def test_four_requests_in_a_step_each_with_its_own_edit(llama: Any, original: Any) -> None:
    with llama.trace() as tracer:
        with tracer.invoke(PROMPTS[0]):
            llama.model.layers[0].self_attn.o_proj.input[..., HEAD] = 0
            first = llama.lm_head.output.save()
        with tracer.invoke(PROMPTS[1]):
            llama.model.layers[0].mlp.gate_proj.output[:, -1] *= -2.0
            second = llama.lm_head.output.save()
        with tracer.invoke(PROMPTS[2]):
            llama.model.layers[0].output[..., :7] += 4.0
            third = llama.lm_head.output.save()
        with tracer.invoke(PROMPTS[3]):
            q_proj = llama.model.layers[0].self_attn.q_proj
            q_proj.output = q_proj.output * 0.5
            fourth = llama.lm_head.output.save()
    for which, (prompt, found) in enumerate(zip(PROMPTS, (first, second, third, fourth), strict=True)):
        with original.trace(batch(prompt)):
            edit(original, which)
            expected = original.lm_head.output.save()
        with original.trace(batch(prompt)):
            plain = original.lm_head.output.save()
        close(found, expected)
        assert (expected - plain).abs().max() > 1e-2 * plain.abs().max()


def test_what_one_trace_saved_is_assigned_in_another(llama: Any, original: Any) -> None:
    def patch(model: Any, source: Any, target: Any) -> torch.Tensor:
        layer = model.model.layers[0]
        with model.trace(source):
            heads = layer.self_attn.o_proj.input.save()
            gate = layer.mlp.gate_proj.output.save()
        with model.trace(target):
            layer.self_attn.o_proj.input = heads
            layer.mlp.gate_proj.output[:, -2:] = gate[:, -2:]
            logits = model.lm_head.output.save()
        return logits

    other = PROMPT[::-1]
    found = patch(llama, other, PROMPT)
    close(found, patch(original, batch(other), batch(PROMPT)))


# Looking


def test_looking_changes_no_bit(llama: Any) -> None:
    with llama.trace(PROMPT):
        alone = llama.lm_head.output.save()
    with llama.trace(PROMPT) as tracer:
        cached = tracer.cache(include_inputs=True)
        for layer in llama.model.layers:
            layer.input.sum()
            layer.self_attn.q_proj.output.sum()
            layer.self_attn.o_proj.input.sum()
            layer.mlp.down_proj.input.sum()
            layer.output.sum()
        watched = llama.lm_head.output.save()
    assert torch.equal(alone, watched)
    assert len(cached.keys()) > 20


def test_looking_changes_no_token(llama: Any) -> None:
    (output,) = llama.generate(PROMPT, max_new_tokens=8, temperature=0, ignore_eos=True)
    with llama.generate(PROMPT, max_new_tokens=8, temperature=0, ignore_eos=True) as tracer:
        streams = []
        streams.save()
        for _ in tracer.iter[:8]:
            streams.append([layer.output for layer in llama.model.layers])
        ids = tracer.result.save()
    assert len(streams) == 8
    assert ids[0, len(PROMPT) :].tolist() == list(output.outputs[0].token_ids)


# Architectures that nobody has compared


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mistral")
    config = AutoConfig.for_model("mistral", **SIZES | {"sliding_window": None})
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


def stream(path: Path, **options: Any) -> tuple[torch.Tensor | str, torch.Tensor]:
    """HuggingFace's value of the last layer, or the refusal; and vLLM's own, its two parts added."""
    with surroundings():
        model = interleave.load(path, runtime="vllm", tp=2, **OPTIONS, **options)
        try:
            layer = model.model.layers[1]
            with model.trace(PROMPT):
                found = []
                found.save()
                try:
                    found.append(layer.output)
                except UnknownLayout as error:
                    found.append(str(error))
                raw = sum(layer.raw.output[:2]).save()
        finally:
            model.close()
    return found[0], raw


def test_an_unchecked_architecture_is_refused_and_has_its_raw_values(mistral: Path) -> None:
    original = interleave.load(mistral, dtype="float32")
    with original.trace(batch(PROMPT)):
        expected = original.model.layers[1].output.save()
    refusal, raw = stream(mistral)
    assert isinstance(refusal, str) and "has not been compared" in refusal and "unchecked=True" in refusal
    close(raw[None], expected)
    served, raw = stream(mistral, unchecked=True)
    assert isinstance(served, torch.Tensor)
    close(served, expected)
    close(raw[None], expected)
