"""Attention's input where rows lie on attention-TP slices: gather what is narrow.

Multi-head latent attention first projects its input to a low-rank latent. Where the rows are dealt out over
attention TP, each rank projects its slice, and the latent is gathered instead of the wider hidden states.
Attention then calls `forward_batch.attention_input.fetch_qkv_latent()` where it would have projected its
input; in batches whose rows attention already has, the same call projects and gathers nothing. A batch of
fewer rows than attention TP has ranks is one of those: the boundary has gathered it, because a rank without a
row skips attention's compute, and with it this gather.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..contracts import StageInput
from ..ops import RowMover

if TYPE_CHECKING:
    from ..forward import ForwardBatch


class AttnTpContext:
    """One attention's prepared input, until its compute fetches from it.

    Attributes:
        hidden_states: What `prepare()` returned.

    Args:
        needs: The rows to gather from and to; None where attention has its rows already.
    """

    def __init__(
        self,
        hidden_states: Any,
        latent_func: Callable[..., Any],
        forward_batch: ForwardBatch,
        needs: StageInput | None,
        mover: RowMover,
    ) -> None:
        self.hidden_states = hidden_states
        self._latent_func = latent_func
        self._forward_batch = forward_batch
        self._needs = needs
        self._mover = mover

    def _gathered(self, value: Any) -> Any:
        if self._needs is None:
            return value
        return self._mover.move(value, self._needs.read_rows, self._needs.rows, self._forward_batch.rows)

    def fetch_qkv_latent(self) -> Any:
        """The latent of all of attention's rows: `qkv_latent_func(hidden_states, forward_batch)`, gathered by
        rows.
        """
        return self._gathered(self._latent_func(self.hidden_states, self._forward_batch))

    def fetch_hidden_states(self) -> Any:
        """The input itself on all of attention's rows."""
        return self._gathered(self.hidden_states)
