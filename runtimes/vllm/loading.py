"""Loading a model into a vLLM engine."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from interleave.errors import InterleaveError, Unshardable
from interleave.load import LoadRequest


def check(request: LoadRequest) -> None:
    """Raise for what cannot work, before an engine is started.

    Raises:
        InterleaveError: vLLM is not installed, or an option is refused.
        Unshardable: The degrees cannot work.
    """
    if request.cp > 1 or request.dp > 1:
        raise Unshardable(f"cp={request.cp}, dp={request.dp}: this runtime shards over tp, ep and pp")
    if request.ep not in (1, request.tp):
        raise Unshardable(f"ep={request.ep}: vLLM spreads experts over all ranks of the tensor axis (ep=1, or ep=tp)")


def load(request: LoadRequest) -> Any:
    """Start an engine; its ranks are vLLM's own workers."""
    on_cpu(request)
    from .model import EngineModel

    options: dict[str, Any] = dict(request.options)
    options["tensor_parallel_size"] = request.tp
    options["pipeline_parallel_size"] = request.pp
    if request.ep > 1:
        options["enable_expert_parallel"] = True
    if request.dtype is not None:
        options["dtype"] = request.dtype
    additional = dict(options.pop("additional_config", None) or {})
    options["additional_config"] = {
        **additional,
        "interleave": {"limit": request.limit, "unchecked": options.pop("unchecked", False)},
    }
    with without_script():
        return EngineModel(request, options)


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


def on_cpu(request: LoadRequest) -> None:
    """What vLLM asks for in the environment when its ranks are CPU workers; what the user has set stands."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    ranks = request.tp * request.pp
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    cores = sorted(os.sched_getaffinity(0))
    if ranks > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(str(cores[r % len(cores)]) for r in range(ranks)))


__all__ = ["InterleaveError", "check", "load"]
