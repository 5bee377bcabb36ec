"""The blocks that are run on one process and on every rank: reads, edits, skips, calls, caches, gradients.

An operation plays its blocks on whatever traceable model it is given and returns a log: what it saw, under
names that depend on the plan alone. A refusal (`UnknownLayout`) is noted where it is raised and the block
goes on, as a user's `try` would; anything else that is raised ends the trace and is noted under every name
the trace left open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from interleave.errors import UnknownLayout
from interleave.nnsight_port import SourceNotAvailable

from .plan import Plan, Spot, Visit, copied, fetch, kept, leaves, mapped, pattern, replaced

Log = dict[str, Any]


@dataclass(frozen=True)
class Refused:
    """Noted instead of a value: the access raised `UnknownLayout`."""

    message: str


@dataclass(frozen=True)
class Failed:
    """Noted instead of a value: something else was raised, there or earlier in the same trace."""

    message: str


@contextmanager
def refusals(log: Log, *names: str) -> Iterator[None]:
    """Note a refusal under each of `names` that has no value yet, and let the block go on."""
    try:
        yield
    except UnknownLayout as error:
        log.update({name: Refused(str(error)) for name in names if name not in log})


@contextmanager
def ended(log: Log, names: Iterable[str]) -> Iterator[None]:
    """Around a trace: note how it ended under each of `names` that it left without a value."""
    outcome: Refused | Failed = Failed("the block never came to it")
    try:
        yield
    except UnknownLayout as error:
        outcome = Refused(str(error))
    except Exception as error:
        outcome = Failed(f"{type(error).__name__}: {str(error).strip()[:600]}")
    log.update({name: outcome for name in names if name not in log})


def play(model: Any, inputs: dict[str, Any], block: Callable[[Any], None]) -> None:
    """Run `block(tracer)` as the block of one trace."""
    with model.trace(**copied(inputs)) as tracer:
        block(tracer)


def envoy_of(model: Any, module: str) -> Any:
    """The envoy at `module`, a path that starts with the root's own name."""
    below = module.partition(".")[2]
    return model.get(below) if below else model


def value_at(model: Any, visit: Visit) -> Any:
    """What a block reads there: `.inputs` or `.output`."""
    envoy = envoy_of(model, visit.module)
    return envoy.inputs if visit.side == "input" else envoy.output


def used(leaf: Any) -> Any:
    """The leaf itself. Raises `UnknownLayout` for a stand-in, which does so when it is used, not when it is
    got."""
    getattr(leaf, "shape", None)
    return leaf


def leaf_at(value: Any, spot: Spot) -> Any:
    """The leaf of `value` at `spot`. Raises `UnknownLayout` if it is withheld."""
    return used(fetch(value, spot.path))


def logits_of(model: Any, plan: Plan) -> torch.Tensor:
    """The logits of a run without a trace."""
    return model._module(**copied(plan.inputs)).logits


# -- reading -------------------------------------------------------------------------------------------------


def read(model: Any, plan: Plan) -> Log:
    """Every leaf of every visit in one trace, and whether the logits are bit for bit those of an unwatched
    run."""
    log: Log = {}
    watched: list[torch.Tensor] = []

    def block(tracer: Any) -> None:
        for visit in plan.visits:
            with refusals(log, *(spot.name for spot in visit.spots)):
                value = value_at(model, visit)
                for spot in visit.spots:
                    with refusals(log, spot.name):
                        log[spot.name] = kept(leaf_at(value, spot))
        watched.append(tracer.result.logits)

    unchanged = "the logits are those of an unwatched run"
    with ended(log, [*(spot.name for _, spot in plan.spots()), unchanged]):
        play(model, plan.inputs, block)
        log[unchanged] = torch.equal(watched[0], logits_of(model, plan))
    return log


def cache(model: Any, plan: Plan) -> Log:
    """Every leaf of every visit, as `tracer.cache` kept it."""
    log: Log = {}
    views: list[Any] = []

    def block(tracer: Any) -> None:
        views.append(tracer.cache(include_inputs=True))

    with ended(log, [spot.name for _, spot in plan.spots()]):
        play(model, plan.inputs, block)
        for visit in plan.visits:
            with refusals(log, *(spot.name for spot in visit.spots)):
                entry = views[0][visit.module]
                value = entry.inputs if visit.side == "input" else entry.output
                for spot in visit.spots:
                    with refusals(log, spot.name):
                        log[spot.name] = kept(leaf_at(value, spot))
    return log


def source(model: Any, plan: Plan) -> Log:
    """The output of every operation in every module's forward, and the logits when it is altered."""
    log: Log = {}
    for visit in plan.visits:
        if visit.side == "output":
            try:
                operations = envoy_of(model, visit.module).source.names
            except SourceNotAvailable:
                continue
            for operation in operations:
                read_operation(log, model, plan, visit.module, operation)
                alter_operation(log, model, plan, visit.module, operation)
    return log


def read_operation(log: Log, model: Any, plan: Plan, module: str, operation: str) -> None:
    """Note the leaves of one operation's output, each under its place in it."""
    name = f"{module}.source.{operation}.output"

    def block(tracer: Any) -> None:
        value = getattr(envoy_of(model, module).source, operation).output
        found: Log = {}
        for way, leaf in leaves(value):
            place = "".join(str(step) for step in way)
            with refusals(found, place):
                found[place] = kept(used(leaf))
        log[name] = found

    with ended(log, [name]):
        play(model, plan.inputs, block)


def alter_operation(log: Log, model: Any, plan: Plan, module: str, operation: str) -> None:
    """Note the logits of a run in which every tensor that the operation returns is altered."""

    def change() -> None:
        node = getattr(envoy_of(model, module).source, operation)
        value = node.output
        for _, leaf in leaves(value):
            used(leaf)
        node.output = mapped(value, lambda leaf: altered(leaf, None))

    edit(log, f"{module}.source.{operation}.output = ...", model, plan, change)


# -- editing: every name is an edit, every value the logits that it leads to ---------------------------------


def write(model: Any, plan: Plan) -> Log:
    """Each leaf of each visit replaced by an altered copy, and each edited in place; one trace an edit."""
    log: Log = {}
    for visit, spot in plan.spots():
        if not spot.writable:
            continue
        edit(log, f"{spot.name} = ...", model, plan, lambda v=visit, s=spot: replace_leaf(model, v, s))
        edit(log, f"{spot.name}[..., :k] = c", model, plan, lambda v=visit, s=spot: fill_leaf(model, v, s))
    return log


def skip(model: Any, plan: Plan) -> Log:
    """Each module skipped, a drawn value taking its output's place; one trace a module."""
    log: Log = {}
    for visit in plan.visits:
        if visit.side == "output" and not isinstance(visit.substitute, str):
            substitute = mapped(visit.substitute, torch.Tensor.clone)
            envoy = envoy_of(model, visit.module)
            edit(log, f"{visit.module}.skip", model, plan, lambda e=envoy, s=substitute: e.skip(s))
    return log


def edit(log: Log, name: str, model: Any, plan: Plan, change: Callable[[], None]) -> None:
    """Note under `name` the logits of a run in which the block makes one `change`."""

    def block(tracer: Any) -> None:
        change()
        log[name] = kept(tracer.result.logits)

    with ended(log, [name]):
        play(model, plan.inputs, block)


def replace_leaf(model: Any, visit: Visit, spot: Spot) -> None:
    value = value_at(model, visit)
    new = replaced(value, spot.path, altered(leaf_at(value, spot), spot.scale))
    envoy = envoy_of(model, visit.module)
    if visit.side == "input":
        envoy.inputs = new
    else:
        envoy.output = new


def fill_leaf(model: Any, visit: Visit, spot: Spot) -> None:
    leaf = leaf_at(value_at(model, visit), spot)
    # Just over half of the dim: the filled part ends inside a rank's piece at every degree.
    half = leaf.shape[-1] // 2 + 1
    leaf[..., :half] = 1.5 * (spot.scale or 1.0) if leaf.dtype.is_floating_point else 3


def altered(tensor: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Another tensor of the same kind: scaled, and moved by another amount at every position."""
    if not tensor.dtype.is_floating_point:
        return tensor.flip(-1)
    return tensor * 1.5 + 0.25 * (scale or 1.0) * pattern(tensor.shape)


# -- calling -------------------------------------------------------------------------------------------------


def call(model: Any, plan: Plan) -> Log:
    """Each module called ad hoc: while its own visit is open, and after the run with altered inputs.

    Between the two the module's own output is read, and at the end the logits: no call may have moved them.
    """
    log: Log = {}
    outputs = {visit.module: visit for visit in plan.visits if visit.side == "output"}

    def names(module: str, when: str) -> list[str]:
        return [f"{spot.name} {when}" for spot in outputs[module].spots]

    def note(module: str, when: str, value: Any) -> None:
        for spot, name in zip(outputs[module].spots, names(module, when), strict=True):
            with refusals(log, name):
                log[name] = kept(leaf_at(value, spot))

    def block(tracer: Any) -> None:
        inputs: dict[str, tuple[Any, Any]] = {}
        for visit in plan.visits:
            module = visit.module
            if visit.side == "output":
                with refusals(log, *names(module, "after a call of it")):
                    note(module, "after a call of it", value_at(model, visit))
                continue
            with refusals(log, *names(module, "called in its visit"), *names(module, "called after the run")):
                args, kwargs = value_at(model, visit)
                inputs[module] = mapped((args, kwargs), lambda leaf: altered(leaf, None))
                note(module, "called in its visit", envoy_of(model, module)(*args, **kwargs))
        log["the logits after the calls"] = kept(tracer.result.logits)
        for module, (args, kwargs) in inputs.items():
            with refusals(log, *names(module, "called after the run")):
                note(module, "called after the run", envoy_of(model, module)(*args, **kwargs))

    every = [name for module in outputs for when in CALLS for name in names(module, when)]
    with ended(log, [*every, "the logits after the calls"]):
        play(model, plan.inputs, block)
    return log


CALLS = ("called in its visit", "after a call of it", "called after the run")


# -- differentiating -----------------------------------------------------------------------------------------


def grad(model: Any, plan: Plan) -> Log:
    """The gradient at every tensor of the run: of a loss over the logits, and of a loss over that tensor
    itself.

    A tensor that one process meets at several spots - a module's output is the next one's input - is taken
    once where it first appears and, in another trace, once where it last does.
    """
    first: dict[int, tuple[Visit, Spot]] = {}
    last: dict[int, tuple[Visit, Spot]] = {}
    for visit, spot in plan.spots():
        if spot.tensor is not None:
            first.setdefault(spot.tensor, (visit, spot))
            last[spot.tensor] = (visit, spot)
    log: Log = {}
    loss_over_logits(log, model, plan, list(first), {spot.name: number for number, (_, spot) in first.items()})
    loss_over_logits(log, model, plan, list(first), {spot.name: number for number, (_, spot) in last.items()})
    loss_over_each(log, model, plan, {spot.name for _, spot in first.values()})
    return log


def loss_over_logits(log: Log, model: Any, plan: Plan, order: list[int], chosen: dict[str, int]) -> None:
    """Note the gradient at each chosen spot, asked for against the `order` in which the tensors appeared."""
    label = {number: f"d logits / d {name}" for name, number in chosen.items()}

    def block(tracer: Any) -> None:
        held: dict[int, torch.Tensor] = {}
        for visit in plan.visits:
            with refusals(log, *(label[chosen[spot.name]] for spot in visit.spots if spot.name in chosen)):
                value = value_at(model, visit)
                for spot in visit.spots:
                    if spot.name in chosen:
                        with refusals(log, label[chosen[spot.name]]):
                            held[chosen[spot.name]] = leaf_at(value, spot)
        logits = tracer.result.logits
        loss = (logits * pattern(logits.shape)).sum()
        with loss.backward():
            for number in reversed(order):
                if number in held:
                    log[label[number]] = kept(held[number].grad)

    with ended(log, label.values()):
        play(model, plan.inputs, block)


def loss_over_each(log: Log, model: Any, plan: Plan, chosen: set[str]) -> None:
    """Note, for a loss over each chosen spot, the gradient there and at the first tensor of the run."""

    def own(spot: Spot) -> str:
        return f"d {spot.name} / d itself"

    def down(spot: Spot) -> str:
        return f"d {spot.name} / d the first tensor"

    def block(tracer: Any) -> None:
        origins: list[torch.Tensor] = []
        for visit in plan.visits:
            spots = [spot for spot in visit.spots if spot.name in chosen]
            with refusals(log, *map(own, spots), *map(down, spots)):
                value = value_at(model, visit)
                for spot in spots:
                    with refusals(log, own(spot), down(spot)):
                        leaf = leaf_at(value, spot)
                        origins.append(leaf)
                        loss = (leaf * pattern(leaf.shape)).sum()
                        with loss.backward(retain_graph=True):
                            log[own(spot)] = kept(leaf.grad)
                            log[down(spot)] = kept(origins[0].grad)

    spots = [spot for _, spot in plan.spots() if spot.name in chosen]
    with ended(log, [*map(own, spots), *map(down, spots)]):
        play(model, plan.inputs, block)
