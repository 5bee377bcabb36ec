"""The front door: one call that works in a script, in a notebook, under torchrun and on one process."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from .errors import InterleaveError

RUNTIMES = ("transformers", "vllm", "native")


@dataclass(frozen=True)
class LoadRequest:
    """What the user asked `load` for. Plain data: it travels to the ranks.

    Attributes:
        source: A HuggingFace directory, or a repo id.
        runtime: Which package under `runtimes` loads it.
        tp, ep, pp, dp, cp: The degrees of the mesh axes.
        dtype: A torch dtype's name (`"float32"`), or None for the checkpoint's own.
        device: `"cpu"`, `"cuda"`, or None for cuda where there is one.
        limit: Seconds after which any wait for another rank ends in `DivergedBlock`.
        options: Everything else, handed to the runtime's own loader.
    """

    source: str
    runtime: str = "transformers"
    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    dtype: str | None = None
    device: str | None = None
    limit: float = 60.0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """How many ranks the mesh has. Expert parallelism re-uses the tensor and data axes."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def device_type(self) -> str:
        return self.device or ("cuda" if torch.cuda.is_available() else "cpu")


def runtime_of(request: LoadRequest) -> ModuleType:
    """The runtime package that serves `request`: `check`, `load` and `outline` are its surface."""
    if request.runtime not in RUNTIMES:
        raise InterleaveError(f"there is no runtime {request.runtime!r}; the runtimes are {', '.join(RUNTIMES)}")
    name = f"runtimes.{request.runtime}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise InterleaveError(f"the runtime {request.runtime!r} is not part of this installation") from error


def under_torchrun() -> bool:
    """Whether this process is itself a rank: a launcher set its place, or the world already stands."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def load(
    source: str | os.PathLike[str],
    *,
    runtime: str = "transformers",
    tp: int = 1,
    ep: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    limit: float = 60.0,
    **options: Any,
) -> Any:
    """Load a model so that a trace block reads, writes, skips, calls and differentiates whole values.

    The code is the same in three situations:

    * in a script or a notebook the ranks are started, fed and ended by this process (the *driver*);
    * under `torchrun` this process becomes one of the ranks (every rank must make the same call);
    * with all degrees 1 nothing is started.

    Args:
        source: A directory in HuggingFace's format, or a repo id.
        runtime: `"transformers"`, `"vllm"` or `"native"`.
        tp, ep, pp, dp, cp: Degrees: tensor, expert, pipeline, data, context parallel.
        dtype: A dtype or its name; default: the checkpoint's.
        device: `"cpu"` or `"cuda"`; default: cuda where there is one.
        limit: Seconds that any wait for another rank may take.
        **options: Handed to the runtime's loader (for transformers: `from_pretrained`'s arguments).

    Returns:
        The model: an nnsight envoy tree with `trace`, `generate`, `session`, `edit`, `layout`, `close`.

    Raises:
        Unshardable: The degree or the model's plan cannot work; raised before weights are read.
        InterleaveError: The path is no model, or an option is refused, by name.
    """
    if not isinstance(source, str | os.PathLike):
        raise InterleaveError(f"load takes a directory or a repo id, not {source!r}; `wrap` takes a loaded model")
    if device not in (None, "cpu", "cuda"):
        raise InterleaveError(f"device={device!r}: the devices are 'cpu' and 'cuda'")
    if device == "cuda" and not torch.cuda.is_available():
        raise InterleaveError("device='cuda', and torch finds no GPU here")
    if not limit > 0:
        raise InterleaveError(f"limit={limit!r}: a wait needs a positive number of seconds")
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    request = LoadRequest(os.fspath(source), runtime, tp, ep, pp, dp, cp, dtype, device, float(limit), options)
    for axis in ("tp", "ep", "pp", "dp", "cp"):
        degree = getattr(request, axis)
        if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
            raise InterleaveError(f"{axis}={degree!r}: a degree is a whole number, 1 or more")
    loader = runtime_of(request)
    loader.check(request)
    if request.world_size == 1 or getattr(loader, "starts_ranks", False) or under_torchrun():
        return loader.load(request)

    from .ranks import start

    return start(request, loader.outline(request))


def wrap(module: torch.nn.Module, tokenizer: Any = None, *, limit: float = 60.0) -> Any:
    """The envoy tree over a model that is loaded already, and perhaps sharded by its runtime, in this process.

    Every rank that holds a part of the model must make the call.

    Args:
        module: A transformers model, as `from_pretrained` gives it, with or without a `distributed_config`.
        tokenizer: For prompts that are text; without one a trace takes ids.
        limit: Seconds that any wait for another rank may take.

    Raises:
        InterleaveError: No runtime knows this kind of module.
        Unshardable: It is sharded in a way that cannot be made whole.
    """
    for name in RUNTIMES:
        if type(module).__module__.partition(".")[0] == name or any(
            base.__module__.partition(".")[0] == name for base in type(module).__mro__
        ):
            runtime = importlib.import_module(f"runtimes.{name}")
            return runtime.wrap(module, tokenizer, limit=limit)
    raise InterleaveError(f"no runtime knows how {type(module).__module__}.{type(module).__name__} is sharded")
