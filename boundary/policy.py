"""`boundary_reduction`: which optional transports an FFN's output may take.

A policy is a set of permissions, not a command. An FFN output owes a sum, and where its rows must also be
dealt out, one reduce-scatter can do both: of a fixed size per rank (`RS`), or of each rank's own padded size
(`RSV`). Where shape, topology or producer rule the permitted scatter out, the all-reduce path is taken.

`auto` stands for a choice per architecture, made before any boundary is built. A draft model has a checkpoint
and an architecture of its own, so it resolves its own policy.
"""

from __future__ import annotations

from enum import Enum


class Scatter(Enum):
    RS = "rs"
    RSV = "rsv"


class BoundaryReduction(Enum):
    AR = "ar"
    RS = "rs"
    RSV = "rsv"
    RS_RSV = "rs+rsv"
    AUTO = "auto"

    @property
    def permits(self) -> frozenset[Scatter]:
        """The optional transports allowed. `auto` has to be resolved first."""
        if self is BoundaryReduction.AUTO:
            raise ValueError("boundary_reduction='auto' is resolved per architecture before boundaries are built")
        return frozenset(scatter for scatter in Scatter if scatter.value in self.value.split("+"))


_BY_ARCHITECTURE = {
    # MLA models run input-scattered batches, where the FFN's sum and the slice are one reduce-scatter.
    "DeepseekV2ForCausalLM": BoundaryReduction.RS,
    "DeepseekV3ForCausalLM": BoundaryReduction.RS,
    # MoE decoders under attention DP return rows that are ragged in prefill and even in decode.
    "Qwen3MoeForCausalLM": BoundaryReduction.RS_RSV,
    "MixtralForCausalLM": BoundaryReduction.RS_RSV,
}


def resolve(option: BoundaryReduction | str, architecture: str | None = None) -> BoundaryReduction:
    """The policy `option` stands for in a model of class `architecture`; an unknown one gets the all-reduce
    path.
    """
    chosen = BoundaryReduction(option)
    if chosen is BoundaryReduction.AUTO:
        return _BY_ARCHITECTURE.get(architecture or "", BoundaryReduction.AR)
    return chosen
