"""Every value of every module of every architecture: on N ranks what it is on one process.

The comparison itself, and what its verdicts mean, is `tests.harness`.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from nnsight.intervention.envoy import Envoy
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from interleave.nnsight_port import BODY_FORWARD
from runtimes.transformers.smollm2 import smollm2
from tests.harness import Case, Finding, Report, compare
from tests.models import KINDS, tiny
from tests.pool import Pools, World

#: The keys and values a KV cache holds.
RESERVED = re.compile(r".*\.layers\[\d+\]\.(keys|values)")
#: The operations of a sharded linear's own forward, which runs inside transformers' wrapper.
INSIDE = re.compile(r".*\.(\w+_proj|query_key_value|dense\w*)\.source\.")

#: Which modules are edited. Every layer is read at every degree; what is edited is spread over the degrees.
FIRST_LAYER = r".*\.layers\.0(\..*)?"
BUT_THE_FIRST_LAYER = r"(?!.*\.layers\.0\b).*"

ARCHITECTURES = [kind for kind in KINDS if kind != "llama-grouped"]
#: The ones that the newest transformers is tried with.
LATEST = ("llama-bias", "qwen3", "phi3", "gpt-neox")


def grads_of(kind: str) -> tuple[bool, ...]:
    """Whether autograd records, above degree 2, where every architecture is run with and without."""
    return (False, True) if kind in ("llama-bias", "qwen3") else (False,)


def may_be_refused(finding: Finding) -> bool:
    return RESERVED.fullmatch(finding.name) is not None


def check(report: Report) -> None:
    print(report.table())
    report.check(may_be_refused)


def untold(world: World, case: Case) -> Any:
    """transformers' own sharded model, traced by somebody who does not know that it is sharded."""
    model = AutoModelForCausalLM.from_pretrained(
        case.source, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=world.size)
    )
    for module in model.modules():
        # Without this nnsight would put itself in the place of the wrapper that holds the model's own collectives.
        module.__dict__[BODY_FORWARD] = True
    return Envoy(model)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.latest if kind in LATEST else ()) for kind in ARCHITECTURES]
)
def test_at_degree_2_every_value_is_that_of_one_process(pools: Pools, kind: str):
    check(compare(pools(2), Case(tiny(kind))))


def test_keys_shared_by_several_queries_are_those_of_one_process(pools: Pools):
    check(compare(pools(2), Case(tiny("llama-grouped"), edited=FIRST_LAYER)))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_attention_that_returns_its_weights_is_that_of_one_process(pools: Pools, kind: str):
    case = Case(tiny(kind), (("attn_implementation", "eager"),), edited=r".*\.layers\.0\.(self_attn|mlp)(\..*)?")
    check(compare(pools(2), case, ["read", "cache", "write", "skip", "call"]))


@pytest.mark.parametrize("kind", ["llama-bias", "gpt-neox"])
def test_operations_inside_a_forward_are_those_of_one_process(pools: Pools, kind: str):
    report = compare(pools(2), Case(tiny(kind), edited=FIRST_LAYER), ["source"])
    print(report.table())
    report.check(lambda finding: INSIDE.match(finding.name) or may_be_refused(finding))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_at_degree_3_every_value_is_that_of_one_process(pools: Pools, kind: str):
    check(compare(pools(3), Case(tiny(kind), edited=BUT_THE_FIRST_LAYER), grads=grads_of(kind)))


def test_smollm2_at_degree_3_is_that_of_one_process(pools: Pools):
    case = Case(smollm2(), ids=((504, 3575, 282, 4649, 314),), edited=r".*\.layers\.17(\..*)?")
    check(compare(pools(3), case, grads=[False]))
    check(compare(pools(3), case, ["grad"], [True]))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_at_degree_4_every_value_is_that_of_one_process(pools: Pools, kind: str):
    check(compare(pools(4), Case(tiny(kind), edited=FIRST_LAYER), ["read", "cache", "write"], grads_of(kind)))


def test_the_harness_finds_every_piece_that_is_handed_out(pools: Pools):
    report = compare(pools(2), Case(tiny("llama")), ["read", "write", "skip"], [False], loader=untold)
    wrong = {finding.name for finding in report.those("wrong")}
    layer = "model.model.layers.0"
    for piece in ("self_attn.q_proj.output", "mlp.up_proj.output", "mlp.act_fn.output", "mlp.down_proj.input[0][0]"):
        assert {f"{layer}.{piece}", f"{layer}.{piece} = ..."} <= wrong
    for whole in ("input[0][0]", "self_attn.output[0]", "mlp.output", "post_attention_layernorm.output"):
        assert f"{layer}.{whole}" not in wrong
    assert not report.those("refused")
