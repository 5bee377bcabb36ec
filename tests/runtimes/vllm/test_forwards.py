"""What is read from the text of a forward: of small ones, and of transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from runtimes.vllm.forwards import Forward
from runtimes.vllm.names import Original
from tests.runtimes.vllm.checkpoints import KINDS, SIZES

pytestmark = pytest.mark.vllm


class Small(torch.nn.Module):
    def forward(self, x: Any, y: Any) -> Any:
        a = self.norm(self.query(x).view(*x.shape[:-1], -1, 4)).transpose(1, 2)
        b = self.key(x)  # self.nothing(x)
        x = self.out(a * self.act(self.gate(x)) * self.up(x))
        return self.last(x, y), b


class Rows(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        before = self.early(x)
        rows = x.view(-1, x.shape[-1])
        if self.training:
            rows *= self.jitter(rows)
        return self.experts(rows, self.gate(rows)) + before


def test_calls_come_in_the_order_in_which_python_makes_them() -> None:
    read = Forward.of(Small)
    assert read.order == ["query", "norm", "key", "gate", "act", "up", "out", "last"]
    assert read.returns_pair and not read.on_rows
    assert read.takers == {"gate": "act"}


def test_one_variable_is_another_after_it_was_assigned() -> None:
    on = Forward.of(Small).arguments
    assert on["query"] == on["key"] == on["gate"] == on["up"]
    assert "last" not in on and "out" not in on
    assert Forward.of(Rows).arguments["gate"] != Forward.of(Rows).arguments["early"]


def test_what_is_called_on_rows() -> None:
    read = Forward.of(Rows)
    assert read.on_rows == {"jitter", "gate", "experts"}
    assert read.order == ["early", "jitter", "gate", "experts"]
    assert not read.returns_pair


ORDERS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen3": ["q_proj", "q_norm", "k_proj", "k_norm", "v_proj", "o_proj"],
    "gemma3": ["q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "o_proj"],
    # `kv_b_proj` is called by a function that the forward calls.
    "deepseek-q-lora": ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "o_proj"],
}


def original(kind: str) -> Original:
    model_type, changes = KINDS[kind]
    return Original(AutoConfig.for_model(model_type, **SIZES | changes))


@pytest.mark.parametrize("kind", ORDERS)
def test_the_order_in_transformers_attention(kind: str) -> None:
    assert original(kind).order("model.layers.0.self_attn") == ORDERS[kind]


def test_transformers_blocks_of_experts() -> None:
    deepseek, qwen, gpt = original("deepseek"), original("qwen3-moe"), original("gpt-oss")
    assert original("llama").order("model.layers.0.mlp") == ["gate_proj", "act_fn", "up_proj", "down_proj"]
    assert not deepseek.flattens("model.layers.1.mlp") and qwen.flattens("model.layers.0.mlp")
    assert gpt.returns_pair("model.layers.0.mlp") and not qwen.returns_pair("model.layers.0.mlp")
    twins = qwen.twins("model.layers.0.self_attn")
    assert twins["q_proj"] == twins["k_proj"] == twins["v_proj"]
