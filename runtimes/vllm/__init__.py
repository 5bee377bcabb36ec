"""vLLM: whole values from a serving engine."""

from .loading import check, load

#: vLLM starts its ranks itself.
starts_ranks = True

__all__ = ["check", "load", "starts_ranks"]
