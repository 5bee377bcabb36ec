"""An engine in a real Jupyter kernel: loaded in one cell, traced in the next, and gone with the kernel."""

from __future__ import annotations

import ast
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

import interleave
from tests.runtimes.vllm.checkpoints import tiny
from tests.runtimes.vllm.processes import below, running

pytestmark = pytest.mark.vllm

LOAD = """
import os
import interleave

model = interleave.load(
    {path!r}, runtime="vllm", tp=2, dtype="float32", max_model_len=64, skip_tokenizer_init=True,
    kv_cache_memory_bytes=64 << 20, use_tqdm_on_load=False,
)
scale = 2.0

def louder(hidden):
    return hidden * scale
"""
BLOCK = """
with model.trace([5, 17, 3]):
    model.model.layers[0].mlp.output = louder(model.model.layers[0].mlp.output)
    hidden = model.model.layers[1].output.save()
print(hidden{flat})
"""
WRONG = """
with model.trace([5, 17, 3]):
    hidden = model.model.layers[0].output
    1 // 0
"""


class Kernel:
    """A kernel whose cells are run one after another."""

    def __init__(self, manager: KernelManager) -> None:
        self.manager = manager
        self.client = manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid  # type: ignore[union-attr]

    def run(self, cell: str) -> tuple[str, str]:
        """What a cell printed, and what it raised."""
        printed: list[str] = []
        raised: list[str] = []

        def take(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                printed.append(content["text"])
            elif message["msg_type"] == "error":
                raised.append(re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"])))

        self.client.execute_interactive(cell, timeout=150, output_hook=take)
        return "".join(printed), "".join(raised)


@contextmanager
def kernel(cwd: Path) -> Iterator[Kernel]:
    manager = KernelManager(kernel_name="python3")
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    manager.start_kernel(cwd=str(cwd), env=environment)
    started = Kernel(manager)
    try:
        yield started
    finally:
        started.client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_cells_load_and_trace_and_nothing_outlives_a_kernel_that_is_killed() -> None:
    path = str(tiny("llama"))
    judge: dict[str, Any] = {"model": interleave.load(path, dtype="float32"), "louder": lambda hidden: hidden * 2.0}
    with judge["model"].trace([[5, 17, 3]]):
        judge["model"].model.layers[0].mlp.output = judge["louder"](judge["model"].model.layers[0].mlp.output)
        expected = judge["model"].model.layers[1].output.detach().save()
    with kernel(Path(interleave.__file__).parents[1]) as started:
        assert started.run(LOAD.format(path=path))[1] == ""
        printed, raised = started.run(BLOCK.format(flat=".flatten().tolist()"))
        assert raised == ""
        found = ast.literal_eval(printed)
        assert found == pytest.approx(expected.flatten().tolist(), abs=1e-4 * float(expected.abs().max()))
        _, raised = started.run(WRONG)
        assert "ZeroDivisionError" in raised and "1 // 0" in raised
        # The engine and its names live on in the next cell.
        assert started.run(BLOCK.format(flat=".shape"))[0] == "torch.Size([1, 3, 96])\n"
        arenas = Path(started.run("print(model.arenas.path)")[0].strip())
        assert arenas.is_dir()
        ranks = below(started.pid)
        assert len(ranks) >= 2
        os.kill(started.pid, signal.SIGKILL)
        end = time.monotonic() + 30
        while alive := [pid for pid in ranks if running(pid)]:
            assert time.monotonic() < end, f"{alive} are left"
            time.sleep(0.1)
    assert not arenas.exists()
