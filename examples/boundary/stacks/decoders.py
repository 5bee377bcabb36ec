"""Stacks whose stages meet through boundaries. Compute knows rows; the boundaries know the rest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from boundary import (
    ForwardBatch,
    ProducerReduction,
    StageBoundary,
    StageDeclaration,
    declare_attn,
    declare_ffn,
    make_stages,
)
from boundary.adapters.cp import TokenDeal
from boundary.linear import check_compute
from boundary.residual import batch as residual_batch
from boundary.residual.mhc import MhcRead, MhcUpdate

from .parts import Attention, Moe, Recurrence, dense_mlp, embedding
from .reference import coefficients
from .weights import Config, GridNorm, on_grid, weight


class DecoderLayer(nn.Module):
    """Attention and an FFN, dense or sparse: two stages made together."""

    def __init__(
        self,
        index: int,
        config: Config,
        sparse: list[bool],
        *,
        terminal: bool,
        name: str = "model",
        fusions: Any = None,
        declare: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        stage = f"{name}.{2 * index}", f"{name}.{2 * index + 1}"
        self.input_layernorm = GridNorm(f"{stage[0]}.norm", config.hidden)
        self.self_attn = Attention(stage[0], config)
        self.post_attention_layernorm = GridNorm(f"{stage[1]}.norm", config.hidden)
        self.mlp = Moe(stage[1], config) if sparse[index] else dense_mlp(stage[1], config)
        options = {"fusions": fusions} if fusions is not None else {}

        def ffn(at: int) -> StageDeclaration:
            following = sparse[at + 1] if at + 1 < len(sparse) else False
            return declare_ffn(sparse=sparse[at], next_sparse=following, **(declare or {}))

        self.attn_boundary, self.ffn_boundary = make_stages(
            (declare_attn(), self.input_layernorm, options),
            (ffn(index), self.post_attention_layernorm, options),
            previous=ffn(index - 1) if index else None,
            terminal=terminal,
        )
        check_compute(self.attn_boundary, self.self_attn)
        check_compute(self.ffn_boundary, self.mlp)

    def forward(
        self, hidden_states: Any, forward_batch: ForwardBatch, deal: TokenDeal | None = None, **prepare: Any
    ) -> Any:
        hidden_states = self.attn_boundary.prepare(hidden_states, forward_batch, **prepare)
        if hidden_states.shape[0] != 0 or deal is not None:
            hidden_states = self.self_attn(hidden_states, deal)
        hidden_states = self.attn_boundary.finish(hidden_states, forward_batch)

        hidden_states = self.ffn_boundary.prepare(hidden_states, forward_batch)
        with self.ffn_boundary.exit(forward_batch) as output:
            hidden_states = self.mlp(hidden_states)
        return output.finish(hidden_states)


class Decoder(nn.Module):
    """A dense or MoE decoder, or one pipeline stage's part of it.

    Args:
        sparse: For each layer of the whole model whether its FFN is a MoE.
        layers: The layers held here.
        config: The sizes.
    """

    def __init__(
        self, sparse: list[bool], config: Config | None = None, layers: range | None = None, **options: Any
    ) -> None:
        super().__init__()
        self.config = config or Config()
        layers = layers or range(len(sparse))
        self.first, self.last = layers.start == 0, layers.stop == len(sparse)
        self.embed = embedding(self.config)
        self.layers = nn.ModuleList(
            DecoderLayer(index, self.config, sparse, terminal=index == len(sparse) - 1, **options) for index in layers
        )
        self.norm = GridNorm("model.norm", self.config.hidden)

    def forward(
        self,
        input_ids: Tensor,
        forward_batch: ForwardBatch,
        *,
        received: dict[str, Tensor] | None = None,
        deal: TokenDeal | None = None,
        capture: Any = None,
        handoff_norm: Any = None,
    ) -> Any:
        """The final norm; from a pipeline stage that is not the last, what the next one is to receive."""
        if self.first:
            residual_batch.start(forward_batch)
            hidden_states: Any = self.embed[input_ids]
        else:
            assert received is not None
            first: Any = self.layers[0]
            hidden_states = first.attn_boundary.from_pp(received, forward_batch)
        prepare = {} if capture is None else {"capture_output": capture}
        for layer in self.layers:
            hidden_states = layer(hidden_states, forward_batch, deal, **prepare)
        if not self.last:
            return residual_batch.to_pp(hidden_states, forward_batch)
        return residual_batch.norm(
            hidden_states,
            forward_batch,
            self.norm,
            skip_empty=True,
            capture_output=capture,
            handoff_norm=handoff_norm,
        )


class HybridDecoder(nn.Module):
    """A Nemotron-H-like stack of one-stage layers: `M` recurrence, `*` attention, `-` MLP, `E` MoE.

    Args:
        pattern: The whole model's letters.
        layers: Those held here.
    """

    def __init__(self, pattern: str, config: Config | None = None, layers: range | None = None) -> None:
        super().__init__()
        self.config = config or Config()
        layers = layers or range(len(pattern))
        self.first, self.last = layers.start == 0, layers.stop == len(pattern)
        self.embed = embedding(self.config)
        self.mixers = nn.ModuleList()
        self.boundaries: list[StageBoundary] = []
        for index in layers:
            letter, stage = pattern[index], f"model.{index}"
            compute = {
                "M": lambda stage=stage: Recurrence(stage, self.config),
                "*": lambda stage=stage: Attention(stage, self.config, scoped=True),
                "-": lambda stage=stage: dense_mlp(stage, self.config),
                "E": lambda stage=stage: Moe(stage, self.config),
            }[letter]()
            (boundary,) = make_stages(
                (self.declare(letter), GridNorm(f"{stage}.norm", self.config.hidden)),
                previous=self.declare(pattern[index - 1]) if index else None,
                following=self.declare(pattern[index + 1]) if index + 1 < len(pattern) else None,
                terminal=index + 1 == len(pattern),
            )
            check_compute(boundary, compute)
            self.mixers.append(compute)
            self.boundaries.append(boundary)
        self.norm = GridNorm("model.norm", self.config.hidden)

    @staticmethod
    def declare(letter: str) -> StageDeclaration:
        if letter in "M*":
            return declare_attn(reduction=ProducerReduction.SCOPED, gathers_tp_input=False)
        return declare_ffn(sparse=letter == "E")

    def forward(
        self, input_ids: Tensor, forward_batch: ForwardBatch, *, received: dict[str, Tensor] | None = None
    ) -> Any:
        if self.first:
            residual_batch.start(forward_batch)
            hidden_states: Any = self.embed[input_ids]
        else:
            assert received is not None
            hidden_states = self.boundaries[0].from_pp(received, forward_batch)
        for boundary, mixer in zip(self.boundaries, self.mixers, strict=True):
            hidden_states = boundary.prepare(hidden_states, forward_batch)
            with boundary.exit(forward_batch) as output:
                hidden_states = mixer(hidden_states)
            hidden_states = output.finish(hidden_states)
        if not self.last:
            return residual_batch.to_pp(hidden_states, forward_batch)
        return residual_batch.norm(hidden_states, forward_batch, self.norm, skip_empty=True)


class ShortcutLayer(nn.Module):
    """A LongCat-like layer: two attentions, two dense FFNs, and a MoE beside all after the first."""

    def __init__(self, at: str, config: Config, *, first: bool, terminal: bool) -> None:
        super().__init__()
        parts = ("attn0", "moe", "attn1", "ffn1")
        norms = {part: GridNorm(f"{at}.{part}.norm", config.hidden) for part in parts}
        self.first_attn = Attention(f"{at}.attn0", config)
        self.second_attn = Attention(f"{at}.attn1", config)
        self.first_mlp = dense_mlp(f"{at}.ffn0", config)
        self.second_mlp = dense_mlp(f"{at}.ffn1", config)
        self.moe = Moe(f"{at}.moe", config)
        self.attn_boundary, self.moe_boundary = make_stages(
            (declare_attn(), norms["attn0"]),
            (declare_ffn(sparse=True), norms["moe"]),
            previous=None if first else declare_ffn(),
        )
        self.first_ffn, self.second_attn_boundary, self.second_ffn = make_stages(
            (declare_ffn(), norms["moe"]),
            (declare_attn(), norms["attn1"]),
            (declare_ffn(), norms["ffn1"]),
            prepared_from=self.moe_boundary.declaration,
            terminal=terminal,
        )

    def forward(self, hidden_states: Any, forward_batch: ForwardBatch) -> Any:
        hidden_states = self.attn_boundary.prepare(hidden_states, forward_batch)
        if hidden_states.shape[0]:
            hidden_states = self.first_attn(hidden_states)
        hidden_states = self.attn_boundary.finish(hidden_states, forward_batch)
        moe_input = self.moe_boundary.prepare(hidden_states, forward_batch)
        hidden_states, branch = self.first_ffn.branch_input(self.moe_boundary, moe_input, forward_batch)
        beside = self.moe_boundary.branch_output(self.moe(moe_input), forward_batch)

        with self.first_ffn.exit(branch) as output:
            hidden_states = self.first_mlp(hidden_states)
        hidden_states = output.finish(hidden_states)
        hidden_states = self.second_attn_boundary.prepare(hidden_states, branch)
        if hidden_states.shape[0]:
            hidden_states = self.second_attn(hidden_states)
        hidden_states = self.second_attn_boundary.finish(hidden_states, branch)
        hidden_states = self.second_ffn.prepare(hidden_states, branch)
        with self.second_ffn.exit(branch) as output:
            hidden_states = self.second_mlp(hidden_states)
        hidden_states = output.finish(hidden_states)
        return self.second_ffn.merge_branch(hidden_states, branch, beside, forward_batch)


class ShortcutDecoder(nn.Module):
    """A stack of shortcut layers."""

    def __init__(self, layers: int, config: Config | None = None) -> None:
        super().__init__()
        self.config = config or Config()
        self.embed = embedding(self.config)
        self.layers = nn.ModuleList(
            ShortcutLayer(f"model.{index}", self.config, first=not index, terminal=index == layers - 1)
            for index in range(layers)
        )
        self.norm = GridNorm("model.norm", self.config.hidden)

    def forward(self, input_ids: Tensor, forward_batch: ForwardBatch) -> Tensor:
        residual_batch.start(forward_batch)
        hidden_states: Any = self.embed[input_ids]
        for layer in self.layers:
            hidden_states = layer(hidden_states, forward_batch)
        return residual_batch.norm(hidden_states, forward_batch, self.norm, skip_empty=True)


class HyperConnectedDecoder(nn.Module):
    """Layers of attention and an FFN on a residual of several streams (MHC).

    Args:
        sparse: For each layer of the whole model whether its FFN is a MoE.
        layers: Those held here.
    """

    def __init__(self, sparse: list[bool], config: Config | None = None, layers: range | None = None) -> None:
        super().__init__()
        self.config = config = config or Config()
        layers = layers or range(len(sparse))
        self.first, self.last = layers.start == 0, layers.stop == len(sparse)
        self.embed = embedding(config)
        self.computes = nn.ModuleList()
        self.boundaries: list[tuple[StageBoundary, StageBoundary]] = []

        def declarations(index: int) -> tuple[StageDeclaration, StageDeclaration]:
            attn, ffn = (self.read(f"model.{2 * index + part}") for part in (0, 1))
            return (
                declare_attn(update=MhcUpdate(config.streams), read=attn),
                declare_ffn(sparse=sparse[index], update=MhcUpdate(config.streams, at_producer=True), read=ffn),
            )

        for index in layers:
            attn, ffn = declarations(index)
            names = [f"model.{2 * index + part}" for part in (0, 1)]
            norms = [GridNorm(f"{name}.norm", config.hidden) for name in names]
            boundaries = make_stages(
                (attn, norms[0]),
                (ffn, norms[1]),
                previous=declarations(index - 1)[1] if index else None,
                terminal=index == len(sparse) - 1,
            )
            mlp = Moe(names[1], config) if sparse[index] else dense_mlp(names[1], config)
            self.computes.append(nn.ModuleList([Attention(names[0], config), mlp]))
            self.boundaries.append((boundaries[0], boundaries[1]))
        self.norm = GridNorm("model.norm", config.hidden)

    def read(self, stage: str) -> MhcRead:
        config = self.config
        return MhcRead(lambda residual: coefficients(stage, config, residual), config.streams, config.hidden)

    def forward(
        self, input_ids: Tensor, forward_batch: ForwardBatch, *, received: dict[str, Tensor] | None = None
    ) -> Any:
        if self.first:
            residual_batch.start(forward_batch)
            hidden_states: Any = self.embed[input_ids]
        else:
            assert received is not None
            hidden_states = self.boundaries[0][0].from_pp(received, forward_batch)
        for (attn_boundary, ffn_boundary), computes in zip(self.boundaries, self.computes, strict=True):
            attention, mlp = computes  # type: ignore[misc]
            hidden_states = attn_boundary.prepare(hidden_states, forward_batch)
            if hidden_states.shape[0]:
                hidden_states = attention(hidden_states)
            hidden_states = attn_boundary.finish(hidden_states, forward_batch)
            hidden_states = ffn_boundary.prepare(hidden_states, forward_batch)
            with ffn_boundary.exit(forward_batch) as output:
                hidden_states = mlp(hidden_states)
            hidden_states = output.finish(hidden_states)
        if not self.last:
            return residual_batch.to_pp(hidden_states, forward_batch)
        return residual_batch.norm(hidden_states, forward_batch, self.norm, skip_empty=True)


class DraftModel(nn.Module):
    """A NextN head: one sparse layer that is a stack of its own, whatever layer of the target it copies."""

    def __init__(self, config: Config | None = None) -> None:
        super().__init__()
        self.config = config = config or Config()
        self.embed = embedding(config)
        self.enorm = GridNorm("draft.enorm", config.hidden)
        self.hnorm = GridNorm("draft.hnorm", config.hidden)
        self.eh_weight = weight("draft.eh", config.hidden, 2 * config.hidden)
        self.layer = DecoderLayer(0, config, [True], terminal=True, name="draft")
        self.norm = GridNorm("draft.norm", config.hidden)

    def forward(self, input_ids: Tensor, hidden_states: Tensor, forward_batch: ForwardBatch) -> Tensor:
        residual_batch.start(forward_batch)
        joined = torch.cat([self.enorm(self.embed[input_ids]), self.hnorm(hidden_states)], dim=-1)
        output = self.layer(on_grid(joined @ self.eh_weight.T), forward_batch)
        return residual_batch.norm(output, forward_batch, self.norm, skip_empty=True)
