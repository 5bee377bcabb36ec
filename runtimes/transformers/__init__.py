"""Hugging Face transformers, on one process or with its tensor parallelism."""

from .loading import check, load, outline, wrap

__all__ = ["check", "load", "outline", "wrap"]
