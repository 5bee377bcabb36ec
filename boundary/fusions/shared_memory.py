"""The fusion of ranks that share memory.

fusions = install_shared_memory_fusion()
make_stages((declare_attn(), norm, {"fusions": fusions}), (declare_ffn(), norm, {"fusions": fusions}))
"""

from __future__ import annotations

from ..collectives import Group, SharedGroup
from .one_pass import OnePassFusion


def install_shared_memory_fusion(
    *, finalizes: bool = True, terminal_finalize: bool = False, eps: float = 1e-6
) -> OnePassFusion:
    """A provider that completes the sums of :class:`boundary.collectives.SharedGroup`.

    Args:
        finalizes, terminal_finalize, eps: As :class:`boundary.fusions.one_pass.OnePassFusion` has them.
    """
    return OnePassFusion(_shares_memory, finalizes, terminal_finalize, eps)


def _shares_memory(group: Group) -> bool:
    return isinstance(group, SharedGroup)
