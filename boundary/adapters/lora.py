"""Which rows LoRA runs on: those of the stage that is about to compute.

An adapter's tables are indexed by token, so it has to know whether the rows at hand are one attention-DP
rank's own or everybody's. Attention always runs on its own; an FFN does where its input is dealt out over
attention DP.
"""

from __future__ import annotations

from enum import Enum

from ..contracts import StageDecl, StageKind
from ..layout import ATTN_DP


class LoraRows(Enum):
    """The rows of the selected compute input."""

    DP_LOCAL = "dp_local"
    TP_GLOBAL = "tp_global"


def lora_rows(decl: StageDecl) -> LoraRows:
    local = decl.kind is StageKind.ATTN or ATTN_DP in decl.input.rows.sharded
    return LoraRows.DP_LOCAL if local else LoraRows.TP_GLOBAL
