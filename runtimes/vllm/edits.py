"""Blocks that stay on the engine and run for every request, whoever sends it.

nnsight installs them; they travel as the blocks of traces do, so their errors show the user's lines. Keys and values
that the engine keeps of prompts (its prefix cache) are those of the blocks that ran: they are dropped when the blocks
change.
"""

from __future__ import annotations

import uuid
from types import CodeType
from typing import Any

from interleave import nnsight_port as port

from . import nnsight_port as vllm_port
from .payload import Tree, ship


class Edit(vllm_port.Registration):
    """An installed block, to `clear` (on an async engine: `await edit.aclear()`)."""

    def install(self, payload: bytes) -> None:
        super().install(payload)
        self._forget_prompts()

    def uninstall(self) -> None:
        super().uninstall()
        self._forget_prompts()

    async def ainstall(self, payload: bytes) -> None:
        await super().ainstall(payload)
        await self._aforget_prompts()

    async def auninstall(self) -> None:
        await super().auninstall()
        await self._aforget_prompts()

    @property
    def _engine(self) -> Any:
        engine = self.model.vllm_entrypoint
        return getattr(engine, "llm_engine", engine)

    def _forget_prompts(self) -> None:
        if self._engine.vllm_config.cache_config.enable_prefix_caching:
            self._engine.reset_prefix_cache()

    async def _aforget_prompts(self) -> None:
        if self._engine.vllm_config.cache_config.enable_prefix_caching and not await self._engine.reset_prefix_cache():
            # Requests that run hold on to theirs; they are put aside for it, and computed again.
            await self._engine.reset_prefix_cache(reset_running_requests=True)


class EditTracer(vllm_port.RegisteringTracer):
    """Takes a block, and installs it."""

    def _handle(self) -> Edit:
        return Edit(self._model, f"edit-{uuid.uuid4().hex}", name=self._name)

    def execute(self, code: CodeType) -> None:
        assert self.info is not None
        frame = self.info.frame
        block = port.Mediator(code, frame.f_globals, dict(frame.f_locals), node=self.node)
        self._payload = ship(block, Tree(self._model)).data


__all__ = ["Edit", "EditTracer"]
