"""Norms of every kind that kernels know, for tests and benchmarks."""

from __future__ import annotations

from torch import Tensor

from boundary.kernels.norms import Kind, NormFormula

KINDS = ["rms", "gemma", "layer", "bare"]


def norm_of(kind: str, weight: Tensor, bias: Tensor) -> NormFormula:
    """A norm of that kind, with what it has of a weight and a bias."""
    return {
        "rms": NormFormula(Kind.RMS, weight, 1e-6),
        "gemma": NormFormula(Kind.RMS, weight, 1e-5, offset=1.0),
        "layer": NormFormula(Kind.LAYER, weight, 1e-5, bias),
        "bare": NormFormula(Kind.LAYER, None, 1e-5),
    }[kind]
