"""What may be a prompt: text, token ids in any of the usual forms, a tokenizer's output, one of vLLM's own prompts."""

# vLLM's and nnsight's classes meet here at run time, and their declared types do not say so.
# pyright: reportReturnType=false

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import torch

from interleave.errors import InterleaveError


def split(*inputs: Any) -> list[Any]:
    """The prompts of one invoke: each a text, a list of ids or one of vLLM's prompts.

    Raises:
        InterleaveError: There is none, or more than one argument, or something that is no prompt.
    """
    if len(inputs) != 1:
        raise InterleaveError(f"an invoke takes one prompt or one list of prompts, not {len(inputs)} arguments")
    prompt = inputs[0]
    if isinstance(prompt, Mapping):
        return masked(prompt["input_ids"], prompt.get("attention_mask")) if "input_ids" in prompt else [prompt]
    if isinstance(prompt, torch.Tensor):
        return rows_of(prompt)
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list | tuple):
        raise InterleaveError(f"{prompt!r} is no prompt: give a text, token ids, or a list of them")
    if not prompt:
        raise InterleaveError("an empty list is no prompt")
    if not any(isinstance(item, int | float) for item in prompt):
        return [single for item in prompt for single in split(item)]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        raise InterleaveError(f"{prompt!r} is no prompt: token ids are whole numbers")
    return [list(prompt)]


def masked(ids: Any, mask: Any) -> list[list[int]]:
    """The prompts of a tokenizer's output. An engine has no padding: what is masked is left out."""
    rows = rows_of(ids)
    if mask is None:
        return rows
    return [
        [number for number, keep in zip(row, kept, strict=True) if keep]
        for row, kept in zip(rows, rows_of(mask), strict=True)
    ]


def rows_of(ids: Any) -> list[list[int]]:
    """Token ids as lists, one for each prompt.

    Raises:
        InterleaveError: They are neither [tokens] nor [prompts, tokens], or no whole numbers.
    """
    tensor = ids if isinstance(ids, torch.Tensor) else None
    if tensor is not None and (tensor.dim() not in (1, 2) or tensor.is_floating_point()):
        raise InterleaveError(
            f"token ids are whole numbers in [tokens] or [prompts, tokens], not {tensor.dtype} in {tuple(tensor.shape)}"
        )
    rows = list(ids) if tensor is None else tensor.tolist()
    return [list(row) for row in rows] if rows and isinstance(rows[0], list | tuple) else [rows]


def check(prompt: Any, vocabulary: int) -> None:
    """Refuse ids that the model has no embedding for: an engine without a tokenizer would take them, and die of them.

    Raises:
        InterleaveError: There is one, or there are no ids at all.
    """
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, Mapping) else None
    if ids is None:
        return
    if not len(ids):
        raise InterleaveError("a prompt needs at least one token")
    wrong = [number for number in ids if not 0 <= number < vocabulary]
    if wrong:
        raise InterleaveError(f"token {wrong[0]} is none of the model's, which has {vocabulary}")


def apart(prompt: Any) -> dict[str, Any]:
    """The prompt, such that no other request uses the keys and values that a block may have changed."""
    prompt = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    prompt["cache_salt"] = f"{prompt.get('cache_salt', '')} {uuid.uuid4().hex}"
    return prompt


__all__ = ["apart", "check", "split"]
