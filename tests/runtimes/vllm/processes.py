"""Processes that have vLLM imported when they start: they are forked from a server that has.

A rank that is spawned spends fifteen seconds on imports, and a fork of the pytest process would inherit whatever the
tests left in it: process groups, threads, warnings that are errors. The server - `multiprocessing`'s own, one for the
pytest process - has only the imports. It is started with one thread, and with torch's compiler off.
"""

from __future__ import annotations

import gc
import os
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest import mock

PRELOADED = [
    "vllm.entrypoints.llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "runtimes.vllm.model",
    "runtimes.vllm.worker",
    "tests.runtimes.vllm.engines",
]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class Forked(ForkServerProcess):
    """A process forked from the server, with the environment that its parent has as it makes it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.environment = os.environ | ENVIRONMENT

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        # vLLM collects garbage a dozen times; what the server imported is none, and there is a lot of it.
        gc.freeze()
        super().run()


def start() -> ForkServerContext:
    """Start the server, which takes a while to be ready. A second call does nothing."""
    server = ForkServerContext()
    server.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    return server


def below(pid: int) -> set[int]:
    """The processes that `pid` and those below it have started and that run."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | below(child)
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
