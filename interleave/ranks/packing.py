"""What travels between the driver and a rank, and how both speak about the same objects.

The driver pickles a block with everything it captured; a rank runs it against its own model. Three things
must hold for the result to be that of a local trace:

* *The model does not travel.* Envoys of the driver's tree are references by path; what else belongs to the
  tree (a module, a tokenizer, a pipeline) is a reference by nnsight's persistent name.
* *Code travels as code objects.* The ranks run the same interpreter, so the block's own code object crosses,
  with the user's file and line numbers. The text of its source goes along, because nnsight reads the blocks
  inside a block (`tracer.invoke`, `.backward()`) from there, and a notebook's cells are no files.
* *Captured objects keep their identity.* Pickle numbers every object it meets, in the same order on both
  sides. That memo is the shared numbering: on the way back an object which the driver has is its number. A
  list, dict, set, array or plain object that the block changed comes back as its new contents, to be put into
  the driver's own object; a captured tensor whose bits changed comes back as those bits.
"""

from __future__ import annotations

import copyreg
import io
import marshal
import pickle
import sys
import types
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from .. import nnsight_port as port
from ..errors import InterleaveError
from .tensors import Incoming, Outgoing, Table, is_ordinary, overwrite

#: Protocol 5 writes arrays as buffers, which would be numbered apart from the arrays they belong to.
PROTOCOL = 4


class Packed(NamedTuple):
    """A message's body: the pickle and the table of its tensors."""

    pickle: bytes
    table: Table


class Tree:
    """A model's envoy tree as both sides name it: paths for envoys, persistent names for the rest."""

    def __init__(self, model: port.Envoy) -> None:
        self.model = model
        self._objects = model._remoteable_persistent_objects()
        self._names = {id(value): name for name, value in self._objects.items() if value is not None}
        self._envoys = dict(model.modules(names=True))

    def name_of(self, value: Any) -> str | None:
        return self._names.get(id(value))

    def object(self, name: str) -> Any:
        return self._objects[name]

    def path_of(self, envoy: port.Envoy) -> str:
        if envoy.interleaver is not self.model.interleaver:
            raise InterleaveError(f"{envoy.path!r} belongs to another model than the one that is traced")
        return envoy.path

    def envoy(self, path: str) -> port.Envoy:
        if path not in self._envoys:
            raise InterleaveError(
                f"the ranks' model has no module {path!r}; a module that is attached to the driver's tree does "
                f"not reach them: capture it as a variable, and call it in the block"
            )
        return self._envoys[path]

    def take_edits(self) -> dict[str, list[port.Mediator]]:
        """The edits that lie on the tree's own envoys, by path; they are taken off."""
        edits = {path: envoy._edits for path, envoy in self._envoys.items() if envoy._edits}
        for path in edits:
            self._envoys[path].clear_edits()
        return edits

    def add_edits(self, edits: dict[str, list[port.Mediator]]) -> None:
        for path, added in edits.items():
            self._envoys[path]._edits.extend(added)


class Place(NamedTuple):
    """Stands in a pickle for the envoy at `path`."""

    path: str


def _twin(envoy: port.Envoy) -> port.Envoy:
    return envoy._shallow_copy()


def _set_edits(envoy: port.Envoy, edits: list) -> None:
    envoy._edits = edits


def _new_mediator(code: bytes, copy: bool) -> port.Mediator:
    return port.Mediator(marshal.loads(code), {}, {}, copy=copy)


def _set_scope(mediator: port.Mediator, scope: tuple[dict, dict]) -> None:
    mediator.__init__(mediator.code, scope[0], scope[1], copy=mediator.copy)


class Packer(cloudpickle.CloudPickler):
    """Pickles one message.

    Args:
        file: Where the pickle goes.
        tree: The model on this side.
        tensors: Where the tensors go.
        known: Numbers of the objects that the other side has, by id; and the places of its tensors, by id.
    """

    def __init__(
        self,
        file: io.BytesIO,
        tree: Tree,
        tensors: Outgoing,
        known: tuple[Mapping[int, int], Mapping[int, int]] = ({}, {}),
    ) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self._tree = tree
        self._tensors = tensors
        self._known, self._known_tensors = known
        #: File names of the code that was packed.
        self.filenames: set[str] = set()

    def persistent_id(self, obj: Any) -> tuple[str, Any] | None:
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj)
        number = self._known.get(id(obj))
        if number is not None:
            return ("known", number)
        if isinstance(obj, Place):
            return ("envoy", obj.path)
        if isinstance(obj, port.Envoy) and not obj._edits:
            return ("envoy", self._tree.path_of(obj))
        name = self._tree.name_of(obj)
        return None if name is None else ("object", name)

    def _tensor(self, tensor: torch.Tensor) -> tuple[str, Any] | None:
        place = self._known_tensors.get(id(tensor))
        if place is not None:
            return ("captured", place)
        if is_ordinary(tensor):
            return ("tensor", self._tensors.add(tensor))
        kind = type(tensor).__name__
        if kind in ("DTensor", "FakeTensor"):
            raise InterleaveError(f"a {kind} does not hold the values of a whole tensor, so it cannot cross")
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, port.Envoy):
            return _twin, (Place(self._tree.path_of(obj)),), obj._edits, None, None, _set_edits
        if isinstance(obj, port.Mediator):
            scope = (obj.glbls, dict(obj.lcls))
            if obj.node is not None:
                _, *scope = port.reduce_block(obj.node, obj.glbls, obj.lcls)
            self.filenames.add(obj.code.co_filename)
            arguments = (marshal.dumps(obj.code), obj.copy)
            return _new_mediator, arguments, tuple(scope), None, None, _set_scope
        if isinstance(obj, types.CodeType):
            # cloudpickle would drop the file's name.
            return marshal.loads, (marshal.dumps(obj),)
        if isinstance(obj, port.Cache):
            # nnsight drops the model, which it cannot ship; here it is a reference, and navigation works.
            return object.__new__, (type(obj),), {**obj.__dict__, "_open": {}}
        if obj is sys.stdout or obj is sys.stderr:
            return getattr, (sys, "stdout" if obj is sys.stdout else "stderr")
        if isinstance(obj, io.IOBase) and not isinstance(obj, io.BytesIO | io.StringIO):
            raise TypeError(f"cannot pickle the open file {getattr(obj, 'name', obj)!r}")
        return super().reducer_override(obj)

    def _dynamic_function_reduce(self, func: types.FunctionType) -> Any:
        self.filenames.add(func.__code__.co_filename)
        return super()._dynamic_function_reduce(func)


class Unpacker(pickle.Unpickler):
    """Reads one message. `known` and `captured` resolve what this side sent before (see `Packer`)."""

    def __init__(
        self,
        data: bytes,
        tree: Tree,
        tensors: Incoming,
        known: Mapping[int, Any] | None = None,
        captured: list[torch.Tensor] | None = None,
    ) -> None:
        super().__init__(io.BytesIO(data))
        self._find: dict[str, Callable[[Any], Any]] = {
            "envoy": tree.envoy,
            "object": tree.object,
            "tensor": tensors.tensors.__getitem__,
            "known": (known or {}).__getitem__,
            "captured": (captured or []).__getitem__,
        }

    def persistent_load(self, pid: Any) -> Any:
        kind, name = pid
        return self._find[kind](name)


def pack(value: Any, packer: Callable[[io.BytesIO], Packer]) -> tuple[bytes, Packer]:
    """Pickle `value`; the packer knows afterwards what it met."""
    file = io.BytesIO()
    used = packer(file)
    used.dump(value)
    return file.getvalue(), used


class Sent:
    """The driver's side of a request: which object has which number, for as long as the reply is awaited."""

    def __init__(self, packer: Packer, tensors: Outgoing) -> None:
        self.objects: dict[int, Any] = dict(packer.memo.copy().values())
        self.tensors = tensors.tensors


@dataclass
class Change:
    """What became of one captured object: its new elements (None: the old ones), attributes set, deleted."""

    number: int
    elements: list | None
    attributes: dict[str, Any]
    deleted: list[str]


class Captured:
    """A rank's side of a request: the captured objects as they came, to tell what the block changed."""

    def __init__(self, memo: Mapping[int, Any], tensors: Incoming) -> None:
        self._memo = memo
        self._tensors = tensors
        self._before = [
            (number, value, _elements(value), _attributes(value)) for number, value in memo.items() if _watched(value)
        ]
        self._grads = [_grad(tensor) for tensor in tensors.tensors]

    @property
    def known(self) -> tuple[dict[int, int], dict[int, int]]:
        """The numbers by id, for the reply's `Packer`. Valid while this object holds the captured ones."""
        objects = {id(value): number for number, value in self._memo.items()}
        places = {id(tensor): place for place, tensor in enumerate(self._tensors.tensors)}
        return objects, places

    def changes(self) -> list[Change]:
        changes = []
        for number, value, elements, attributes in self._before:
            now, attributes_now = _elements(value), _attributes(value)
            missing = object()
            assigned = {
                name: attribute
                for name, attribute in attributes_now.items()
                if attributes.get(name, missing) is not attribute
            }
            deleted = [name for name in attributes if name not in attributes_now]
            same = _same(elements, now)
            if not same or assigned or deleted:
                changes.append(Change(number, None if same else now, assigned, deleted))
        return changes

    def tensor_changes(self) -> list[tuple[int, torch.Tensor]]:
        """Captured tensors whose bits changed, by place, with what they hold now."""
        return [(place, self._tensors.tensors[place].detach()) for place in sorted(self._tensors.changed())]

    def grad_changes(self) -> list[tuple[int, torch.Tensor | None]]:
        """Captured leaves that have another `.grad` by now, by place."""
        leaves = [place for place, tensor in enumerate(self._tensors.tensors) if tensor.is_leaf]
        now = [(place, self._tensors.tensors[place].grad) for place in leaves]
        return [(place, grad) for (place, grad), before in zip(now, self._grads, strict=True) if grad is not before]


#: nnsight's and our own objects, which every trace changes.
_MACHINERY = (
    port.Envoy,
    port.Tracer,
    port.Tracer.Info,
    port.Mediator,
    port.SerializedFrame,
    port.Interleaver,
)
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_CONTAINERS = (list, dict, set, deque, bytearray, np.ndarray, torch.Generator)


def _grad(tensor: torch.Tensor) -> torch.Tensor | None:
    return tensor.grad if tensor.is_leaf else None


def _watched(value: Any) -> bool:
    if isinstance(value, (*_CODE, *_MACHINERY, torch.Tensor)):
        return False
    return isinstance(value, _CONTAINERS) or _is_plain(value)


def _is_plain(value: Any) -> bool:
    """Whether pickle treats `value` by its attributes alone, so that attributes are all its state."""
    kind = type(value)
    by_default = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    return by_default and (hasattr(value, "__dict__") or bool(copyreg._slotnames(kind)))  # pyright: ignore[reportAttributeAccessIssue]


def _elements(value: Any) -> Any:
    """The elements of a container, as a list of objects; an array's or a generator's state; else None."""
    if isinstance(value, dict):
        return [part for item in value.items() for part in item]
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, bytearray):
        return bytes(value)
    return list(value) if isinstance(value, list | set | deque) else None


def _same(before: Any, now: Any) -> bool:
    if isinstance(now, np.ndarray):
        return before.shape == now.shape and before.tobytes() == now.tobytes()
    if isinstance(now, list):
        return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))
    return before == now


def _attributes(value: Any) -> dict[str, Any]:
    if not _is_plain(value):
        return {}
    slots = copyreg._slotnames(type(value))  # pyright: ignore[reportAttributeAccessIssue]
    return {
        **getattr(value, "__dict__", {}),
        **{name: getattr(value, name) for name in slots if hasattr(value, name)},
    }


def apply(change: Change, target: Any) -> None:
    """Put what became of a captured object on a rank into the driver's own object."""
    new = change.elements
    if new is not None:
        if isinstance(target, torch.Generator):
            target.set_state(torch.frombuffer(bytearray(new), dtype=torch.uint8))
        elif isinstance(target, dict):
            target.clear()
            for key, value in zip(new[::2], new[1::2], strict=True):
                target[key] = value
        elif isinstance(target, np.ndarray):
            target[...] = new
        elif isinstance(target, bytearray | list):
            target[:] = new
        elif isinstance(target, set):
            target.clear()
            target.update(new)
        else:
            target.clear()
            target.extend(new)
    for name, value in change.attributes.items():
        object.__setattr__(target, name, value)
    for name in change.deleted:
        object.__delattr__(target, name)


def apply_tensors(
    tensors: list[torch.Tensor],
    changed: list[tuple[int, torch.Tensor]],
    grads: list[tuple[int, torch.Tensor | None]],
) -> None:
    """The same for the driver's own tensors."""
    for place, now in changed:
        overwrite(tensors[place], now)
    for place, grad in grads:
        tensors[place].grad = grad if grad is None else grad.to(tensors[place].device)
