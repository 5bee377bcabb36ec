"""Which view acts out which module."""

# vLLM's and nnsight's classes meet here at run time, and their declared types do not say so.
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import Literal

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import MoERunnerInterface
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer

from interleave import nnsight_port as port
from interleave.fragments import Placed, Refused
from interleave.layout import Shard

from .architectures import CHECKED, UNCHECKED, exceptions
from .fragments import BETWEEN, COPY, node
from .interleaver import EngineInterleaver
from .names import Original, PartOf, TiedHead
from .parallel import Sides, containers, parts, sides
from .stages import Elsewhere
from .views.activation import ActivationView
from .views.attention import AttentionView
from .views.base import TensorView, View
from .views.embedding import EmbeddingView
from .views.experts import ExpertsView, RouterView, TupleBlockView
from .views.head import HeadView, RootView, StackView
from .views.layer import LayerView
from .views.linear import FusedLinearView, LinearView, PartView
from .views.norm import NormView

#: Why some values of modules around a parallel layer are refused.
UNFINISHED = "a layer in it hands on one rank's term of a sum, and its class does not say whether the sum is finished"
TOKEN_ROWS = "sequence-parallel experts compute with other token rows on every rank"

NORMS = (RMSNorm, GemmaRMSNorm, torch.nn.LayerNorm)


class Casting:
    """Finds a view for every module of an envoy tree that HuggingFace's model has too.

    Args:
        root: The envoy of vLLM's whole model, HuggingFace's names grafted in.
        original: HuggingFace's model.
        width: The size of the hidden dim.
        architecture: vLLM's name of it.
        unchecked: Whether names are served even if the architecture was never compared with transformers.
    """

    def __init__(
        self, root: port.Envoy, original: Original, width: int, architecture: str, unchecked: bool = False
    ) -> None:
        self.architecture, self.unchecked = architecture, unchecked
        self.root = root
        self.original = original
        self.width = width
        self.interleaver: EngineInterleaver = root.interleaver  # type: ignore[assignment]
        self.fragments = self.interleaver.fragments
        self.modules = {envoy.path: envoy._module for envoy in root.modules()}
        self.sides = {path: found for path, module in self.modules.items() if (found := sides(module, path))}
        around = containers(root._module)
        self.containers = {f"{root.path}.{name}" if name else root.path: found for name, found in around.items()}
        self.names = {f"{root.path}.{name}" if name else root.path: name for name in original}
        self.views: dict[str, View] = self.interleaver.views
        self.heads: dict[str, View] = {}

    def cast(self) -> dict[str, View]:
        """Declare what is between split layers, then a view for each module. Returns views by path of the module whose
        forward they stand around."""
        for path, found in self.sides.items():
            if isinstance(found.output, Shard):
                self.fragments.between.add(self.common(path))
        for path, module in self.modules.items():
            view = self.view(path, module)
            if view is not None:
                self.views[path] = view
        self.head()
        for path, module in self.modules.items():
            if isinstance(module, PartOf):
                self.views[path] = self.part(path, module)
        self.arrange()
        self.restore_order()
        self.admit()
        self.own()
        around = {path: view for path, view in self.views.items() if not isinstance(view, PartView | HeadView)}
        return around | self.heads

    def common(self, path: str) -> str:
        """The smallest module that holds the split output of `path` and takes it back together."""
        parent = path
        while "." in parent:
            parent = parent.rpartition(".")[0]
            for other, found in self.sides.items():
                if other.startswith(f"{parent}.") and isinstance(found.input, Shard):
                    return parent
        return path

    def own(self) -> None:
        """Declare vLLM's own values on the two sides of linears and other parallel layers, and of the modules around
        them."""
        linears = {path: Sides() for path, module in self.modules.items() if isinstance(module, LinearBase)}
        for path, found in {**linears, **self.sides, **self.containers}.items():
            raw = f"{path}.raw" if path in self.views else path
            for side in ("input", "output"):
                self.fragments.tree.setdefault(f"{raw}.{side}", self.spread(found, side))

    @staticmethod
    def spread(found: Sides | None, side: Literal["input", "output"]) -> Placed | Refused:
        """How the value on one side of a parallel layer, or of a module around one, is spread."""
        if found is None:
            return COPY if side == "input" else Refused(UNFINISHED)
        if found.rows:
            return Refused(TOKEN_ROWS)
        return node(getattr(found, side), found.axis)

    def admit(self) -> None:
        """Refuse what was found to be otherwise than HuggingFace's, or was never compared."""
        for path, view in self.views.items():
            if self.architecture not in CHECKED and not self.unchecked:
                view.withdraw(UNCHECKED)
                continue
            name = self.hf_name(path)
            if (found := self.containers.get(path, self.sides.get(path))) is not None and found.rows:
                view.withdraw(TOKEN_ROWS)
                continue
            for side in ("input", "output"):
                for part, reason in exceptions(self.architecture, name or "", side).items():
                    view.withdraw(reason, side, part)

    def hf_name(self, path: str) -> str | None:
        """HuggingFace's name of vLLM's module."""
        if path in self.names:
            return self.names[path]
        module = self.modules[path]
        for other in self.names:
            own, _, name = other.rpartition(".")
            holder = self.modules.get(own)
            if holder is not None and holder._modules.get(name) is module:
                return self.names[other]
        return None

    def children(self, path: str) -> dict[str, torch.nn.Module]:
        return {name: child for name, child in self.modules[path]._modules.items() if child is not None}

    def view(self, path: str, module: torch.nn.Module) -> View | None:
        """The view for one module; None for vLLM's own."""
        parent = path.rpartition(".")[0]
        own = path.rpartition(".")[2]
        if path == self.root.path:
            return RootView(path, module, self.interleaver, None)
        if isinstance(module, Elsewhere | PPMissingLayer):
            return None
        if isinstance(module, ParallelLMHead | LogitsProcessor | PartOf | TiedHead):
            return None
        if isinstance(module, VocabParallelEmbedding):
            view = EmbeddingView(path, module, self.interleaver)
            name = self.hf_name(path)
            if name is None or self.original.classes[name] is not torch.nn.Embedding:
                view.refuse("output", "HuggingFace's embedding does more than looking up, vLLM does that elsewhere")
                view.unskippable = "vLLM computes a part of HuggingFace's embedding elsewhere"
            return view
        if isinstance(module, MoERunnerInterface):
            return ExpertsView(path, module, self.interleaver, self.width)
        if isinstance(module, LinearBase):
            return self.linear(path, module)
        if isinstance(module, NORMS):
            return self.norm(path, module)
        if self.is_layer(path):
            return LayerView(path, module, self.interleaver, self.width)
        if self.is_activation(path):
            fused = self.children(parent)["gate_up_proj"]
            gate = next(iter(parts(fused).values()))
            size = gate.width if gate.layout is None else gate.layout.size or gate.width
            return ActivationView(path, module, self.interleaver, node(gate.layout), size)
        name = self.hf_name(path)
        if name is None or not own:
            return None
        if self.is_stack(path):
            return StackView(path, module, self.interleaver, None)
        if self.is_layer(parent):
            if any(isinstance(child, AttentionLayerBase) for child in module.modules()):
                view = AttentionView(path, module, self.interleaver, width=self.width)
                view.gives_weights = self.original.gives_weights
                return view
            if self.original.returns_pair(name):
                return TupleBlockView(path, module, self.interleaver, width=self.width)
            return self.block(path, module)
        if own in ("shared_expert", "shared_experts"):
            return self.block(path, module)
        return None

    def block(self, path: str, module: torch.nn.Module) -> TensorView:
        """A feed-forward block: spread as its last linear's output is."""
        output = self.spread(self.containers[path], "output") if path in self.containers else COPY
        return TensorView(path, module, self.interleaver, output=output, width=self.width)

    def linear(self, path: str, module: torch.nn.Module) -> View:
        parent = path.rpartition(".")[0]
        experts = self.children(parent).get("experts") if parent else None
        name = self.hf_name(path)
        if isinstance(experts, MoERunnerInterface) and name is not None and own_name(path) in ("gate", "router"):
            flat = self.original.flattens(name.rpartition(".")[0])
            return RouterView(path, module, self.interleaver, experts, flat)
        if any(isinstance(part, PartOf) and part.fused == own_name(path) for part in self.children(parent).values()):
            return FusedLinearView(path, module, self.interleaver)
        return LinearView(path, module, self.interleaver)

    def norm(self, path: str, module: torch.nn.Module) -> View:
        """A norm; one over the heads of queries or keys has as many rows per token as there are heads on the rank."""
        parent = path.rpartition(".")[0]
        fused = self.children(parent).get("qkv_proj")
        shard = {"q_norm": "q", "k_norm": "k"}.get(own_name(path))
        size = getattr(fused, "head_size", None)
        if shard is not None and size == module.weight.shape[-1]:  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue, reportOptionalMemberAccess]
            part = parts(fused)[shard]  # type: ignore[arg-type]
            heads = getattr(fused, "total_num_heads" if shard == "q" else "total_num_kv_heads")
            spread = COPY if part.layout is None else Placed(Shard(-2, replicas=replicas(part.layout)))
            return NormView(path, module, self.interleaver, input=spread, output=spread, heads=heads)
        found = Refused(BETWEEN) if parent in self.fragments.between and self.within_split(path) else COPY
        return NormView(path, module, self.interleaver, input=found, output=found)

    def within_split(self, path: str) -> bool:
        """Whether a norm inside an attention block works on values that are split: not before the first split."""
        parent = path.rpartition(".")[0]
        weight = self.modules[path]._parameters.get("weight")
        takers = [
            child
            for name, child in self.children(parent).items()
            if (found := self.sides.get(f"{parent}.{name}")) is not None
            and found.input is None
            and getattr(child, "input_size", None) == (None if weight is None else weight.shape[-1])
        ]
        return not takers

    def part(self, path: str, module: PartOf) -> PartView:
        parent = path.rpartition(".")[0]
        fused = self.views[f"{parent}.{module.fused}"]
        assert isinstance(fused, FusedLinearView)
        return PartView(path, fused.module, self.interleaver, fused, parts(fused.module)[module.shard])

    def head(self) -> None:
        """The head stands around the logits processor."""
        root = self.root.path
        processor = next((p for p, m in self.modules.items() if isinstance(m, LogitsProcessor)), None)
        module = self.modules[root]._modules.get("lm_head")
        if isinstance(module, TiedHead):
            module = next((m for m in self.modules.values() if isinstance(m, VocabParallelEmbedding)), None)
        if processor is None or module is None or isinstance(module, Elsewhere | PPMissingLayer):
            return
        view = HeadView(f"{root}.lm_head", module, self.interleaver, self.modules[processor], root)
        self.views[f"{root}.lm_head"] = self.heads[processor] = view
        for other in self.views.values():
            if type(other) is StackView:
                other.head = view

    def arrange(self) -> None:
        """Tell fused linears in which order HuggingFace runs their parts."""
        for path, view in self.views.items():
            if not isinstance(view, FusedLinearView):
                continue
            parent = path.rpartition(".")[0]
            name = self.hf_name(parent)
            siblings = {
                own_name(p): v
                for p, v in self.views.items()
                if p.rpartition(".")[0] == parent and isinstance(v, TensorView) and v is not view
            }
            own = [v for v in self.views.values() if isinstance(v, PartView) and v.fused is view]
            view.arrange(own, self.original.order(name) if name is not None else [], siblings)

    def restore_order(self) -> None:
        """Tell linears which linears of the same input HuggingFace runs before them; and which of vLLM's modules run
        before others that share their input, and after them in HuggingFace's model."""
        for path, view in self.views.items():
            parent, _, own = path.rpartition(".")
            name = self.hf_name(parent) if parent in self.modules else None
            if isinstance(view, LinearView) and name is not None:
                twins, order = self.original.twins(name), self.original.order(name)
                if own in order and own in twins:
                    for other in order[: order.index(own)]:
                        found = self.views.get(f"{parent}.{other}")
                        if twins.get(other) == twins[own] and isinstance(found, LinearView):
                            view.earlier.append(found)
            if isinstance(view, NormView) and name is not None:
                taker = self.views.get(f"{parent}.{self.original.takers(name).get(own)}")
                view.taken_by = taker if isinstance(taker, LinearView) else None
            if own in ("shared_expert", "shared_experts"):
                for inner, other in self.views.items():
                    if inner == path or inner.startswith(f"{path}."):
                        other.private = True

    def is_layer(self, path: str) -> bool:
        stack, _, number = path.rpartition(".")
        return (
            number.isdigit()
            and isinstance(self.modules.get(stack), torch.nn.ModuleList)
            and self.is_stack(stack.rpartition(".")[0])
        )

    def is_stack(self, path: str) -> bool:
        """Whether the module holds the list of layers."""
        module = self.modules.get(path)
        return module is not None and isinstance(module._modules.get("layers"), torch.nn.ModuleList)

    def is_activation(self, path: str) -> bool:
        parent = path.rpartition(".")[0]
        return own_name(path) == "act_fn" and parent in self.modules and "gate_up_proj" in self.children(parent)


def own_name(path: str) -> str:
    return path.rpartition(".")[2]


def replicas(layout: Shard) -> int:
    """How many consecutive ranks hold the same heads."""
    return layout.replicas if layout.blocks is None else layout.blocks[0].replicas
