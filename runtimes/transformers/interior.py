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
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging

from boundary.collectives import CollectiveError, Group
from interleave import nnsight_port as port
from interleave.fragments import Placed, Refused, Tree, branch
from interleave.groups import passing_groups
from interleave.layout import Layout, Partial, Shard, Whole, assemble

from .fragments import TransformersFragments
from .plan import pattern
from .wrapper import installed, tap_outside

#: Two lengths, so that a dim that happens to equal the length is told from one that does not.
LENGTHS = (5, 7)
#: What two float32 computations of one value may differ by, relative to the largest element.
TOLERANCE = 1e-5
UNDECIDED = "no layout, or more than one, reproduced the single-process value on a small model of this kind"

#: (model class, config, degree) -> location pattern -> tree. The twin runs once per process and kind of model.
_DECIDED: dict[tuple[str, str, int], dict[str, Tree]] = {}


def decide(model: Any, fragments: TransformersFragments) -> None:
    """Give what lies between a split output and a split input its layouts, or leave it refused.

    That is: the modules there, the operations of the forwards around them (`.source`), and attention weights.
    Every rank must call it.

    Args:
        model: The root envoy, on ranks.
        fragments: Where the layouts go; it has settled.
    """
    parents = fragments.parents()
    if not parents:
        return
    group = fragments.groups["tp"]
    small = shrunken(model._module.config, group.size)
    kind = (type(model._module).__qualname__, json.dumps(small.to_dict(), sort_keys=True, default=str), group.size)
    if kind not in _DECIDED:
        wanted = {pattern(path.removeprefix(f"{model.path}.")) for path in parents}
        try:
            with passing_groups():
                _DECIDED[kind] = compare(type(model._module), small, wanted, group)
        except CollectiveError:
            raise
        except Exception as error:
            # A model that cannot be shrunk this way is no worse off than one whose layouts stay undecided. The ranks
            # build the same twin, so it fails on all of them or on none.
            warnings.warn(
                f"values inside sharded forwards stay refused: the small model failed ({error})", stacklevel=2
            )
            _DECIDED[kind] = {}
    decided = _DECIDED[kind]
    for envoy in model.modules():
        prefix = pattern(envoy.path.removeprefix(f"{model.path}."))
        if envoy.path in fragments.boundaries or envoy.path not in fragments.interior:
            continue
        for location, tree in decided.items():
            module, _, rest = location.partition("/")
            if module == prefix and (rest == "output" or envoy.path not in parents or "." in rest):
                fragments.tree[f"{envoy.path}.{rest}"] = tree
    spread_weights(model, fragments)


def spread_weights(model: Any, fragments: TransformersFragments) -> None:
    """A model's `attentions` are its attention modules' weights: they have their layout, if that is one."""
    nodes = [branch(fragments.tree.get(f"{path}.output"), 1) for path in fragments.weighing]
    if nodes and all(node == nodes[0] for node in nodes):
        tree = None if nodes[0] is None else {"attentions": nodes[0]}
        for location in fragments.outputs:
            fragments.tree[location] = tree


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


def compare(cls: type, config: Any, wanted: set[str], group: Group) -> dict[str, Tree]:
    """Run the twin on one process and across `group`, and find the layout of everything below `wanted`.

    Args:
        cls: The model's class.
        config: The shrunken config.
        wanted: Patterns of the modules that hold both a split output and a split input.
        group: The ranks; all of them call.

    Returns:
        `"{module pattern}/{side}"` - the side is `input`, `output` or `source.{operation}.input` and so on - and
        the tree there: None for whole, a refusal where undecided.
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
    device = next(spread.parameters()).device
    alone.to(device)
    found: dict[str, list[Tree]] = {}
    truth, piece = Witness(alone, wanted), Witness(spread, wanted)
    for length in LENGTHS:
        ids = torch.arange(2 * length).reshape(2, length) % (config.get_text_config().vocab_size - 2) + 2
        truths, pieces = truth.run(ids.to(device)), piece.run(ids.to(device))
        for location in sorted(truths.keys() & pieces.keys()):
            verdict = verdict_of(truths[location], pieces[location], group, f"twin/{length}/{location}")
            module, _, side = location.partition("/")
            found.setdefault(f"{pattern(module)}/{side}", []).append(verdict)
    return {location: merged(verdicts) for location, verdicts in found.items()}


class Witness(port.Interleaver):
    """Sees every value that one forward of a model brings to the locations below some of its modules.

    Args:
        model: A twin, alone or spread.
        wanted: Patterns of modules.
    """

    def __init__(self, model: torch.nn.Module, wanted: set[str]) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}
        self.model = model
        for module in model.modules():
            if (wrapper := installed(module)) is not None:
                tap_outside(module, wrapper)
        self.tree = port.Envoy(model, interleaver=self)
        self.below: list[str] = []
        for envoy in self.tree.modules():
            name = pattern(envoy.path.removeprefix(f"{self.tree.path}."))
            if name in wanted:
                self.below.append(f"{envoy.path}.")
            if f"{name}.".startswith(tuple(f"{parent}." for parent in wanted)) and not is_wrapped(envoy._module):
                with suppress(port.SourceNotAvailable):
                    port.install_source(envoy)

    def run(self, ids: torch.Tensor) -> dict[str, Any]:
        """One forward; `"{module}/{side}"` -> the first value there, copied."""
        self.seen = {}
        self.interleaving = self.busy = True
        try:
            with torch.no_grad():
                self.model(input_ids=ids, use_cache=True)
        finally:
            self.interleaving = self.busy = False
        return self.seen

    def handle(self, provider: str, value: Any) -> Any:
        if value is not port.NO_SKIP and provider.startswith(tuple(self.below)):
            path = provider.removeprefix(f"{self.tree.path}.")
            if ".source." in path:
                module, _, operation = path.partition(".source.")
                location = f"{module}/source.{operation}"
            else:
                module, _, side = path.rpartition(".")
                location = f"{module}/{side}"
            self.seen.setdefault(location, port.apply(value, lambda t: t.detach().clone(), torch.Tensor))
        return value


def is_wrapped(module: torch.nn.Module) -> bool:
    """Whether transformers put a wrapper around the module's forward."""
    wrapper = installed(module)
    return wrapper is not None and wrapper.own is not None


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


def verdict_of(truth: Any, piece: Any, group: Group, key: str) -> Tree:
    """The layout under which the ranks' pieces give the truth, shaped like the value."""
    if isinstance(truth, torch.Tensor) and isinstance(piece, torch.Tensor):
        return layout_of(truth, piece, group, key)
    if isinstance(truth, list | tuple) and isinstance(piece, list | tuple):
        return tuple(verdict_of(t, p, group, f"{key}/{i}") for i, (t, p) in enumerate(zip(truth, piece, strict=False)))
    if isinstance(truth, dict) and isinstance(piece, dict):
        return {name: verdict_of(truth[name], piece[name], group, f"{key}/{name}") for name in truth if name in piece}
    if isinstance(truth, int | float | str) and truth != piece:
        return Refused(UNDECIDED)
    return None


def layout_of(truth: torch.Tensor, piece: torch.Tensor, group: Group, key: str) -> Placed | Refused | None:
    """The one layout that reproduces `truth` on every rank, or a refusal."""
    fitting: list[Layout] = []
    for number, layout in enumerate(candidates(truth, piece, group.size)):
        whole = assemble(piece.contiguous(), layout, group, f"{key}?{number}")
        fits = whole.shape == truth.shape and close(whole, truth)
        # One rank's rounding must not decide for itself alone: the ranks count their votes.
        votes = group.all_reduce(torch.tensor([float(fits)], device=truth.device), f"{key}?{number}/votes")
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
        if truth.is_floating_point() and truth.dim():
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
