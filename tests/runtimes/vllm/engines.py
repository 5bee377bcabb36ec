"""vLLM engines for the tests: the real engine on the CPU, started and ended in about two seconds.

    with plain("llama", tp=2) as llm:
        llm.generate(...)

What it takes to have many engines one after another in one pytest process:

* *The engine's core lives here, its ranks do not.* The scheduler runs in the pytest process, so that a test needs no
  third process; the ranks, even a single one, are processes that vLLM's executor makes and ends. A rank that lived
  here would leave things behind that no shutdown takes back: `torch.set_num_threads` replaced, memory bound to a node.
* *Ranks are forked* from a server that has vLLM imported (see `processes`); vLLM's own choice on the CPU, to spawn
  them, costs fifteen seconds.
* *Nothing is warmed up.* `enforce_eager` and a cache of a fixed, small size make vLLM skip its trial forwards; torch's
  compiler is off, or the first log-probability would wait for it. One thing is missed: a pipeline stage but the first
  has nowhere to receive its input until a forward of dummy rows has run. `plain` runs one.
* *A frozen heap.* vLLM collects garbage about ten times between start and end. What is alive before is frozen first
  (and thawed by the shutdown), or each collection walks a million objects of imported modules.
* *The end* is `llm.llm_engine.engine_core.shutdown()`. It ends the ranks and waits for them; their groups end with
  them. Deleting the `LLM` is not enough, and the interpreter's exit is too late.

Two defects of vLLM 0.32 on the CPU concern what runs here. Its experts ignore which of them a rank holds, so that
under expert parallelism a rank reads weights that are not there; `Rank` repairs that. And its rotary kernel takes for
granted that a token's heads lie side by side in one dim: in multi-head latent attention, where they do not, queries
and keys are left unturned unless the embedding is YaRN, which has no kernel. No checkpoint of `checkpoints` is such.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from vllm import LLM
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.v1.executor import multiproc_executor

import interleave
from tests.runtimes.vllm import processes
from tests.runtimes.vllm.checkpoints import tiny
from tests.runtimes.vllm.processes import Forked

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}


class Rank(Forked):
    """A rank's process, with experts that heed which of them it holds."""

    def run(self) -> None:
        CPUUnquantizedExperts.apply = _apply_held
        try:
            super().run()
        finally:
            # Shared memory that vLLM's CPU ranks reduce through, and never unlink.
            for segment in Path("/dev/shm").glob(os.environ.get("VLLM_DIST_IDENT", "none") + "-*"):
                segment.unlink(missing_ok=True)


class Ranks(multiproc_executor.MultiprocExecutor):
    """vLLM's own executor of one process per rank; the processes are `Rank`s."""

    def _init_executor(self) -> None:
        context = processes.start()
        context.Process = Rank  # pyright: ignore[reportAttributeAccessIssue]
        with mock.patch.object(multiproc_executor, "get_mp_context", lambda: context):
            super()._init_executor()


#: Arguments of an engine, of `LLM` and of `interleave.load` alike.
OPTIONS: dict[str, Any] = {
    "distributed_executor_backend": Ranks,
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 64 << 20,
    "max_logprobs": -1,
    "max_model_len": 128,
    "seed": 0,
    "skip_tokenizer_init": True,
    "use_tqdm_on_load": False,
}


@contextlib.contextmanager
def surroundings() -> Iterator[None]:
    """The environment in which an engine starts, runs and ends; what vLLM writes to it is taken back."""
    with mock.patch.dict(os.environ, ENVIRONMENT):
        gc.freeze()
        yield


@contextlib.contextmanager
def plain(kind: str, tp: int = 1, pp: int = 1, **options: Any) -> Iterator[LLM]:
    """vLLM's own engine over the tiny checkpoint of `kind`, with `tp * pp` ranks: what a traced one is compared with.

    Args:
        kind: A key of `checkpoints.KINDS`.
        tp: The degree of tensor parallelism.
        pp: The number of pipeline stages.
        **options: What departs from `OPTIONS`.
    """
    with surroundings():
        llm = LLM(str(tiny(kind)), tensor_parallel_size=tp, pipeline_parallel_size=pp, **OPTIONS | options)
        try:
            if pp > 1:
                llm.collective_rpc("execute_dummy_batch")
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


@contextlib.contextmanager
def traced(source: str | Path, tp: int = 1, **options: Any) -> Iterator[Any]:
    """An engine with our workers in it, and the model that traces it: `interleave.load`'s, closed at the end.

    Args:
        source: A key of `checkpoints.KINDS`, or a model's directory.
        tp: The degree of tensor parallelism.
        **options: What departs from `OPTIONS`.
    """
    with surroundings():
        path = source if isinstance(source, Path) else tiny(source)
        model = interleave.load(path, runtime="vllm", tp=tp, **OPTIONS | options)
        try:
            yield model
        finally:
            model.close()


_apply = CPUUnquantizedExperts.apply


def _apply_held(
    self: CPUUnquantizedExperts,
    output: Any,
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    activation: Any,
    global_num_experts: int,
    expert_map: Any,
    *rest: Any,
    **named: Any,
) -> None:
    """What the experts do, with those of other ranks at weight zero and this rank's by their number on it."""
    if expert_map is not None:
        held = expert_map[topk_ids.long()]
        topk_weights = topk_weights.masked_fill(held < 0, 0.0)
        topk_ids = held.clamp(min=0).to(topk_ids.dtype)
    heads = (output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map)
    _apply(self, *heads, *rest, **named)
