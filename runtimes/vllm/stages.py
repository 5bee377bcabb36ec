"""Pipeline stages: one block over modules that different ranks hold.

Every stage runs the same block. What the block asks for is served where the module is, by its *owner*; the owner
keeps a log of what it served, and the other stages serve their blocks from the log, in its order. So a block reads,
writes, saves and caches across stages without asking which stage it is on: an edit counts where the owner makes it,
and every stage goes on with the value that the owner served.

In a step a stage first follows the logs of the stages before it, then runs its layers, and sends its own log on;
when the last stage has sampled, the logs go back to the stages before. A block that wants something of an earlier
stage after something of a later one has missed it, as on one process, and gets the same error.
"""

# vLLM's and nnsight's classes meet here at run time, and their declared types do not say so.
# pyright: reportArgumentType=false

from __future__ import annotations

import pickle
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import ModuleList
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.models.utils import PPMissingLayer

from interleave import fragments
from interleave import nnsight_port as port
from interleave.errors import DivergedBlock, Unserved
from interleave.fragments import Lacking, missing
from interleave.ranks.packing import Tree, Unpacker
from interleave.ranks.raised import Raised
from interleave.ranks.tensors import Outgoing

from .payload import Bytes

if TYPE_CHECKING:
    from .interleaver import EngineInterleaver

VLLMS_OWN = "it is vLLM's own module"

#: What is not in a module: it belongs to the last stage, which has the logits.
OF_THE_LAST = ("result", "model.logits", "model.samples")


class Elsewhere(torch.nn.Module):
    """Stands for a module that another stage holds."""

    def extra_repr(self) -> str:
        return "on another pipeline stage"


class Entry(NamedTuple):
    """One thing that a stage did for a block.

    Attributes:
        block: The request, and the number of the installed edit if it is one.
        kind: A served value; a replacement that was taken; an error that was raised in the block; a value for the
            block's n-th cache; or a visit that ended.
        location: Where.
        value: What was served or cached.
    """

    block: tuple[str, str | None] | None
    kind: Literal["value", "done", "raised", "cache", "visited"]
    location: str | None
    value: Any = None


class Facts(NamedTuple):
    """What a stage knows of its locations, for the others.

    Attributes:
        modules: Paths of the modules that it holds, in order.
        first_layer: Where in it the layers are. What comes before them belongs to the first stage that holds it, the
            rest, such as the last norm, to the last.
    """

    modules: list[str]
    first_layer: int
    tree: dict[str, fragments.Tree]
    between: set[str]
    read_only: dict[str, str]
    unskippable: dict[str, str | None]
    uncallable: dict[str, str | None]


class Stages:
    """This rank's place in the pipeline. Every rank of the pipeline makes one, when its model is loaded.

    Args:
        pipeline: vLLM's group of the ranks along the pipeline.
        limit: Seconds that a wait for another stage may take.

    Attributes:
        number, size: Which stage this is, of how many.
        active: Whether blocks run in the present step; alike on every stage.
    """

    def __init__(self, pipeline: GroupCoordinator, limit: float) -> None:
        self.ranks = list(pipeline.ranks)
        self.number, self.size = pipeline.rank_in_group, pipeline.world_size
        self.active = False
        self._group = dist.new_group(
            self.ranks, backend="gloo", timeout=timedelta(seconds=limit), use_local_synchronization=True
        )
        self._owners: dict[str, int] = {}
        self._log: list[Entry] = []
        self._sending: list[tuple[Any, torch.Tensor]] = []
        self._unskippable: dict[str, str | None] = {}
        self._uncallable: dict[str, str | None] = {}

    # -- who holds what --------------------------------------------------------------------------------------

    def meet(self, model: port.Envoy) -> None:
        """Tell the other stages what this one holds of the model, and hear what they do."""
        interleaver: EngineInterleaver = model.interleaver  # type: ignore[assignment]
        self._tree = Tree(model)
        root = model.path
        modules = {f"{root}.{name}" if name else root: found for name, found in model._module.named_modules()}
        fragments = interleaver.fragments
        held = [path for path, module in modules.items() if not isinstance(module, Elsewhere | PPMissingLayer)]
        stack = next(path for path, module in modules.items() if isinstance(module._modules.get("layers"), ModuleList))
        facts = Facts(
            held,
            held.index(f"{stack}.layers"),
            fragments.tree,
            fragments.between,
            fragments.read_only,
            {path: view.unskippable for path, view in interleaver.views.items()},
            {path: view.uncallable for path, view in interleaver.views.items()},
        )
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, facts, group=self._group)
        for number, theirs in enumerate(everyone):
            for place, path in enumerate(theirs.modules):
                self._owners.setdefault(path, number)
                if path in (root, stack) or place > theirs.first_layer:
                    self._owners[path] = number
                if path in (root, stack):
                    self._owners[f"{path}.input"] = 0
            fragments.between |= theirs.between
        for number, theirs in enumerate(everyone):
            if number != self.number:
                own = {place: tree for place, tree in theirs.tree.items() if self.owner(place) == number}
                fragments.tree |= own
                fragments.read_only |= theirs.read_only
                self._unskippable |= theirs.unskippable
                self._uncallable |= theirs.uncallable

    def owner(self, location: str) -> int:
        """The stage that serves `location`."""
        if location in OF_THE_LAST:
            return self.size - 1
        found = self._owners.get(location)
        path = location
        while found is None and path:
            path = path.rpartition(".")[0]
            found = self._owners.get(path)
        return self.size - 1 if found is None else found

    def mine(self, location: str) -> bool:
        return self.owner(location) == self.number

    def unskippable(self, path: str) -> str | None:
        """Why another stage's module cannot be skipped; None if it can."""
        return self._unskippable.get(path, VLLMS_OWN)

    def uncallable(self, path: str) -> str | None:
        """Why another stage's module cannot be called; None if it can."""
        return self._uncallable.get(path, VLLMS_OWN)

    # -- what happened ---------------------------------------------------------------------------------------

    def note(self, mediator: port.Mediator | None, kind: Any, location: str | None, value: Any = None) -> None:
        """Enter something into this stage's log; the value as it is now."""
        if not self.active:
            return
        block = None if mediator is None else mediator.key  # type: ignore[attr-defined]
        copy = port.apply(value, lambda tensor: tensor.detach().cpu().clone(), torch.Tensor)
        self._log.append(Entry(block, kind, location, copy))

    def open(self) -> None:
        """A step begins, and blocks start: from here on it is noted what they do."""
        for work, _ in self._sending:
            work.wait()
        self._log, self._sending = [], []
        self.active = True

    def begin(self, interleaver: EngineInterleaver) -> None:
        """Blocks have started. Inside the interleaver: follow what the stages before this one did in the step."""
        self.active = bool(interleaver.mediators)
        if not self.active:
            return
        for number in range(self.number):
            self.follow(self.receive(number), interleaver)

    def send_on(self) -> None:
        """This stage's layers have run: the stages behind it may follow."""
        if self.active:
            self.send(range(self.number + 1, self.size))

    def send_back(self, interleaver: EngineInterleaver) -> None:
        """The last stage has sampled: every stage follows those behind it, and then all follow each other, until no
        block goes on (one may have called a module of another stage)."""
        if not self.active:
            return
        self.send(range(self.number))
        self._log = []
        for number in range(self.number + 1, self.size):
            self.follow(self.receive(number), interleaver)
        while True:
            logs: list[Any] = [None] * self.size
            dist.all_gather_object(logs, self.packed() if self._log else None, group=self._group)
            self._log = []
            if not any(logs):
                return
            for number, log in enumerate(logs):
                if log is not None and number != self.number:
                    self.follow(self.unpacked(log), interleaver)

    def send(self, stages: Iterable[int]) -> None:
        """Send the log. It is taken when the other stage comes to it; this one goes on."""
        content = torch.frombuffer(bytearray(self.packed()), dtype=torch.uint8)
        size = torch.tensor([len(content)])
        for number in stages:
            for tensor in (size, content):
                work = dist.isend(tensor, dst=self.ranks[number], group=self._group)
                self._sending.append((work, tensor))

    def receive(self, stage: int) -> list[Entry]:
        source = self.ranks[stage]
        size = torch.empty(1, dtype=torch.long)
        dist.recv(size, src=source, group=self._group)
        content = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(content, src=source, group=self._group)
        return self.unpacked(content.numpy().tobytes())

    def packed(self) -> bytes:
        """The log as it travels. What cannot travel is told to those who use it; it ends no step of the engine's."""
        try:
            message, _ = Bytes.of(self._log, self._tree, Outgoing())
        except Exception:
            message, _ = Bytes.of([self._able_to_travel(entry) for entry in self._log], self._tree, Outgoing())
        return pickle.dumps(message)

    def _able_to_travel(self, entry: Entry) -> Entry:
        try:
            Bytes.of(entry, self._tree, Outgoing())
        except Exception as error:
            reason = f"it cannot travel between pipeline stages ({error})"
            if entry.kind == "cache":
                number, selected, _ = entry.value
                return entry._replace(value=(number, selected, Lacking.at(entry.location, reason)))
            return entry._replace(kind="raised", value=Raised.of(Unserved(missing(entry.location, reason))))
        return entry

    def unpacked(self, data: bytes) -> list[Entry]:
        message: Bytes = pickle.loads(data)
        return Unpacker(message.pickle, self._tree, message.tensors(None)).load()

    def follow(self, log: list[Entry], interleaver: EngineInterleaver) -> None:
        """Do for this stage's blocks what another stage did for its own."""
        blocks = {mediator.key: mediator for mediator in interleaver.mediators}  # type: ignore[attr-defined]
        device = interleaver.device
        for entry in log:
            if entry.kind == "visited":
                interleaver.count(entry.location)
                continue
            mediator = blocks.get(entry.block)
            if mediator is None or mediator.exception is not None:
                continue
            value = port.apply(entry.value, lambda tensor: tensor.to(device), torch.Tensor)
            if entry.kind == "cache":
                number, selected, cached = value
                mediator.caches[number].observe_selected(selected, cached)
                continue
            pending = mediator.pending
            if pending is None or pending.provider != entry.location:
                if entry.kind == "raised":
                    # It was found when the block had gone on.
                    interleaver.end(mediator, entry.value.rebuild())
                    continue
                waits = "nothing" if pending is None else f"`{pending.provider}`"
                interleaver.fail(
                    mediator,
                    DivergedBlock(
                        f"another pipeline stage served `{entry.location}`, and the block waits for {waits} here: a "
                        f"block must do the same on every rank"
                    ),
                )
                continue
            if mediator.iteration:
                mediator.iteration = None
            if entry.kind == "raised":
                interleaver.fail(mediator, entry.value.rebuild(), shared=False)
                continue
            interleaver.resume(mediator, value if entry.kind == "value" else None)
        interleaver._reindex_parked()


def graft_elsewhere(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Give a stage's tree the names of what the other stages hold, so that a block finds them."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        parent, _, own = name.rpartition(".")
        if name not in modules and (not parent or isinstance(modules.get(parent), PPMissingLayer | Elsewhere)):
            modules[parent].add_module(own, Elsewhere())
            modules[name] = modules[parent]._modules[own]  # type: ignore[assignment]
