"""Tiny random checkpoints that both vLLM and transformers load, built once and saved where every rank can read them.

Each is its HuggingFace class near the smallest size that vLLM's CPU kernels take: heads of 32, experts of 32 columns on
every rank (gpt-oss, whose experts cannot be padded) and, for multi-head latent attention, 512 + 64 columns of latent
and rotary key. Heads, widths and experts divide by 2 and by 3; the vocabulary does not divide by 64, so vLLM pads it,
and the last of two or three ranks holds some tokens and the padding. DeepSeek's rotary embedding is YaRN, as in the
published checkpoints: the plain one is wrong in vLLM 0.32 on the CPU (see `engines`).

They are made to betray mistakes, as the models of `tests.models` are: biases, norm weights and attention sinks are
drawn, not zeros and ones; weights are large enough that every module moves the logits.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 150,
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

DEEPSEEK: dict[str, Any] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 12,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.5},
}

#: By kind: the model type of `transformers`, and how its config departs from `SIZES`.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mqa": ("llama", {"num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"hidden_size": 384}),
    "qwen3": ("qwen3", {}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32, "sliding_window": 4}),
    "gemma3": (
        "gemma3_text",
        {
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 32,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "deepseek": ("deepseek_v2", DEEPSEEK),
    "deepseek-q-lora": (
        "deepseek_v2",
        DEEPSEEK | {"q_lora_rank": 48, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 12,
            "num_experts_per_tok": 3,
            "intermediate_size": 384,
            "sliding_window": 4,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
}


@functools.cache
def _directory() -> Path:
    path = tempfile.mkdtemp(prefix="tiny-checkpoints-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


@functools.cache
def tiny(kind: str) -> Path:
    """The directory of a tiny random checkpoint of `kind`, a key of `KINDS`; float32, without a tokenizer."""
    model_type, changes = KINDS[kind]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | changes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(sum(kind.encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("bias", "sinks")):
                parameter.copy_(0.3 * noise)
            elif parameter.dim() > 1:
                parameter.copy_(0.15 * noise)
            else:
                parameter.add_(0.3 * noise)
    path = _directory() / kind
    model.save_pretrained(path)
    return path
