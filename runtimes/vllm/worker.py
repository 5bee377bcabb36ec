"""The worker class that vLLM is told to use: the platform's own, with our model runner in it."""

# vLLM's and nnsight's classes meet here at run time, and their declared types do not say so.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import pickle
from typing import Any

from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker as GPUWorker

from interleave.errors import InterleaveError

from .allocator import keep_freed_memory
from .arenas import Arenas
from .declaring import declare
from .runner import CONFIG, mixed
from .watch import Client, end_with


def platform_worker() -> type[GPUWorker]:
    """vLLM's worker class for this platform."""
    if current_platform.is_cpu():
        return resolve_obj_by_qualname("vllm.v1.worker.cpu_worker.CPUWorker")
    return GPUWorker


class Worker(platform_worker()):  # type: ignore[misc]
    """A worker whose model runner runs blocks."""

    def init_device(self) -> None:
        """Start the device as vLLM does, then mix ours over the runner that this made.

        Raises:
            InterleaveError: The platform has another kind of runner.
        """
        wanted = self.vllm_config.additional_config.get(CONFIG, {})
        if "client" in wanted:
            end_with(Client(*wanted["client"]), Arenas(*wanted["arenas"]).end)
        if current_platform.is_cpu():
            keep_freed_memory()
        super().init_device()
        runner = self.model_runner
        if not isinstance(runner, GPUModelRunner):
            raise InterleaveError(
                f"vLLM made a {type(runner).__module__}.{type(runner).__name__} here, and blocks run in its first "
                f"model runner (and that of CPUs): unset VLLM_USE_V2_MODEL_RUNNER"
            )
        runner.__class__ = mixed(type(runner))

    def collect_nnsight(
        self, request_ids: list[str], finished_request_ids: list[str] | None = None, outputs: Any = None
    ) -> bytes | None:
        """What the blocks of these requests saved, for `collective_rpc`."""
        if isinstance(outputs, bytes):
            outputs = pickle.loads(outputs)
        return self.model_runner.collect_nnsight(request_ids, finished_request_ids, outputs)

    def nnsight_request_count(self) -> int:
        """How many requests with blocks the worker holds."""
        return self.model_runner.nnsight_request_count()

    def nnsight_register(self, registration_id: str, payload: bytes, name: str | None = None) -> None:
        """Install a block for every request."""
        self.model_runner.nnsight_register(registration_id, payload, name=name)

    def nnsight_clear_registered(self, registration_id: str) -> None:
        """Take an installed block off."""
        self.model_runner.nnsight_clear_registered(registration_id)

    def interleave_reaches(self) -> bool:
        """Whether the client's arenas are on this machine."""
        return self.model_runner.nnsight_requests.arenas is not None

    def interleave_layouts(self) -> bytes:
        """The layouts of all locations."""
        return pickle.dumps(self.model_runner.interleave_layouts())

    def interleave_declare(self, said: bytes) -> bytes:
        """Take what the user says of a layout. Returns the layouts of all locations."""
        declare(self.model_runner.nnsight_model.interleaver, pickle.loads(said))
        return self.interleave_layouts()

    def interleave_rebuild(self, generation: int) -> None:
        """Make the ranks' groups anew."""
        self.model_runner.interleave_rebuild(generation)
