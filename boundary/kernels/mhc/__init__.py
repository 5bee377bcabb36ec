"""What hyper-connections do to a residual of several streams, each in one pass: collapse them, and mix them.

Accumulated in float32 (float64 where the tensors are), one stream after the other, and rounded once.
"""

from __future__ import annotations

from torch import Tensor

from ..blocks import takes
from ..moe_finalize import moe_finalize
from . import naive


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """`sum_i pre[i] * stream_i`: a new tensor `[rows, hidden]` of the streams' dtype.

    To the numbers it is `moe_finalize`, with streams for choices.

    Args:
        streams: `[rows, streams, hidden]`.
        pre: `[rows, streams]`, of any floating-point dtype.

    Raises:
        ValueError: The shapes do not go together.
    """
    return moe_finalize(streams, pre)


def mix(streams: Tensor, comb: Tensor, post: Tensor, contribution: Tensor) -> Tensor:
    """Stream `i` becomes `sum_j comb[i, j] * stream_j + post[i] * contribution`: a new tensor like the streams.

    Args:
        streams: `[rows, streams, hidden]`.
        comb: `[rows, streams, streams]`, of any floating-point dtype, as `post` is.
        post: `[rows, streams]`.
        contribution: `[rows, hidden]`.

    Raises:
        ValueError: The shapes do not go together.
    """
    rows, count, hidden = streams.shape
    found = (comb.shape, post.shape, contribution.shape)
    if found != ((rows, count, count), (rows, count), (rows, hidden)):
        raise ValueError(f"streams of shape {tuple(streams.shape)} are not mixed by shapes {[tuple(s) for s in found]}")
    made = None
    if takes(streams, comb, post, contribution):
        from . import triton

        made = triton.mix(streams, comb, post, contribution)
    return naive.mix(streams, comb, post, contribution) if made is None else made


__all__ = ["collapse", "mix"]
