"""The gradient of an operation whose kernel only makes results: its definition's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import gpu
from .host import records

Results = Tensor | tuple[Tensor, ...]


class _ByDefinition(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[], Results],
        definition: Callable[..., Results],
        back: Callable[..., tuple[Tensor | None, ...]] | None,
        *inputs: Tensor | None,
    ) -> Any:
        ctx.definition, ctx.back = definition, back
        ctx.save_for_backward(*inputs)
        return run()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        needed, again = ctx.needs_input_grad[3:], torch.is_grad_enabled()
        if ctx.back is not None and not again and gpu.runs(*ctx.saved_tensors, *gradients):
            return None, None, None, *ctx.back(*ctx.saved_tensors, *gradients)
        with torch.enable_grad():
            # Views, so that no input is computed from another, as it may have been.
            inputs = [
                None if one is None else one.view_as(one) if again or not need else one.detach().requires_grad_()
                for one, need in zip(ctx.saved_tensors, needed, strict=True)
            ]
            results = ctx.definition(*inputs)
        wanted = [one for one, need in zip(inputs, needed, strict=True) if one is not None and need]
        found = iter(torch.autograd.grad(results, wanted, gradients, create_graph=again))
        return None, None, None, *(next(found) if need else None for need in needed)


def recorded(
    run: Callable[[], Results],
    definition: Callable[..., Results],
    *inputs: Tensor | None,
    back: Callable[..., tuple[Tensor | None, ...]] | None = None,
) -> Any:
    """`run()`, with the gradient of `definition(*inputs)` where autograd records; gradients have gradients too.

    Args:
        run: Makes the results, of the same inputs.
        definition: Makes the same of any inputs, in torch's operations that autograd knows.
        inputs: All tensors that the results depend on, or None.
        back: Makes every input's gradient of `(*inputs, *gradients of the results)`, by kernels. Where the gradient is
            recorded or transformed, and without one, it is the definition's.
    """
    if not records(*inputs):
        return run()
    return _ByDefinition.apply(run, definition, back, *inputs)
