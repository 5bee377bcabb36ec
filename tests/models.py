"""Tiny random models of real architectures, built once and saved where every rank can load them.

Each is its HuggingFace class at a size where every dim divides by 12, so that degrees 2, 3 and 4 all work.
They are made to betray mistakes: biases and norm weights are drawn, not zeros and ones, so a bias that is
lost or added twice shows; weights are large enough that every module moves the logits.
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
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: By kind: the model type of `transformers`, and how its config departs from `SIZES`.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-grouped": ("llama", {"num_key_value_heads": 6, "head_dim": 8}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "phi3": ("phi3", {}),
    "gemma2": ("gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}),
    "gpt-neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "starcoder2": ("starcoder2", {"use_bias": True}),
    "olmo2": ("olmo2", {}),
}


@functools.cache
def _directory() -> Path:
    path = tempfile.mkdtemp(prefix="tiny-models-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


@functools.cache
def tiny(kind: str) -> Path:
    """The directory of a tiny random model of `kind`, a key of `KINDS`; float32, without a tokenizer."""
    model_type, changes = KINDS[kind]
    sizes = SIZES | changes
    if model_type == "gpt_neox":
        sizes.pop("num_key_value_heads")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(sum(kind.encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.add_(0.3 * noise)
    path = _directory() / kind
    model.save_pretrained(path)
    return path
