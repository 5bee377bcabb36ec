"""What the blocks of several requests did to one object of the caller's, put together.

In one process the blocks of a trace run one after another, on one object. In an engine every request has a copy of its
own. What does not depend on what the others did is put together: what was appended to a list, different elements of it,
different keys of a dict, additions to a set, different attributes. Everything else would be lost but for one request's
part, so it is left as it was and told.
"""

from __future__ import annotations

import pickle
import types
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from interleave import nnsight_port as port
from interleave.errors import InterleaveError
from interleave.ranks.packing import Change, Sent, apply, apply_tensors
from interleave.ranks.tensors import span

#: Objects that are looked through for the name of one.
LOOKED_THROUGH = 10_000


class Conflict(NamedTuple):
    """Something that several requests changed: an object, or the part of it that is written `part` behind its name."""

    target: Any
    part: str = ""


class Merger:
    """Collects what each request's block did, and then does it to the caller's own objects."""

    def __init__(self) -> None:
        self._objects: dict[int, tuple[Any, list[Change]]] = {}
        self._tensors: list[list[tuple[torch.Tensor, torch.Tensor]]] = []

    def add(self, sent: Sent, changes: list[Change], tensors: list[tuple[int, torch.Tensor]]) -> None:
        """Take what one request's block did; nothing is done yet."""
        for change in changes:
            target = sent.objects[change.number]
            self._objects.setdefault(id(target), (target, []))[1].append(change)
        if tensors:
            self._tensors.append([(sent.tensors[place], now) for place, now in tensors])

    def merge(self) -> list[Conflict]:
        """Change the caller's objects. Returns what several requests changed, which is left as it was."""
        conflicts = [conflict for target, changes in self._objects.values() for conflict in merged(target, changes)]
        return conflicts + merge_tensors(self._tensors)


def merged(target: Any, changes: list[Change]) -> Iterator[Conflict]:
    """Make the changes of several requests to one object."""
    if len(changes) == 1:
        apply(changes[0], target)
        return
    times = Counter(name for change in changes for name in [*change.attributes, *change.deleted])
    for change in changes:
        attributes = {name: value for name, value in change.attributes.items() if times[name] == 1}
        deleted = [name for name in change.deleted if times[name] == 1]
        apply(Change(change.number, None, attributes, deleted), target)
    yield from (Conflict(target, f".{name}") for name, count in times.items() if count > 1)
    edited = [change for change in changes if change.elements is not None]
    if len(edited) == 1:
        apply(Change(edited[0].number, edited[0].elements, {}, []), target)
    elif edited:
        yield from merge_elements(target, [change.elements for change in edited])


def merge_elements(target: Any, versions: list[Any]) -> Iterator[Conflict]:
    """Put several versions of a container's elements together."""
    if isinstance(target, dict):
        yield from merge_entries(target, [dict(zip(v[::2], v[1::2], strict=True)) for v in versions])
    elif isinstance(target, set):
        yield from merge_members(target, [set(version) for version in versions])
    elif isinstance(target, list | deque | bytearray):
        yield from merge_items(target, versions)
    else:
        yield Conflict(target)


def merge_items(target: Any, versions: list[Any]) -> Iterator[Conflict]:
    before = list(target)
    assigned: list[dict[int, Any]] = []
    for new in versions:
        slots = {n: item for n, (old, item) in enumerate(zip(before, new, strict=False)) if not same(old, item)}
        # Elsewhere by now: a sorting, an insertion, a removal and an addition.
        moved = any(item is before[n] for item in [*slots.values(), *new[len(before) :]] for n in slots)
        if len(new) < len(before) or moved:
            yield Conflict(target)
            return
        assigned.append(slots)
    times = Counter(n for slots in assigned for n in slots)
    for slots, new in zip(assigned, versions, strict=True):
        for n, item in slots.items():
            if times[n] == 1:
                target[n] = item
        target.extend(new[len(before) :])
    yield from (Conflict(target, f"[{n}]") for n, count in times.items() if count > 1)


def merge_entries(target: dict, versions: list[dict]) -> Iterator[Conflict]:
    before = dict(target)
    changed: list[set] = []
    for new in versions:
        keys = {key for key, value in new.items() if key not in before or not same(before[key], value)}
        keys |= before.keys() - new.keys()
        if not keys:  # their order
            yield Conflict(target)
            return
        changed.append(keys)
    times = Counter(key for keys in changed for key in keys)
    for keys, new in zip(changed, versions, strict=True):
        for key in [*(key for key in new if key in keys), *(keys - new.keys())]:
            if times[key] > 1:
                continue
            if key in new:
                target[key] = new[key]
            else:
                del target[key]
    yield from (Conflict(target, f"[{key!r}]") for key, count in times.items() if count > 1)


def merge_members(target: set, versions: list[set]) -> Iterator[Conflict]:
    before = set(target)
    removed = Counter(member for new in versions for member in before - new)
    for new in versions:
        target |= new - before
    target -= {member for member, count in removed.items() if count == 1}
    if any(count > 1 for count in removed.values()):
        yield Conflict(target)


def merge_tensors(requests: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> list[Conflict]:
    """The same for tensors: one is changed by one request at most, and so is its memory."""
    if len(requests) > 1:
        # A request tells of all tensors that share memory with what it changed.
        requests = [[(own, now) for own, now in told if not same_bits(own, now)] for told in requests]
    conflicts: dict[int, Conflict] = {}
    for number, told in enumerate(requests):
        for own, _ in told:
            for other, _ in (pair for others in requests[:number] for pair in others):
                if other is own or overlap(own, other):
                    conflicts[id(own)], conflicts[id(other)] = Conflict(own), Conflict(other)
    clear = [pair for told in requests for pair in told if id(pair[0]) not in conflicts]
    apply_tensors([own for own, _ in clear], [(place, now) for place, (_, now) in enumerate(clear)], [])
    return list(conflicts.values())


def same(one: Any, other: Any) -> bool:
    """Whether an element is what it was. Numbers have no identity that travels."""
    if one is other:
        return True
    return type(one) is type(other) and isinstance(one, int | float) and pickle.dumps(one) == pickle.dumps(other)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    flat = [tensor.detach().resolve_conj().resolve_neg().cpu().flatten().view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may share memory."""
    if one.untyped_storage()._cdata != other.untyped_storage()._cdata or not one.numel() or not other.numel():
        return False
    (low, high), (start, end) = extent(one), extent(other)
    return low < end and start < high


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """From which byte of its memory to which it lies."""
    return tensor.data_ptr(), tensor.data_ptr() + span(tensor)


def told(conflicts: list[Conflict], variables: dict[str, Any]) -> InterleaveError:
    """The error for what several requests changed."""
    names = []
    for target, part in conflicts:
        name = name_of(target, variables)
        names.append(f"`{name}{part}`" if name else f"an object that they captured ({type(target).__name__})")
    return InterleaveError(
        f"several requests of this trace changed {', '.join(dict.fromkeys(names))}. In one process their blocks would "
        f"run one after another; in the engine each request has its own copy of what its block captured, and none sees "
        f"what another did, so this is left as it was before the trace. Save what each request has to say (`.save()` "
        f"in its block; of several requests it comes back as a list), and combine it after the trace. What they append "
        f"to a list, put under different keys of a dict, and add to a set is put together"
    )


def name_of(target: Any, variables: dict[str, Any]) -> str | None:
    """What the caller can write for an object: a variable, or what lies in one."""
    seen: set[int] = set()
    waiting = deque(variables.items())
    while waiting and len(seen) < LOOKED_THROUGH:
        name, value = waiting.popleft()
        if value is target:
            return name
        if id(value) in seen or isinstance(value, port.Envoy | port.Tracer | type | types.ModuleType):
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting.extend((f"{name}[{key!r}]", item) for key, item in value.items())
        elif isinstance(value, list | tuple | deque):
            waiting.extend((f"{name}[{n}]", item) for n, item in enumerate(value))
        elif isinstance(value, types.FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            waiting.extend((free, cell.cell_contents) for free, cell in cells)
        else:
            waiting.extend((f"{name}.{attribute}", item) for attribute, item in getattr(value, "__dict__", {}).items())
    return None


__all__ = ["Conflict", "Merger", "told"]
