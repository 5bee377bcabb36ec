"""Layouts between a split output and a split input: a twin proposes, numbers decide.

Between the modules that a plan names nothing labels a value: an activation function sees this rank's columns, a norm
over heads this rank's heads. Reading the model's code would be guessing, and equal shape is no evidence (one term of
a sum has the whole's shape). So the question is put to the model itself: a shrunken random model of the same class and
kind of config - the twin - runs once on one process and once across the ranks, on two lengths of input. Of all layouts
that the shapes allow, the one under which the ranks' pieces reproduce the single process's value is the location's
layout. If none does, or several do, the location stays refused.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from boundary.collectives import Group
from interleave.fragments import Placed, Refused, Tree, branch
from interleave.layout import Layout, Partial, Shard, Whole, assemble

from .fragments import TransformersFragments
from .plan import pattern

#: Two lengths, so that a dim that happens to equal the length is told from one that does not.
LENGTHS = (5, 7)
#: What two float32 computations of one value may differ by, relative to the largest element.
TOLERANCE = 1e-5
UNDECIDED = "no layout, or more than one, reproduced the single-process value on a small model of this kind"

#: (model class, config, degree) -> location pattern -> tree. The twin runs once per process and kind of model.
_DECIDED: dict[tuple[str, str, int], dict[str, Tree]] = {}


def decide(model: Any, fragments: TransformersFragments) -> None:
    """Give every module between a split output and a split input its layouts, or leave it refused.

    Every rank must call it.

    Args:
        model: The root envoy, on ranks.
        fragments: Where the layouts go; it has settled.
    """
    paths = [*fragments.between(), *fragments.weighing]
    if not paths:
        return
    names = {path: path.removeprefix(f"{model.path}.") for path in paths}
    group = fragments.groups["tp"]
    small = shrunken(model._module.config, group.size)
    kind = (
        type(model._module).__qualname__,
        json.dumps(small.to_dict(), sort_keys=True, default=str),
        group.size,
    )
    if kind not in _DECIDED:
        wanted = sorted({pattern(name) for name in names.values()})
        _DECIDED[kind] = compare(type(model._module), small, wanted, group)
    verdicts = {
        path: {side: _DECIDED[kind].get(f"{pattern(name)}.{side}", Refused(UNDECIDED)) for side in ("input", "output")}
        for path, name in names.items()
    }
    for path in fragments.between():
        for side, tree in verdicts[path].items():
            fragments.decided(f"{path}.{side}", tree)
    weights = [branch(verdicts[path]["output"], 1) for path in fragments.weighing]
    for path, node in zip(fragments.weighing, weights, strict=True):
        if branch(verdicts[path]["output"], 0) is None:
            fragments.decided(f"{path}.output", None if node is None else (None, node))
    if weights and all(node == weights[0] for node in weights):
        tree = None if weights[0] is None else {"attentions": weights[0]}
        for location in ("result", f"{model.path}.output", f"{base_path(model)}.output"):
            fragments.decided(location, tree)


def base_path(model: Any) -> str:
    """The path of the base model under a model with a head."""
    return f"{model.path}.{model._module.base_model_prefix}"


def shrunken(config: Any, degree: int) -> Any:
    """A config of the same kind, small: few layers, few and narrow heads, all of them multiples of `degree`.

    The number of query heads per key-value head is kept, since it decides how heads are dealt.
    """
    small = copy.deepcopy(config)
    small.distributed_config = None
    small._attn_implementation = "eager"  # the one that gives its weights
    text = small.get_text_config()
    queries = getattr(text, "num_attention_heads", None)
    keys = getattr(text, "num_key_value_heads", None) or queries
    depth = min(getattr(text, "num_hidden_layers", 2), 2)
    text.num_hidden_layers = depth
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[:depth]
    if queries:
        ratio = queries // keys
        text.num_attention_heads = 2 * degree * ratio
        if getattr(text, "num_key_value_heads", None):
            text.num_key_value_heads = 2 * degree
        if getattr(text, "head_dim", None):
            text.head_dim = 8
        text.hidden_size = text.num_attention_heads * 8
    for field, size in (("intermediate_size", 10 * degree), ("vocab_size", 16 * degree)):
        if getattr(text, field, None):
            setattr(text, field, size)
    for field in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(text, field, None), int):
            setattr(text, field, 1)
    return small


def compare(cls: type, config: Any, wanted: list[str], group: Group) -> dict[str, Tree]:
    """Run the twin on one process and across `group`, and find each location's layout.

    Args:
        cls: The model's class.
        config: The shrunken config.
        wanted: Module name patterns.
        group: The ranks; all of them call.

    Returns:
        `"{pattern}.input"` and `"{pattern}.output"` -> the tree; None for whole; a refusal where undecided.
    """
    with torch.random.fork_rng(), quiet():
        torch.manual_seed(0)
        alone = cls(copy.deepcopy(config)).to(torch.float32).eval()  # type: ignore[call-arg]
        stir(alone)
        spread = cls.from_pretrained(  # type: ignore[attr-defined]
            None,
            config=copy.deepcopy(config),
            state_dict=alone.state_dict(),
            dtype=torch.float32,
            distributed_config=DistributedConfig(tp_size=group.size),
        ).eval()
    verdicts: dict[str, list[Any]] = {}
    with torch.no_grad():
        for length in LENGTHS:
            ids = torch.arange(2 * length).reshape(2, length) % (config.get_text_config().vocab_size - 2) + 2
            truths, pieces = observe(alone, wanted, ids), observe(spread, wanted, ids)
            for location in sorted(set(truths) & set(pieces)):
                verdict = verdict_of(truths[location], pieces[location], group, f"twin/{length}/{location}")
                verdicts.setdefault(generic(location), []).append(verdict)
    decided: dict[str, Tree] = {}
    for location, found in verdicts.items():
        decided[location] = merged(found)
    return decided


def stir(model: torch.nn.Module) -> None:
    """Make every parameter matter: a fresh model's biases are zero and its norms one, which hides a wrong layout."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and remarks: the twin is nobody's model."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def generic(location: str) -> str:
    """A location with its layer numbers as `*`."""
    name, _, side = location.rpartition(".")
    return f"{pattern(name)}.{side}"


def observe(model: torch.nn.Module, wanted: list[str], ids: torch.Tensor) -> dict[str, Any]:
    """What the wanted modules take and give in one forward: location -> value, from outside any wrapper."""
    seen: dict[str, Any] = {}
    handles = []
    for name, module in model.named_modules():
        if pattern(name) not in wanted:
            continue

        def look(_: Any, args: tuple, kwargs: dict, output: Any, name: str = name) -> None:
            seen.setdefault(f"{name}.input", detached((args, kwargs)))
            seen.setdefault(f"{name}.output", detached(output))

        handles.append(module.register_forward_hook(look, with_kwargs=True))
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def detached(value: Any) -> Any:
    from interleave.nnsight_port import apply

    return apply(value, lambda tensor: tensor.detach().clone(), torch.Tensor)


def verdict_of(truth: Any, piece: Any, group: Group, key: str) -> Tree:
    """The layout under which the ranks' pieces give the truth, shaped like the value.

    A single node for a value of one kind; a tuple or dict where leaves differ.
    """
    if isinstance(truth, torch.Tensor) and isinstance(piece, torch.Tensor):
        return layout_of(truth, piece, group, key)
    if isinstance(truth, list | tuple) and isinstance(piece, list | tuple):
        return tuple(verdict_of(t, p, group, f"{key}/{i}") for i, (t, p) in enumerate(zip(truth, piece, strict=False)))
    if isinstance(truth, dict) and isinstance(piece, dict):
        return {name: verdict_of(truth[name], piece[name], group, f"{key}/{name}") for name in truth if name in piece}
    return None


def layout_of(truth: torch.Tensor, piece: torch.Tensor, group: Group, key: str) -> Placed | Refused | None:
    """The one layout that reproduces `truth` on every rank, or a refusal."""
    fitting: list[Layout] = []
    for number, layout in enumerate(candidates(truth, piece, group.size)):
        whole = assemble(piece.contiguous(), layout, group, f"{key}?{number}")
        fits = whole.shape == truth.shape and close(whole, truth)
        # One rank's rounding must not decide for itself alone: the ranks count their votes.
        votes = group.all_reduce(torch.tensor([float(fits)]), f"{key}?{number}/votes")
        if votes.item() == group.size:
            fitting.append(layout)
    if len(fitting) != 1:
        return Refused(UNDECIDED)
    return None if isinstance(fitting[0], Whole) else Placed(fitting[0])


def candidates(truth: torch.Tensor, piece: torch.Tensor, degree: int) -> Iterator[Layout]:
    """Every layout that the two shapes allow. The ranks see the same shapes, so they try the same ones."""
    if truth.dim() != piece.dim():
        return
    if truth.shape == piece.shape:
        yield Whole()
        if truth.is_floating_point():
            yield Partial()
        return
    differing = [dim for dim in range(truth.dim()) if truth.shape[dim] != piece.shape[dim]]
    if len(differing) != 1:
        return
    dim = differing[0] - truth.dim()
    replicas, rest = divmod(piece.shape[dim] * degree, truth.shape[dim])
    if rest == 0 and replicas >= 1 and degree % replicas == 0:
        yield Shard(dim, replicas=replicas)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = b.abs().max().item() or 1.0
    return bool((a - b).abs().max().item() <= TOLERANCE * scale)


def merged(found: list[Any]) -> Tree:
    """One verdict for all layers and lengths; a refusal unless they agree."""
    first = found[0]
    if all(other == first for other in found[1:]):
        return simplified(first)
    return Refused(UNDECIDED)


def simplified(tree: Any) -> Tree:
    """None instead of a container of nothing but wholes."""
    if isinstance(tree, Placed | Refused) or tree is None:
        return tree
    if isinstance(tree, tuple):
        parts = tuple(simplified(node) for node in tree)
        return parts if any(part is not None for part in parts) else None
    parts = {key: simplified(node) for key, node in tree.items()}
    return parts if any(part is not None for part in parts.values()) else None
