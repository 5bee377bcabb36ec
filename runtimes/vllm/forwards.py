"""What the source of a module's forward tells: which children it calls, in which order, and on what.

vLLM computes what HuggingFace's forward does with other modules and in another order; HuggingFace's is restored from
the text of its forward. Nothing here runs the module.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter

import torch


class Forward(ast.NodeVisitor):
    """A forward, read in the order in which Python evaluates it; branches one after another.

    Attributes:
        order: The attributes of `self` that it calls, by their first call.
        arguments: Those that it calls on one plain variable -> which: its name, and how often it was assigned before.
        takers: Those whose output is the first argument of another one's call -> that other one.
        on_rows: Those that it calls after it has flattened something to rows (`x.view(-1, width)`).
        returns_pair: Whether it returns two values.
    """

    def __init__(self, tree: ast.AST) -> None:
        self.order: list[str] = []
        self.arguments: dict[str, tuple[str, int]] = {}
        self.takers: dict[str, str] = {}
        self.on_rows: set[str] = set()
        self.returns_pair = False
        self._assigned: Counter[str] = Counter()
        self._flattened = False
        self.visit(tree)

    @classmethod
    def of(cls, kind: type[torch.nn.Module]) -> Forward:
        """The forward of a class, without what decorates it.

        Raises:
            OSError: Its source cannot be had.
        """
        return _read(inspect.unwrap(kind.forward))

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = own(node)
        if name is None:
            self._flattened |= flattens(node)
            return
        if name not in self.order:
            self.order.append(name)
            if self._flattened:
                self.on_rows.add(name)
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Name) and len(node.args) == 1 and not node.keywords:
            self.arguments[name] = first.id, self._assigned[first.id]
        inner = None if first is None else own(first)
        if inner is not None:
            self.takers[inner] = name

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._assigned.update(found.id for found in ast.walk(target) if isinstance(found, ast.Name))

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        self.returns_pair |= isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2


@functools.cache
def _read(forward: object) -> Forward:
    return Forward(ast.parse(textwrap.dedent(inspect.getsource(forward))))  # type: ignore[arg-type]


def own(node: ast.AST) -> str | None:
    """`name` of a call `self.name(...)`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
        return node.func.attr if node.func.value.id == "self" else None
    return None


def flattens(node: ast.Call) -> bool:
    """Whether a call is `x.view(-1, width)` or `x.reshape(-1, width)`."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in ("view", "reshape") or len(node.args) != 2:
        return False
    first = node.args[0]
    return isinstance(first, ast.UnaryOp) and isinstance(first.op, ast.USub) and ast.unparse(first) == "-1"


__all__ = ["Forward"]
