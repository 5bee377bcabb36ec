"""Loading a transformers model: what is refused before weights are read, the rank's model, the driver's outline."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.distributed.configuration_utils import DistributedConfig

from interleave.agreement import Agreement
from interleave.errors import InterleaveError, Unshardable
from interleave.interleaver import Interleaver
from interleave.load import LoadRequest

from .fragments import AT_LOAD, TransformersFragments
from .interior import decide
from .model import TransformersModel
from .plan import boundaries, check_degree

#: Options of `from_pretrained` that place or shard the model in ways this runtime does itself.
_OURS = ("distributed_config", "tp_plan", "tp_size", "device_mesh", "ep_plan")


def check(request: LoadRequest) -> None:
    """Refuse, before any weight is read, what cannot work.

    Raises:
        Unshardable: The degree, the plan, a style, a quantized or adapted checkpoint.
        InterleaveError: The source is no model, or an option is this runtime's own.
    """
    for axis in ("ep", "pp", "dp", "cp"):
        if getattr(request, axis) > 1:
            raise InterleaveError(f"{axis}={getattr(request, axis)}: this version shards by tensor (tp=) alone")
    for option in _OURS:
        if option in request.options:
            raise InterleaveError(f"{option}= is decided by tp=; leave it out")
    config = read_config(request)
    if request.world_size == 1:
        return
    if request.options.get("device_map") is not None:
        raise Unshardable("device_map= spreads whole layers over devices and tp= splits each layer: give one of them")
    if getattr(config, "quantization_config", None) or request.options.get("quantization_config"):
        raise Unshardable(
            "the checkpoint is quantized, and quantized weights cannot be split here. "
            "Load it on one process (tp=1), or an unquantized checkpoint."
        )
    check_degree(meta_module(request, config), request.tp)


def read_config(request: LoadRequest) -> Any:
    """The model's config. Raises `InterleaveError`, naming the source, if there is none."""
    source = Path(request.source)
    if (source / "adapter_config.json").exists():
        raise InterleaveError(
            f"{request.source!r} is a PEFT adapter. Merge it into its base model "
            f"(`merge_and_unload()` and `save_pretrained`) and load the merged directory."
        )
    if request.source.startswith((".", "/", "~")) and not source.expanduser().exists():
        raise InterleaveError(f"{request.source!r} does not exist; give a HuggingFace directory or a repo id")
    try:
        return AutoConfig.from_pretrained(os.path.expanduser(request.source), **hub_options(request))
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise InterleaveError(
            f"{request.source!r} is no HuggingFace model directory and no repo id that can be read: {first}"
        ) from error


def hub_options(request: LoadRequest) -> dict[str, Any]:
    """The options that say which files of a repo are meant, and may be read."""
    return {k: v for k, v in request.options.items() if k in ("revision", "trust_remote_code", "token", "cache_dir")}


def meta_module(request: LoadRequest, config: Any) -> torch.nn.Module:
    """The model on meta tensors: its modules and sizes, no weights. Raises `InterleaveError` for another kind."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config,
                dtype=torch_dtype(request.dtype) or getattr(config, "dtype", None) or torch.float32,
                trust_remote_code=request.options.get("trust_remote_code", False),
            ).eval()
    except ValueError as error:
        raise InterleaveError(
            f"{request.source!r} is a {type(config).__name__}, which transformers loads as no causal language model: "
            f"{str(error).splitlines()[0][:200]}"
        ) from None


def load(request: LoadRequest) -> TransformersModel:
    """The model on this process: all of it with one process, this rank's part with several.

    Raises:
        InterleaveError: It was loaded across ranks and nothing of it is sharded.
    """
    options = dict(request.options)
    agreement = None
    if request.world_size > 1:
        join_world(request)
        agreement = Agreement(request.limit, device_type=request.device_type)
        options["distributed_config"] = DistributedConfig(tp_size=request.tp)
    elif "device_map" not in options:
        options["device_map"] = request.device_type
    if request.dtype is not None:
        options["dtype"] = torch_dtype(request.dtype)
    try:
        module = AutoModelForCausalLM.from_pretrained(os.path.expanduser(request.source), **options).eval()
    except InterleaveError:
        raise
    except Exception as error:
        raise InterleaveError(
            f"transformers could not load {request.source!r}: {type(error).__name__}: {error}"
        ) from error
    return build(module, tokenizer_of(request), agreement)


def wrap(
    module: torch.nn.Module, tokenizer: PreTrainedTokenizerBase | None = None, **agreement: Any
) -> TransformersModel:
    """The envoy tree over a transformers model that is loaded already, in this process.

    Args:
        module: Sharded by transformers across the ranks of this world, or not at all.
        tokenizer: For prompts that are text.
        **agreement: `limit`, in seconds.
    """
    if hasattr(module, "peft_config"):
        raise Unshardable("the model carries a PEFT adapter; merge it first (`merge_and_unload()`)")
    if not getattr(module, "can_generate", lambda: False)():
        raise InterleaveError(f"wrap takes a causal language model, and {type(module).__name__} is none")
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return build(module, tokenizer, Agreement(**agreement) if several else None, sharded=False)


def build(
    module: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    agreement: Agreement | None,
    sharded: bool = True,
) -> TransformersModel:
    """Wrap a loaded module, and learn what of it is sharded.

    Args:
        module: A causal language model.
        tokenizer: Its tokenizer, if any.
        agreement: Where there are several ranks.
        sharded: Whether something must be.
    """
    fragments = TransformersFragments(agreement)
    model = TransformersModel(module, tokenizer, Interleaver(fragments, agreement))
    if agreement is None:
        return model
    if not fragments.enabled and not sharded:
        model.interleaver.agreement = None
        return model
    if not fragments.enabled:
        raise InterleaveError(
            f"{type(module).__name__} was loaded across {agreement.world_size} ranks, and nothing of it was found "
            f"sharded: this transformers release may install its styles in a way this package does not read"
        )
    fragments.settle(model)
    decide(model, fragments)
    return model


def outline(request: LoadRequest) -> TransformersModel:
    """The model's tree on meta tensors, for the driver: names, layouts and a tokenizer, no weights."""
    config = read_config(request)
    module = meta_module(request, config)
    fragments = TransformersFragments()
    model = TransformersModel(module, tokenizer_of(request), Interleaver(fragments), False)
    if request.tp > 1:
        fragments.enabled = True
        for name, sides in boundaries(module, request.tp).items():
            fragments.record(f"{model.path}.{name}", sides)
        fragments.settle(model, AT_LOAD, AT_LOAD)
    return model


def tokenizer_of(request: LoadRequest) -> PreTrainedTokenizerBase | None:
    """The checkpoint's tokenizer, or None if it has none; a trace then takes ids alone."""
    try:
        return AutoTokenizer.from_pretrained(os.path.expanduser(request.source), **hub_options(request))
    except (OSError, ValueError, KeyError):
        return None


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The dtype of that name; None for None. Raises `InterleaveError` if torch has none of that name."""
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InterleaveError(f"dtype={name!r} is no torch dtype; say for example 'float32' or 'bfloat16'")
    return dtype


def join_world(request: LoadRequest) -> None:
    """Make this process a rank of the world, unless it is one already."""
    if not torch.distributed.is_initialized():
        from datetime import timedelta

        backend = "nccl" if request.device_type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, timeout=timedelta(seconds=request.limit))
    have = torch.distributed.get_world_size()
    if have != request.world_size:
        raise InterleaveError(f"tp={request.tp} needs {request.world_size} ranks and this world has {have}")
