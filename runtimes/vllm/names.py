"""HuggingFace's names over vLLM's modules.

The tree that a block is written against is vLLM's, with HuggingFace's names in it: where vLLM fuses linears the parts
are grafted beside the fused one, where vLLM calls a module otherwise HuggingFace's name is a second name of it, and a
module that vLLM does not have at all is a placeholder that says so. None of these holds parameters.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import textwrap
from collections.abc import Iterator

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from vllm.config import ModelConfig

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

    def order(self, name: str) -> list[str]:
        """The children of the module `name` in the order in which its forward calls them."""
        code = source(self.classes[name])
        children = {child.rpartition(".")[2] for child in self.classes if child.rpartition(".")[0] == name}
        return [found for found in dict.fromkeys(re.findall(r"self\.(\w+)\(", code)) if found in children]

    def twins(self, name: str) -> dict[str, str]:
        """The children of the module `name` that are called once, on a plain variable -> the variable's name."""
        calls = re.findall(r"self\.(\w+)\((\w+)\)", inspect.getsource(inspect.unwrap(self.classes[name].forward)))
        return {child: variable for child, variable in calls if f"{name}.{child}" in self.classes}

    def takers(self, name: str) -> dict[str, str]:
        """The children of the module `name` whose output is all that another child is called on -> that child."""
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(self.classes[name].forward))))
        found = {}
        for call in ast.walk(tree):
            outer = called(call)
            inner = called(call.args[0]) if outer and isinstance(call, ast.Call) and call.args else None
            if outer and inner:
                found[inner] = outer
        return found

    def flattens(self, name: str) -> bool:
        """Whether the module `name` gives its children rows without a batch axis."""
        return bool(
            re.search(
                r"\.(view|reshape)\(-1, ",
                source(self.classes[name]).partition("self.gate(")[0].partition("self.router(")[0],
            )
        )

    def returns_pair(self, name: str) -> bool:
        """Whether the module `name` returns a second value beside its rows."""
        return bool(re.search(r"\n    +return \w+, \w+\n", source(self.classes[name]) + "\n"))


def called(node: ast.AST) -> str | None:
    """`name` of a call `self.name(...)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        return node.func.attr if node.func.value.id == "self" else None
    return None


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
