"""Interventions on sharded language models: the block written against one process, on any sharding."""

from .errors import DivergedBlock, InterleaveError, RankDied, ShapeChanged, UnknownLayout, Unserved, Unshardable
from .load import load, wrap
from .values import gather, shard

__all__ = [
    "DivergedBlock",
    "InterleaveError",
    "RankDied",
    "ShapeChanged",
    "UnknownLayout",
    "Unserved",
    "Unshardable",
    "gather",
    "load",
    "shard",
    "wrap",
]
