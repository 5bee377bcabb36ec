"""HuggingFace's names over vLLM's modules.

The tree that a block is written against is vLLM's, with HuggingFace's names in it: where vLLM fuses linears the parts
are grafted beside the fused one, where vLLM calls a module otherwise HuggingFace's name is a second name of it, and a
module that vLLM does not have at all is a placeholder that says so. None of these holds parameters.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

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


class Original:
    """HuggingFace's model of a config, without weights: its names, classes, and the order of its forwards."""

    def __init__(self, config: PretrainedConfig) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        self.classes = {name: type(module) for name, module in model.named_modules()}

    def __contains__(self, name: str) -> bool:
        return name in self.classes

    def __iter__(self) -> Iterator[str]:
        return iter(self.classes)

    def order(self, name: str) -> list[str]:
        """The children of the module `name` in the order in which its forward calls them."""
        code = source(self.classes[name])
        children = {child.rpartition(".")[2] for child in self.classes if child.rpartition(".")[0] == name}
        return [found for found in dict.fromkeys(re.findall(r"self\.(\w+)\(", code)) if found in children]

    def flattens(self, name: str) -> bool:
        """Whether the module `name` gives its children rows without a batch axis."""
        return bool(re.search(r"\.(view|reshape)\(-1, ", source(self.classes[name]).partition("self.gate(")[0].partition("self.router(")[0]))

    def returns_pair(self, name: str) -> bool:
        """Whether the module `name` returns a second value beside its rows."""
        return bool(re.search(r"\n    +return \w+, \w+\n", source(self.classes[name]) + "\n"))


def source(kind: type[torch.nn.Module]) -> str:
    """The text of the class's forward, comments left out."""
    forward = inspect.unwrap(kind.forward)
    text = inspect.getsource(forward)
    # `a(b(x))` calls b first: innermost calls are to come first, so nested calls are turned inside out.
    return "\n".join(inside_out(line.partition("#")[0]) for line in text.splitlines())


def inside_out(line: str) -> str:
    """`line` with the modules that it calls in the order of evaluation."""
    calls = [(match.start(), match.group(0)) for match in re.finditer(r"self\.\w+\(", line)]
    if len(calls) < 2:
        return line
    depth, ended = 0, []
    open_at: list[tuple[int, str]] = []
    starts = {start + len(text) - 1: text for start, text in calls}
    for place, letter in enumerate(line):
        if letter == "(":
            depth += 1
            if place in starts:
                open_at.append((depth, starts[place]))
        elif letter == ")":
            if open_at and open_at[-1][0] == depth:
                ended.append(open_at.pop()[1])
            depth -= 1
    return " ".join([*ended, *(text for _, text in reversed(open_at))]) + line if not ended else " ".join(ended)


def graft(model: torch.nn.Module, original: Original) -> None:
    """Give vLLM's module tree HuggingFace's names. The same on every process that builds the tree."""
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
        module = part(parent, own, packed) or renamed(name, modules, mapper) or Absent()
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
