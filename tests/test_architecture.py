"""Dependencies run one way: `runtimes -> interleave -> the collectives of boundary`, and `boundary` stands alone.

The arrows are read off the sources (imports inside functions too), so that nothing needs to be importable.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NNSIGHT_PORT = "interleave.nnsight_port"
#: nnsight's vLLM part, which cannot be imported without vLLM.
VLLM_PORT = "runtimes.vllm.nnsight_port"

# The leaf that both packages stand on: the collectives, and what carries some of them.
LEAF = ("boundary.collectives", "boundary.sockets", "boundary.shared_memory", "boundary.compiled")

# What a package, or the more specific of its parts, may not import. A longer name overrides a shorter one.
FORBIDDEN = {
    "boundary": ("interleave", "runtimes", "nnsight", "transformers"),
    "boundary.collectives": ("interleave", "runtimes", "nnsight", "transformers", "boundary"),
    "boundary.sockets": ("interleave", "runtimes", "nnsight", "transformers", "boundary"),
    "boundary.shared_memory": ("interleave", "runtimes", "nnsight", "transformers", "boundary"),
    "boundary.compiled": ("interleave", "runtimes", "nnsight", "transformers", "boundary"),
    "interleave": ("runtimes", "boundary"),
    "runtimes": ("boundary", "nnsight"),
    "runtimes.native": ("nnsight",),
    VLLM_PORT: ("boundary",),
}
ALLOWED = {
    "boundary.collectives": ("boundary.sockets", "boundary.shared_memory", "boundary.compiled"),
    "boundary.shared_memory": ("boundary.sockets", "boundary.compiled"),
    "interleave": LEAF,
    "runtimes": LEAF,
}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def modules() -> Iterator[tuple[str, ast.Module]]:
    for package in ("boundary", "interleave", "runtimes"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            yield name, ast.parse(path.read_text(), filename=str(path))


def imports(module: str, tree: ast.Module, is_package: bool) -> Iterator[tuple[int, str]]:
    """Every name that `module` imports, in full: `from . import x` in `a.b` is `a.x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                parents = module.split(".")
                base = parents[: len(parents) - node.level + is_package]
                source = ".".join(base + ([source] if source else []))
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def violations(module: str, tree: ast.Module, is_package: bool = False) -> list[str]:
    rule = max((package for package in FORBIDDEN if within(module, package)), key=len)
    allowed = ALLOWED.get(rule, ())
    found = []
    for line, name in imports(module, tree, is_package):
        forbidden = any(within(name, package) for package in FORBIDDEN[rule])
        if forbidden and not any(within(name, package) for package in allowed):
            found.append(f"{module}:{line} imports {name}")
        if within(name, "nnsight") and within(module, "interleave") and module != NNSIGHT_PORT:
            found.append(f"{module}:{line} imports {name} past {NNSIGHT_PORT}")
        if within(name, "nnsight.modeling.tp"):
            found.append(f"{module}:{line} imports {name}, which moves between transformers' releases")
    return found


def test_no_module_imports_against_the_arrows():
    found = [
        violation
        for module, tree in modules()
        for violation in violations(module, tree, (ROOT / module.replace(".", "/")).is_dir())
    ]
    assert found == []


def test_all_three_packages_are_looked_at():
    names = [module for module, _ in modules()]
    for module in ("boundary.collectives", "interleave.load", NNSIGHT_PORT, "runtimes.transformers.smollm2"):
        assert module in names


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("boundary.ops", "import transformers"),
        ("boundary.ops", "def f():\n    from interleave.layout import cut"),
        ("boundary.collectives", "from .ops import x"),
        ("interleave.layout", "from boundary.ops import x"),
        ("interleave.layout", "from boundary import ops"),
        ("interleave.load", "from runtimes import transformers"),
        ("interleave.load", "from nnsight import save"),
        ("interleave.ranks.rank", "import nnsight.intervention.envoy as e"),
        (NNSIGHT_PORT, "from nnsight.modeling.tp import TPFragments"),
        ("runtimes.transformers.load", "from boundary.ops import x"),
        ("runtimes.transformers.load", "from nnsight import save"),
    ],
)
def test_an_import_against_the_arrows_is_found(module: str, source: str):
    assert len(violations(module, ast.parse(source))) >= 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("interleave.layout", "from boundary.collectives import Group"),
        ("interleave.load", "from .ranks import start"),
        ("interleave.ranks.rank", "from ..load import LoadRequest"),
        ("runtimes.native.engine", "from boundary.ops import x"),
        (
            "runtimes.transformers.load",
            "from interleave.layout import Shard\nfrom transformers import AutoConfig",
        ),
        (NNSIGHT_PORT, "from nnsight import save"),
    ],
)
def test_an_import_along_the_arrows_passes(module: str, source: str):
    assert violations(module, ast.parse(source)) == []
