"""The rank program: joins its peers, loads the model, and runs what the driver sends until the driver is gone.

The main thread serves one request after the other. A second thread watches the control connection, because the
main thread may be deep in a collective: on "interrupt" it signals the main thread, on "break" it cuts the groups
so that nobody goes on waiting, and when the connection ends the driver has died and so does the process, at once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from .. import nnsight_port as port
from ..errors import InterleaveError
from ..load import LoadRequest, runtime_of
from . import console
from .channel import Channel, Message, knock
from .packing import Captured, Packed, Packer, Tree, Unpacker, pack
from .raised import Raised
from .surroundings import RandomState
from .tensors import Incoming, Outgoing, Shelf
from .work import Reply, Request


class Together:
    """What a rank does about its peers; the model's agreement does it, where the model has one.

    The control connection is not in step with the requests. What it brings carries the generation of groups that
    the driver means, so that a late word about a past block does not hit the groups or the block of the next one.
    """

    def __init__(self, model: Any) -> None:
        self._agreement = getattr(model.interleaver, "agreement", None)
        self._generation = 0
        self._lock = threading.Lock()
        if self._agreement is not None:
            self._agreement.driven = True

    def break_groups(self) -> None:
        """Free the peers that wait for this rank, and this rank. Called by the watcher."""
        if self._agreement is not None:
            self._agreement.break_groups()

    def if_current(self, generation: int, act: Callable[[], None]) -> None:
        """Call `act`, unless the groups of that generation are gone already."""
        with self._lock:
            if generation == self._generation:
                act()

    def rebuild(self, generation: int) -> None:
        """Make the groups anew, together with all ranks."""
        with self._lock:
            self._generation = generation
        if self._agreement is not None:
            self._agreement.rebuild(generation)

    def digest(self) -> str | None:
        """A hash of this rank's exchanges in the last trace."""
        return None if self._agreement is None else self._agreement.ledger.digest()


class Interruptible:
    """Lets the watcher raise `KeyboardInterrupt` in the main thread, but only while a block runs.

    A signal rather than an injected exception: its handler runs in the main thread, so whether a block is running
    cannot change under it, and it wakes a sleeping system call.
    """

    def __init__(self) -> None:
        self._running = False
        self._main = threading.main_thread().ident
        signal.signal(signal.SIGUSR1, self._handle)

    def interrupt(self) -> None:
        """Called by the watcher."""
        assert self._main is not None
        signal.pthread_kill(self._main, signal.SIGUSR1)

    def _handle(self, *_: Any) -> None:
        if self._running:
            self._running = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._running = True
        try:
            yield
        finally:
            self._running = False


class Rank:
    """One rank's side of the conversation.

    Args:
        rank, world_size: Its place.
        requests: The connection that carries requests and replies.
    """

    def __init__(self, rank: int, world_size: int, requests: Channel) -> None:
        self.rank = rank
        self.world_size = world_size
        self.requests = requests
        self.interruptible = Interruptible()
        self.together: Together | None = None
        self._device = "cpu"
        self._model: Any = None
        self._shelf = Shelf()

    def serve(self) -> None:
        """Answer requests until the driver says that it is done."""
        while True:
            message = self.requests.receive()
            if message.kind == "close":
                return
            arena, reply = None, Reply()
            try:
                if message.kind == "load":
                    reply = self._load(message.body)
                elif message.kind == "rebuild":
                    if self.together is not None:
                        self.together.rebuild(message.body)
                else:
                    reply, arena = self._run(message)
            except BaseException as error:
                reply = Reply(error=Raised.of(error))
            if message.kind == "run" and self.together is not None:
                reply.digest = self.together.digest()
            console.flush()
            self.requests.send("reply", reply, arena)
            if arena is not None:
                os.close(arena)

    def _load(self, request: LoadRequest) -> Reply:
        self._device = request.device_type
        limit = timedelta(seconds=request.limit)
        backend = "gloo"
        if self._device == "cuda":
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
        address, port_number = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port_number, is_master=False, timeout=limit)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=limit)
        self._model = runtime_of(request).load(request)
        self.together = Together(self._model)
        fragments = getattr(self._model.interleaver, "fragments", None)
        return Reply(layouts=getattr(fragments, "tree", None) if self.rank == 0 else None)

    def _run(self, message: Message) -> tuple[Reply, int | None]:
        request: Request = message.body
        for filename, text in request.sources.items():
            port.SOURCES[filename] = text
            linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
        tensors = Incoming(request.packed.table, message.arena, self._shelf, self._device)
        tree = Tree(self._model)
        unpacker = Unpacker(request.packed.pickle, tree, tensors)
        work = unpacker.load()
        captured = Captured(unpacker.memo.copy(), tensors)  # pyright: ignore[reportAttributeAccessIssue]
        error, values, random = None, {}, None
        with request.surroundings.applied():
            try:
                with self.interruptible.running():
                    values = work.run()
            except BaseException as raised:
                error = Raised.of(raised)
            if self.rank == 0:
                random = RandomState.now()
        # An edit made in place inside a session belongs to the driver's tree, which sends its edits along.
        edits = tree.take_edits()
        if self.rank != 0:
            return Reply(error=error), None
        outgoing = Outgoing(detach=True)
        try:
            packed, _ = pack(
                (values, edits, captured.changes(), captured.tensor_changes(), captured.grad_changes()),
                lambda file: Packer(file, tree, outgoing, captured.known),
            )
            table, arena = outgoing.finish()
        except Exception as unpackable:
            if error is None:
                error = Raised.of(_naming(unpackable, values, tree, captured))
            return Reply(error=error, random=random), None
        return Reply(error, Packed(packed, table), random), arena


def _naming(error: Exception, values: Any, tree: Tree, captured: Captured) -> InterleaveError:
    """Says which saved value cannot come back."""
    for name, value in values.items() if isinstance(values, dict) else ():
        try:
            pack(value, lambda file: Packer(file, tree, Outgoing(detach=True), captured.known))
        except Exception as own:
            return InterleaveError(
                f"{name!r} ({type(value).__name__}) cannot leave the rank: {own}. Save the tensors or numbers you "
                f"need from it instead"
            )
    return InterleaveError(f"what the block put into an object of the caller cannot leave the rank: {error}")


def _watch(control: Channel, rank: Rank, directory: str) -> None:
    """The second thread. `directory` is the driver's private one."""
    while True:
        try:
            message = control.receive()
        except (EOFError, OSError):
            # The driver is gone. If it was killed, its directory is still there.
            if rank.rank == 0:
                shutil.rmtree(directory, ignore_errors=True)
            os._exit(0)
        together = rank.together
        if together is not None:
            acts = {"interrupt": rank.interruptible.interrupt, "break": together.break_groups}
            together.if_current(message.body, acts[message.kind])


def main() -> None:
    """Run this process as a rank; the environment says which and whose."""
    # The driver decides what an interrupt means for its ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    number, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    door, secret = os.environ.pop("INTERLEAVE_DOOR"), bytes.fromhex(os.environ.pop("INTERLEAVE_SECRET"))
    requests = knock(door, secret, "requests", number)
    control = knock(door, secret, "control", number)
    console.install(number, lambda stream, text: requests.send("write", (stream, text)))
    rank = Rank(number, world_size, requests)
    watched = (control, rank, os.path.dirname(door))
    watcher = threading.Thread(target=_watch, args=watched, daemon=True, name="interleave-control")
    watcher.start()
    code = 0
    try:
        rank.serve()
    except (EOFError, OSError):
        # The watcher sees the same, and ends the process.
        watcher.join(10.0)
    except BaseException:
        traceback.print_exc()
        code = 1
    console.flush()
    # Threads of collectives may be anywhere; there is nothing for them to finish.
    os._exit(code)


if __name__ == "__main__":
    main()
