"""How the ranks of a model stay together: what they did, how they start and end a trace, what follows an
error.

Every rank runs the same block, and every exchange has its place in it. Three things keep that true, or say so
within a bounded time when it is not:

* **The ledger.** Each exchange has a *key*: which trace, which location, which occurrence, what for. Ranks
  with different keys do not exchange a byte (see `boundary.collectives`). The keys of a trace are also
  summed up in a hash, and ranks that ended a trace with different hashes did different things.
* **Opening and closing.** A trace starts on all ranks or on none, from rank 0's random state, and it ends
  well on all ranks or raises on all. With a driver (`driven`) the block and its results carry what that
  takes; without one (torchrun) the ranks post it on a board in the store. Neither is ever a collective.
* **Recovery.** After an error the groups - ours and the model's - may be lost or out of step. All ranks
  make them anew before the next trace; the model stays loaded and finds its groups under their old names.

Every wait ends within `limit`: in an exchange, in the model's own collectives, at the board, in recovery.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from boundary.collectives import CollectiveError, CollectiveTimeout, Group

from .board import Absent, Board
from .errors import DivergedBlock, InterleaveError, RankDied
from .groups import Groups

#: Seconds that a rank whose block raised waits for the others to end theirs, before it breaks its groups.
GRACE = 1.0

#: What gloo and nccl write when a peer is gone, late, or closed its connection.
_LOST_PEER = re.compile(
    r"gloo/transport|caused pair closure|NCCL communicator was aborted|caught collective operation timeout"
)

#: Says which instance of a process a store prefix belongs to; ranks construct them in one order.
_instances = itertools.count()


class Entry(NamedTuple):
    """One exchange in the ledger: where, at which visit, and what for."""

    location: str
    occurrence: int
    kind: str

    def __str__(self) -> str:
        return f"{self.location} (occurrence {self.occurrence}, {self.kind})"


class Ledger:
    """The exchanges of one trace, in order: all of them in the hash and the count, the last ones by name.

    Attributes:
        entries: The last :attr:`KEPT` exchanges, oldest first.
        count: How many exchanges there were.
    """

    KEPT = 4096

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=self.KEPT)
        self.count = 0
        self._hash = blake2b(digest_size=16)

    def enter(self, entry: Entry) -> None:
        """Append an exchange; its cost does not depend on how many there were."""
        self.entries.append(entry)
        self.count += 1
        self._hash.update(f"{entry.location}\0{entry.occurrence}\0{entry.kind}\n".encode())

    def digest(self) -> str:
        """A hash of all entries in order, in hex: equal on two ranks exactly if they did the same."""
        return self._hash.hexdigest()

    def __str__(self) -> str:
        if not self.count:
            return "no exchange"
        return f"{self.count} exchange{'s' * (self.count > 1)}, the last at {self.entries[-1]}"


class Agreement:
    """One rank's part in keeping the ranks together. Every rank constructs it, in the same order if several.

    The default process group must stand (`init_process_group` with the limit as its timeout), unless this
    is the only process.

    Args:
        limit: Seconds after which any wait for another rank ends in an error.
        driven: Whether a driver says when a trace starts and groups are rebuilt; else the ranks agree by
            themselves.
        device_type: What our groups carry: `"cpu"` or `"cuda"`.
        store: A store that all ranks reach; default: that of the default process group.

    Attributes:
        rank, world_size: This process's place.
        trace: The number of the present or last trace, from 1 in every generation.
        ledger: Its exchanges.
    """

    def __init__(
        self,
        limit: float = 60.0,
        *,
        driven: bool = False,
        device_type: str = "cpu",
        store: Store | None = None,
    ) -> None:
        ready = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if ready else 0
        self.world_size = dist.get_world_size() if ready else 1
        self.limit = limit
        self.driven = driven
        self.trace = 0
        self.ledger = Ledger()
        self._is_open = False
        self._failed = False
        self._groups: Groups | None = None
        self._board: Board | None = None
        if ready:
            store = PrefixStore(f"interleave/{next(_instances)}", store or c10d._get_default_store())
            self._groups = Groups(PrefixStore("groups", store), limit, device_type)
            self._board = Board(PrefixStore("board", store), self.rank, self.world_size)

    # Groups

    @property
    def generation(self) -> int:
        """Names the present groups: another number after every rebuild."""
        return self._groups.generation if self._groups is not None else 0

    @property
    def _standing(self) -> Groups:
        if self._groups is None:
            raise InterleaveError("this process is the only one: there are no groups before init_process_group")
        return self._groups

    def group(self, ranks: Iterable[int]) -> Group:
        """Our own group of these global ranks: made at the first call, kept, and brought back by a rebuild.

        Its members call; ranks that are in several groups ask for them in one order.
        """
        return self._standing.ours(ranks)

    def adopt(self, *meshes: DeviceMesh | dist.ProcessGroup) -> None:
        """Give the groups of a model's meshes the limit, and rebuild them too. Every rank calls."""
        self._standing.adopt(*meshes)

    def break_groups(self) -> None:
        """End all waits on this rank's groups, its own and its peers', within moments. Any thread may call.

        Each ends in an error that :meth:`translate` knows. The groups are of no use until they are rebuilt.
        """
        self._failed = True
        if self._groups is not None:
            self._groups.cut()

    def rebuild(self, generation: int) -> None:
        """Make all groups anew, ours and the model's. Every rank calls, with one number that is new to all.

        Ranks that still wait in an old group are freed by those that have arrived here, if those are their
        peers.

        Raises:
            RankDied: Not all ranks came within the limit, or the store is gone.
        """
        if self._groups is None or self._board is None:
            return
        self._groups.cut()
        try:
            self._board.exchange(f"rebuild/{generation}", b"", self.limit)
            self._groups.remake(generation)
            # Whatever made a rank miss a trace, from here on all count alike.
            self.trace = 0
        except (Absent, RuntimeError) as error:
            self._failed = True
            raise RankDied(
                f"rank {self.rank} could not rebuild its groups within {self.limit:g} s ({error}):"
                " restart the ranks and load the model again"
            ) from error
        self._failed = False

    # A trace's life

    def open(self, what: str = "") -> None:
        """Start a trace: every rank calls, and all start or all raise.

        Without a driver this is where the groups are rebuilt if any rank's last trace failed, and where
        every rank takes rank 0's random state.

        Args:
            what: What this rank is about to run; ranks that say different things raise before anything
                runs. Sizes of the model's inputs belong here: a model's own gloo collectives of unequal
                size end the process.

        Raises:
            DivergedBlock: Another rank does not start a trace, or starts another one.
            RankDied: The groups are lost and could not be rebuilt.
        """
        if self._is_open:
            self.close(InterleaveError("the block was left without being closed"))
        if self._board is not None and self.world_size > 1 and not self.driven:
            self._meet(self._board, what)
        self.trace += 1
        self.ledger = Ledger()
        self._is_open = True

    def close(self, error: BaseException | None = None) -> None:
        """End a trace: every rank calls, with what its block raised or None.

        Without a driver the ranks compare how they ended. An `error` gets notes on how the others ended if
        that was otherwise, and the caller raises it. Ranks that wait for one that has raised are freed
        after a moment.

        Raises:
            DivergedBlock: `error` is None, but another rank raised, did other exchanges, or did not end in
            time.
        """
        self._is_open = False
        self._failed |= error is not None
        if self._board is None or self.world_size == 1 or self.driven:
            return
        own = {
            "error": None if error is None else f"{type(error).__name__}: {error}",
            "digest": self.ledger.digest(),
            "ledger": str(self.ledger),
        }
        topic = f"{self.generation}.{self.trace}/close"
        try:
            posts = self._board.exchange(
                topic, json.dumps(own).encode(), self.limit if error is None else min(GRACE, self.limit)
            )
            ends = {rank: json.loads(post) for rank, post in enumerate(posts)}
            absent = []
        except Absent as found:
            ends = {rank: json.loads(post) for rank, post in found.posts.items()}
            absent = found.ranks
            self.break_groups()
        if error is not None:
            for rank, end in ends.items():
                if end["error"] not in (None, own["error"]):
                    error.add_note(f"rank {rank} raised {end['error']}")
            return
        problem = ""
        if raised := {rank: end["error"] for rank, end in ends.items() if end["error"]}:
            problem = "; ".join(f"rank {rank} raised {text}" for rank, text in raised.items())
        elif absent:
            problem = f"{_ranks(absent)} did not end the block within {self.limit:g} s"
        elif len({end["digest"] for end in ends.values()}) > 1:
            problem = "; ".join(f"rank {rank} did {end['ledger']}" for rank, end in ends.items())
        if problem:
            self._failed = True
            raise DivergedBlock(
                f"the ranks did not run the same block. Rank {self.rank} ran to its end with {self.ledger};"
                f" but: {problem}. {_ADVICE}"
            )

    def key(self, location: str, occurrence: int, kind: str) -> str:
        """The key of an exchange, equal on all ranks that do the same; it is entered in the ledger."""
        self.ledger.enter(Entry(location, occurrence, kind))
        return f"{location} (occurrence {occurrence}, {kind}; trace {self.generation}.{self.trace})"

    def _meet(self, board: Board, what: str) -> None:
        """Agree on the board that this trace starts, whether to rebuild first, and on the random state."""
        header = {"what": what, "failed": self._failed}
        states: dict[str, Tensor] = {}
        if self.rank == 0:
            states = self.random_state()
            header["sizes"] = {name: state.numel() for name, state in states.items()}
        post = json.dumps(header).encode() + b"\n" + b"".join(state.numpy().tobytes() for state in states.values())
        topic = f"{self.generation}.{self.trace + 1}/open"
        try:
            posts = board.exchange(topic, post, self.limit)
        except Absent as found:
            board.withdraw(topic)
            raise DivergedBlock(
                f"rank {self.rank} starts a trace, and {_ranks(found.ranks)} did not within {self.limit:g} s. {_ADVICE}"
            ) from None
        headers = [json.loads(post.partition(b"\n")[0]) for post in posts]
        if any(header["failed"] for header in headers):
            self.rebuild(self.generation + 1)
        if len({header["what"] for header in headers}) > 1:
            self.trace += 1
            said = "; ".join(f"rank {rank}: {header['what']}" for rank, header in enumerate(headers))
            raise DivergedBlock(f"the ranks start different traces: {said}. {_ADVICE}")
        if self.rank != 0:
            body = posts[0].partition(b"\n")[2]
            for name, size in headers[0]["sizes"].items():
                states[name] = torch.frombuffer(bytearray(body[:size]), dtype=torch.uint8)
                body = body[size:]
            self.set_random_state(states)

    # Random state

    def random_state(self) -> dict[str, Tensor]:
        """The states of torch's default generators by device type, as byte tensors on the CPU.

        `"cpu"` always; `"cuda"`, of the current device, once CUDA is in use.
        """
        states = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state()
        return states

    def set_random_state(self, states: dict[str, Tensor]) -> None:
        """Take over what :meth:`random_state` gave on another rank, or in the driver."""
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])

    # Errors

    def translate(self, error: Exception) -> Exception:
        """What to raise for `error`.

        A :class:`DivergedBlock` with `error` as its cause, if that says that a peer is late or gone, in our
        exchange or in the model's own collective; any other error as it is.
        """
        if isinstance(error, CollectiveError):
            whom = "a peer" if error.peer is None else f"rank {error.peer}"
            where = f"at {self.ledger.entries[-1]}" if self.ledger.entries else f"in exchange {error.key!r}"
            if isinstance(error, CollectiveTimeout):
                what = f"rank {self.rank} waited {error.seconds:.1f} s for {whom} {where}"
            else:
                what = f"rank {self.rank} and {whom} did not meet {where}: {error.what}"
        elif isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
            waited = re.search(r"Timed out waiting (\d+)ms", str(error))
            how = f"waited {int(waited[1]) / 1000:.1f} s for a peer" if waited else "lost a peer"
            what = f"rank {self.rank} {how} in the model's own collective, after {self.ledger}"
        else:
            return error
        diverged = DivergedBlock(f"{what}: the ranks did not run the same block. {_ADVICE}")
        diverged.__cause__ = error
        self._failed = True
        return diverged


_ADVICE = (
    "Every rank must run the same block on the same inputs: do not let the block, or whether it runs, depend"
    " on the rank or on anything else that differs between ranks. The next trace works: the groups are made"
    " anew before it."
)


def _ranks(numbers: Iterable[Any]) -> str:
    listed = [str(number) for number in numbers]
    return f"{'rank' if len(listed) == 1 else 'ranks'} {', '.join(listed)}"
