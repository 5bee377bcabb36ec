"""Every value of every module on the engine: HuggingFace's, or refused for a reason that is expected there.

The comparison itself, and what may be refused, is `tests.runtimes.vllm.harness`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm.model_executor.layers.linear import LinearBase

from interleave import nnsight_port as port
from interleave.errors import InterleaveError, UnknownLayout
from tests import operations
from tests.harness import Finding, Report, difference
from tests.operations import Log
from tests.runtimes.vllm import harness
from tests.runtimes.vllm.checkpoints import KINDS, tiny
from tests.runtimes.vllm.engines import traced

pytestmark = [
    pytest.mark.vllm,
    # DeepSeek's rotary embedding, of which the harness takes the magnitude.
    pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning"),
]


def tensors_in(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    port.apply(value, tensors.append, torch.Tensor)
    return tensors


def check(kind: str, degree: int, findings: list[Finding]) -> None:
    """Raise AssertionError unless nothing is wrong, and what is refused is for the reason that is expected there."""
    report = Report(degree, findings)
    print(report.table())
    report.check(functools.partial(harness.may_be_refused, kind))


@functools.cache
def on(kind: str, degree: int) -> dict[str, Log]:
    """What an engine of that degree does."""
    with traced(kind, degree) as model:
        return harness.play(model, harness.expected(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_has_what_transformers_has(kind: str) -> None:
    check(kind, 1, harness.by_transformers(harness.expected(kind), on(kind, 1)))


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_have_what_transformers_and_one_rank_have(kind: str) -> None:
    expected, alone, found = harness.expected(kind), on(kind, 1), on(kind, 2)
    check(kind, 2, harness.by_transformers(expected, found))
    check(kind, 2, harness.by_one_rank(expected, alone, found))


def test_three_ranks_have_what_transformers_has() -> None:
    check("qwen3-moe", 3, harness.by_transformers(harness.expected("qwen3-moe"), on("qwen3-moe", 3)))


@pytest.mark.parametrize("degree", [1, 3])
def test_a_real_model_has_what_transformers_has(degree: int) -> None:
    """SmolLM2: all 30 layers read and cached, one written, skipped and called."""
    known = harness.expected("smollm2")
    with traced(harness.source_of("smollm2"), degree) as model:
        found = harness.play(model, known)
    check("smollm2", degree, harness.by_transformers(known, found))


# vLLM's own


def own_values(kind: str, degree: int) -> dict[str, Any]:
    """vLLM's own value on both sides of every parallel layer that is called, and of the modules above the layers."""
    found: dict[str, Any] = {}
    with traced(kind, degree) as model:
        paths = [
            envoy.path.partition(".")[2]
            for envoy in model.modules()
            if ".layers.1." in envoy.path and isinstance(envoy._module, LinearBase)
        ]
        with model.trace([5, 17, 3, 99]):
            found.save()
            for path in paths:
                raw = model.get(path).raw
                found[f"{path}.input"] = raw.input
                found[f"{path}.output"] = raw.output
    return found


@pytest.mark.parametrize("kind", ["llama-bias", "qwen3-moe", "deepseek"])
def test_vllms_own_values_are_whole_on_two_ranks(kind: str) -> None:
    alone, found = own_values(kind, 1), own_values(kind, 2)
    assert len(alone) >= 6
    assert found.keys() == alone.keys()
    for name, value in alone.items():
        for one, two in zip(tensors_in(value), tensors_in(found[name]), strict=True):
            assert difference(one, two) == "", name


# Parameters


@pytest.mark.parametrize("degree", [1, 2])
def test_a_parameter_is_that_of_transformers_or_refused(degree: int) -> None:
    original = AutoModelForCausalLM.from_pretrained(tiny("llama-bias"), dtype=torch.float32)
    found: dict[str, torch.Tensor | None] = {}
    with traced("llama-bias", degree) as model, model.trace([5, 17, 3]):
        found.save()
        for name, _ in original.named_parameters():
            module, _, parameter = name.rpartition(".")
            try:
                found[name] = getattr(model.get(module), parameter)
            except UnknownLayout:
                found[name] = None
    assert found.keys() == dict(original.named_parameters()).keys()
    for name, expected in original.named_parameters():
        value = found[name]
        # The engine packs the weights of linears for its kernels on the CPU.
        assert (value is None) == name.endswith("_proj.weight"), name
        if value is not None:
            assert torch.equal(value, expected), name


def test_a_parameter_outside_of_a_block_is_refused() -> None:
    with traced("llama") as model, pytest.raises(InterleaveError, match="read it in a trace's block"):
        _ = model.model.layers[0].self_attn.q_proj.weight


# What was saved stays what the module returned


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_what_was_saved_is_what_it_was(kind: str) -> None:
    visits = harness.expected(kind)["plans"]["read"].visits
    kept: list[Any] = []
    cloned: list[Any] = []
    with traced(kind) as model, model.generate([5, 17, 3, 99], max_new_tokens=3, ignore_eos=True) as tracer:
        kept.save()
        cloned.save()
        for _ in tracer.iter[:3]:
            for visit in visits:
                try:
                    value = operations.value_at(model, visit)
                except UnknownLayout:
                    continue
                tensors = tensors_in(value)
                kept.append(tensors)
                cloned.append([tensor.clone() for tensor in tensors])
    assert len(kept) == len(cloned) > 2 * len(visits)
    for tensors, clones in zip(kept, cloned, strict=True):
        for tensor, clone in zip(tensors, clones, strict=True):
            assert torch.equal(tensor, clone)
