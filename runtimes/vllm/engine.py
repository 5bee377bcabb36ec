"""vLLM's engine, whose finished outputs carry what blocks saved and raised.

nnsight fetches it from the workers; what installed blocks raised is rebuilt here, with the user's lines, because
requests of vLLM's own clients have nobody else to tell.
"""

# vLLM's and nnsight's classes meet here at run time, and their declared types do not say so.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import warnings
from typing import Any

from . import nnsight_port as vllm_port


class Engine(vllm_port.NNsightLLMEngine):
    """The synchronous engine."""

    def step(self) -> Any:
        outputs = super().step()
        for output in outputs:
            if output.finished:
                reveal(output)
        return outputs


def reveal(output: Any) -> None:
    """Set `output.error`: what a block of this request raised, or None. A loop that the generation cut short warns."""
    described = getattr(output, "nnsight_error", None) or {"is_control_flow": True}
    if "warning" in described:
        warnings.warn(described["warning"], stacklevel=2)
    output.error = None if described["is_control_flow"] else described["raised"].rebuild()


__all__ = ["Engine", "reveal"]
