"""HuggingFace's names over vLLM's modules.

The tree that a block is written against is vLLM's, with HuggingFace's names in it: where vLLM fuses linears the parts
are grafted beside the fused one, where vLLM calls a module otherwise HuggingFace's name is a second name of it, and a
module that vLLM does not have at all is a placeholder that says so. None of these holds parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from vllm.config import ModelConfig

from .forwards import Forward
from .parallel import parts


class PartOf(torch.nn.Module):
    """Stands for one of HuggingFace's linears inside a fused one of vLLM's.

    Args:
        fused: The name of the fused linear, a sibling.
        shard: vLLM's name for the part.
    """

    def __init__(self, fused: str, shard: str | int) -> None:
        super().__init__()
        self.fused = fused
        self.shard = shard

    def extra_repr(self) -> str:
        return f"part {self.shard!r} of {self.fused}"


class Absent(torch.nn.Module):
    """Stands for a module of HuggingFace's that vLLM's model does not have."""

    def extra_repr(self) -> str:
        return "not in vLLM's model"


class TiedHead(torch.nn.Module):
    """Stands for HuggingFace's head where vLLM takes the embedding for it."""

    def extra_repr(self) -> str:
        return "the embedding"


class Original:
    """HuggingFace's model of a config, without weights: its names, classes, and the order of its forwards.

    Attributes:
        classes: Name -> class of every module.
        gives_weights: Whether its attention blocks return their weights, as transformers loads it by default.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self.classes = {name: type(module) for name, module in model.named_modules()}
        self.gives_weights = model.config._attn_implementation == "eager"

    @classmethod
    def of(cls, config: ModelConfig) -> Original:
        """The original of what vLLM loads. vLLM rewrites the config that it read, so it is read again."""
        source = config.hf_config_path or config.model
        return cls(
            AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code, revision=config.revision)
        )

    def __contains__(self, name: str) -> bool:
        return name in self.classes

    def __iter__(self) -> Iterator[str]:
        return iter(self.classes)

    def children(self, name: str) -> set[str]:
        return {child.rpartition(".")[2] for child in self.classes if child.rpartition(".")[0] == name}

    def order(self, name: str) -> list[str]:
        """The children of the module `name` in the order in which its forward calls them."""
        children = self.children(name)
        return [child for child in Forward.of(self.classes[name]).order if child in children]

    def twins(self, name: str) -> dict[str, tuple[str, int]]:
        """The children of the module `name` that are called on a plain variable; equal ones are called on the same."""
        children = self.children(name)
        return {child: on for child, on in Forward.of(self.classes[name]).arguments.items() if child in children}

    def takers(self, name: str) -> dict[str, str]:
        """The children of the module `name` whose output is all that another child is called on -> that child."""
        return Forward.of(self.classes[name]).takers

    def flattens(self, name: str) -> bool:
        """Whether the module `name` gives its router rows without a batch axis."""
        return not Forward.of(self.classes[name]).on_rows.isdisjoint(("gate", "router"))

    def returns_pair(self, name: str) -> bool:
        """Whether the module `name` returns a second value beside its rows."""
        return Forward.of(self.classes[name]).returns_pair


def unshare(model: torch.nn.Module) -> None:
    """Give each parent its own copy of a module without parameters that vLLM uses in several (an activation)."""
    seen: set[int] = set()
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is None or any(True for _ in child.parameters()) or child._modules:
                continue
            if id(child) in seen:
                child = parent._modules[name] = copy.copy(child)
            seen.add(id(child))


def graft(model: torch.nn.Module, original: Original) -> None:
    """Give vLLM's module tree HuggingFace's names. The same on every process that builds the tree."""
    unshare(model)
    packed: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in original:
        if not name or name in modules:
            continue
        parent_name, _, own = name.rpartition(".")
        parent = modules.get(parent_name)
        if parent is None or isinstance(parent, Absent | PartOf):
            continue
        module = part(parent, own, packed) or renamed(name, modules, mapper)
        if module is None:
            module = TiedHead() if name == "lm_head" else Absent()
        parent.add_module(own, module)
        modules[name] = module
        for child, found in module.named_modules(remove_duplicate=False):
            if child:
                modules[f"{name}.{child}"] = found


def part(parent: torch.nn.Module, own: str, packed: dict[str, list[str]]) -> PartOf | None:
    """The graft for one of several linears that vLLM fuses in `parent`."""
    for fused, names in packed.items():
        module = parent._modules.get(fused)
        if own in names and module is not None:
            shards = list(parts(module))
            if len(shards) == len(names):
                return PartOf(fused, shards[names.index(own)])
    return None


def renamed(name: str, modules: dict[str, torch.nn.Module], mapper: object) -> torch.nn.Module | None:
    """The module that vLLM has under another name."""
    if mapper is None:
        return None
    for suffix in (".", ".weight"):
        found = mapper.map_name(name + suffix)  # type: ignore[attr-defined]
        if found is not None and found != name + suffix and found.endswith(suffix):
            module = modules.get(found[: -len(suffix)])
            if module is not None:
                return module
    return None
