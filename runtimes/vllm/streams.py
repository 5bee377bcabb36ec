"""A trace on an async engine: its outputs as they come, with what the block saved on the last of them."""

# vLLM's and nnsight's classes meet here at run time, and their declared types do not say so.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from interleave.errors import DivergedBlock, InterleaveError
from interleave.ranks.surroundings import RandomState

from . import nnsight_port as vllm_port
from .drawing import same
from .engine import reveal
from .payload import Answers, Tree

if TYPE_CHECKING:
    from .model import EngineModel


class Stream(vllm_port.AsyncVLLMBackend):
    """`async for output in tracer.backend`, once; or `await tracer.backend` for the finished output.

    The finished output has what the block saved, as `output.saves`; what the block raised is raised there.
    """

    model: EngineModel

    def __call__(self, tracer: Any) -> None:
        self._blocks: list = []
        self._random = RandomState.now()
        try:
            super().__call__(tracer)
        except NotImplementedError as error:
            raise InterleaveError("a trace of an async engine takes one prompt: open one trace for each") from error
        finally:
            self._blocks, self.model.attached = self.model.attached, []

    async def _attach_saves(self, output: Any) -> None:
        entry = await vllm_port.acollect(self.model.vllm_entrypoint, self._request_id or "", output)
        if entry is None:
            return
        vllm_port.attach(output, entry)
        reveal(output)
        (block,) = self._blocks
        answers = Answers(Tree(self.model), self.model.arenas)
        self.model.unpack(answers, block, output)
        # What the caller drew in the meantime stays drawn.
        lost = answers.settle([block], advance=same(self._random, RandomState.now()))
        for completion, saves in zip(output.outputs, output.nnsight_sequences, strict=False):
            completion.saves = saves
        if isinstance(output.error, DivergedBlock):
            await self.model.vllm_entrypoint.collective_rpc("interleave_rebuild", args=(self.model.next_generation(),))
        if output.error is not None:
            raise output.error
        if lost is not None:
            raise lost

    async def __aiter__(self) -> AsyncGenerator[Any, None]:
        if self._generator is None:
            raise InterleaveError("the outputs of this trace have been taken: its stream can be read once")
        try:
            async with contextlib.aclosing(super().__aiter__()) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._generator = None


__all__ = ["Stream"]
