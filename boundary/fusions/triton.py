"""The fusion of ranks on GPUs that see each other's memory.

fusions = install_triton_fusion(terminal_finalize=True)
make_stages((declare_attn(), norm, {"fusions": fusions}), (declare_ffn(), norm, {"fusions": fusions}))
prepare_triton_fusion(parallel, rows=8192, hidden=4096, dtype=torch.bfloat16)  # on every rank, before capture
"""

from __future__ import annotations

import torch

from ..collectives import Group, NcclGroup
from ..layout import SumGroup
from ..parallel import Parallel
from ..symmetric_memory import prepare, workspace_of
from .one_pass import OnePassFusion


def install_triton_fusion(
    *, finalizes: bool = True, terminal_finalize: bool = False, eps: float = 1e-6
) -> OnePassFusion:
    """A provider that completes the sums of groups that have a workspace. Of sums that its kernels do not take (they do
    not fit in it, or their rows are too long) the ranks exchange all terms, and torch does the rest. The kernels do not
    quantize: the format of an input is made of its norm after that was rounded.

    Args:
        finalizes, terminal_finalize, eps: As :class:`boundary.fusions.one_pass.OnePassFusion` has them.
    """
    return OnePassFusion(_has_workspace, finalizes, terminal_finalize, eps, formats=False)


def prepare_triton_fusion(parallel: Parallel, rows: int, hidden: int, dtype: torch.dtype) -> None:
    """Make a workspace for every group of GPUs whose sums a boundary completes. Every rank calls it, once, before it
    records a CUDA graph: what was recorded keeps the addresses.

    Args:
        parallel: The ranks.
        rows: The most rows that a term has.
        hidden: Their width.
        dtype: Their dtype.

    Raises:
        RuntimeError: The GPUs of a group do not see each other's memory.
    """
    for name in SumGroup:
        bound = parallel.bound_sum(name)
        if bound is not None and isinstance(bound.group, NcclGroup):
            prepare(bound.group, rows, hidden, dtype)


def _has_workspace(group: Group) -> bool:
    return workspace_of(group) is not None
