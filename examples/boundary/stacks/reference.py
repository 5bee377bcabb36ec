"""The decoders of `decoders`, for one process: what the sharded ones must equal, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from .parts import attend, route, scan, swiglu
from .weights import Config, GridNorm, on_grid, weight


def normed(name: str, config: Config, hidden_states: Tensor) -> Tensor:
    return GridNorm(name, config.hidden)(hidden_states)


def linear(name: str, value: Tensor, out_features: int) -> Tensor:
    return value @ weight(name, out_features, value.shape[-1]).T


def attention(name: str, config: Config, hidden_states: Tensor) -> Tensor:
    heads = (config.heads, -1)
    q, k, v = (on_grid(linear(f"{name}.{part}", hidden_states, config.hidden)).unflatten(-1, heads) for part in "qkv")
    return linear(f"{name}.o", on_grid(attend(q, k, v).flatten(-2)), config.hidden)


def recurrence(name: str, config: Config, hidden_states: Tensor) -> Tensor:
    return linear(f"{name}.out", scan(on_grid(linear(f"{name}.in", hidden_states, config.inner))), config.hidden)


def mlp(name: str, config: Config, hidden_states: Tensor) -> Tensor:
    return linear(f"{name}.down", swiglu(linear(f"{name}.gate_up", hidden_states, 2 * config.inner)), config.hidden)


def moe(name: str, config: Config, hidden_states: Tensor) -> Tensor:
    logits = hidden_states @ weight(f"{name}.router", config.experts, config.hidden).T
    ids, weights = route(logits, config.choices)
    every = torch.stack([mlp(f"{name}.{expert}", config, hidden_states) for expert in range(config.experts)], 1)
    chosen = every.gather(1, ids[..., None].expand(-1, -1, config.hidden))
    return (chosen * weights[..., None]).sum(1) + mlp(f"{name}.shared", config, hidden_states)


COMPUTE = {"*": attention, "M": recurrence, "-": mlp, "E": moe}
"""Stage kinds by the letters in which hybrid models write their patterns."""


def stack(pattern: str, config: Config, hidden_states: Tensor, name: str = "model") -> tuple[Tensor, list[Tensor]]:
    """Stages in sequence, each `x + compute(norm(x))`. Returns the final norm, and the residual before each
    stage.
    """
    residuals = []
    for index, letter in enumerate(pattern):
        residuals.append(hidden_states)
        stage = f"{name}.{index}"
        hidden_states = hidden_states + COMPUTE[letter](stage, config, normed(f"{stage}.norm", config, hidden_states))
    residuals.append(hidden_states)
    return normed(f"{name}.norm", config, hidden_states), residuals


def shortcut(layers: int, config: Config, hidden_states: Tensor, name: str = "model") -> Tensor:
    """Layers whose MoE reads the first FFN's input, and joins at the end of the layer."""
    for index in range(layers):
        at = f"{name}.{index}"
        hidden_states = hidden_states + attention(
            f"{at}.attn0", config, normed(f"{at}.attn0.norm", config, hidden_states)
        )
        shared_input = normed(f"{at}.moe.norm", config, hidden_states)
        beside = moe(f"{at}.moe", config, shared_input)
        hidden_states = hidden_states + mlp(f"{at}.ffn0", config, shared_input)
        hidden_states = hidden_states + attention(
            f"{at}.attn1", config, normed(f"{at}.attn1.norm", config, hidden_states)
        )
        second = mlp(f"{at}.ffn1", config, normed(f"{at}.ffn1.norm", config, hidden_states))
        hidden_states = hidden_states + (second + beside)
    return normed(f"{name}.norm", config, hidden_states)


def coefficients(name: str, config: Config, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hyper-connection coefficients on the grid, from a wide residual."""
    n = config.streams
    raw = residual @ weight(f"{name}.hc", n * (2 + n), residual.shape[-1]).T
    pre, post, comb = on_grid(torch.sigmoid(raw)).split([n, n, n * n], dim=-1)
    return pre, 2 * post, comb.unflatten(-1, (n, n))


def hyper_connected(pattern: str, config: Config, hidden_states: Tensor, name: str = "model") -> Tensor:
    """Stages on a residual of several streams; the final norm reads their mean."""
    streams = hidden_states[:, None].expand(-1, config.streams, -1)
    for index, letter in enumerate(pattern):
        stage = f"{name}.{index}"
        pre, post, comb = coefficients(stage, config, streams.flatten(1))
        mixed = (pre[..., None] * streams).sum(1)
        output = COMPUTE[letter](stage, config, normed(f"{stage}.norm", config, mixed))
        streams = (comb[..., None] * streams[:, None]).sum(2) + post[..., None] * output[:, None]
    return normed(f"{name}.norm", config, streams.mean(1))


def draft(config: Config, embedded: Tensor, hidden_states: Tensor, name: str = "draft") -> Tensor:
    """A multi-token-prediction head: join the next token's embedding with the target's hidden state, one
    layer, norm.
    """
    joined = torch.cat(
        [normed(f"{name}.enorm", config, embedded), normed(f"{name}.hnorm", config, hidden_states)], dim=-1
    )
    return stack("*E", config, on_grid(linear(f"{name}.eh", joined, config.hidden)), name)[0]
