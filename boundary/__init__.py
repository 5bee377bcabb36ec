"""Layer boundaries: the transitions between the compute stages of a sharded model.

Between two stages somebody has to finish sums that are still outstanding, move token rows to where they are
needed, put the producer's output into the residual and normalize the consumer's input. This package does
that, in one place, so that models only compute. See `docs/boundary` for the concepts; `factories` and
`residual.batch` are what models use.
"""

from .construction import StagePlan
from .contracts import BatchVariant, EdgeDecl, ProducerReduction, StageDecl
from .exit import FfnExit, MixerExit
from .factories import (
    StageDeclaration,
    declare_attn,
    declare_ffn,
    make_attn_stage,
    make_ffn_stage,
    make_stages,
)
from .forward import ForwardBatch, ForwardMode, exchange_batch, fresh_forward, get_forward
from .fusions import FusedMlpInput
from .layout import ATTN_CP, ATTN_DP, ATTN_TP_SCATTER, Layout, PaddingMode, SumGroup, Topology
from .output import HandoffOutput, OutputTransform, OwedOutput, UnreducedOutput
from .residual import StageRead, StageUpdate
from .residual.access import AuxHiddenStateList
from .residual.stream import ResidualStream
from .runtime import Runtime, bind
from .stage import StageBoundary

__all__ = [
    "ATTN_CP",
    "ATTN_DP",
    "ATTN_TP_SCATTER",
    "AuxHiddenStateList",
    "BatchVariant",
    "EdgeDecl",
    "FfnExit",
    "ForwardBatch",
    "ForwardMode",
    "FusedMlpInput",
    "HandoffOutput",
    "Layout",
    "MixerExit",
    "OutputTransform",
    "OwedOutput",
    "PaddingMode",
    "ProducerReduction",
    "ResidualStream",
    "Runtime",
    "StageBoundary",
    "StageDecl",
    "StageDeclaration",
    "StagePlan",
    "StageRead",
    "StageUpdate",
    "SumGroup",
    "Topology",
    "UnreducedOutput",
    "bind",
    "declare_attn",
    "declare_ffn",
    "exchange_batch",
    "fresh_forward",
    "get_forward",
    "make_attn_stage",
    "make_ffn_stage",
    "make_stages",
]
