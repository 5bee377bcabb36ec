"""How ranks wait for each other in `boundary/kernels/meeting.py`, as a model of which every order of steps is tried.

A rank is a list of atomic steps: it writes a slot, raises a flag at a peer once that is down, takes down its own flag
for a peer once that is up, and reads a peer's slot. The flags and the slots are all that ranks share. A protocol holds
if in no order a rank reads another call's value, and in no state before the end everybody waits. A call has one shot or
two, as an all-reduce; a reduce-scatter is one shot of which a rank may read less, and nobody waits for a read.
"""

from __future__ import annotations

import pytest

ONE, TWO, MIXED = (1, 1, 1, 1), (2, 2, 2, 2), (1, 2, 2, 1)

Step = tuple[str, int, int, int]
State = tuple[tuple[int, ...], frozenset[tuple[int, int]], frozenset[tuple[int, int, int, int]]]


def steps(rank: int, size: int, shots: tuple[int, ...], slots: int, leave_out: str) -> list[Step]:
    """`(what, peer or region, slot, call)` of one program of a rank, in its order; `shots` are each call's."""
    peers = [(rank + step) % size for step in range(1, size)]
    made: list[Step] = []
    for call, regions in enumerate(shots):
        slot = call % slots
        for region in range(regions):
            made.append(("write", region, slot, call))
            made += [("raise", peer, 0, call) for peer in peers]
            made += [("await", peer, 0, call) for peer in peers]
            made += [(f"read {region}", peer, slot, call) for peer in peers]
    return [step for step in made if step[0] != leave_out]


def fault(size: int, shots: tuple[int, ...], *, slots: int = 2, leave_out: str = "", careless: bool = False) -> str:
    """What goes wrong in some order of the ranks' steps; empty if nothing does. `careless`: flags are raised that are
    still up."""
    programs = [steps(rank, size, shots, slots, leave_out) for rank in range(size)]
    start: State = ((0,) * size, frozenset(), frozenset())
    seen, open_states = {start}, [start]
    while open_states:
        places, flags, values = open_states.pop()
        successors: list[State] = []
        for rank, program in enumerate(programs):
            if places[rank] == len(program):
                continue
            what, peer, slot, call = program[places[rank]]
            after = flags, values
            if what == "write":
                kept = {value for value in values if value[:3] != (rank, peer, slot)}
                after = flags, frozenset(kept | {(rank, peer, slot, call)})
            elif what == "raise":
                if (peer, rank) in flags and not careless:
                    continue
                after = flags | {(peer, rank)}, values
            elif what == "await":
                if (rank, peer) not in flags:
                    continue
                after = flags - {(rank, peer)}, values
            elif (peer, int(what[-1]), slot, call) not in values:
                return f"rank {rank} reads another call's value"
            successors.append((places[:rank] + (places[rank] + 1,) + places[rank + 1 :], *after))
        if not successors and any(place < len(program) for place, program in zip(places, programs, strict=True)):
            return "everybody waits"
        if not successors and flags and not leave_out:
            return "a flag is up at the end"
        for state in successors:
            if state not in seen:
                seen.add(state)
                open_states.append(state)
    return ""


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shots", [ONE, TWO, MIXED])
def test_no_order_of_steps_goes_wrong(size: int, shots: tuple[int, ...]):
    assert fault(size, shots) == ""


def test_what_it_rests_on_is_needed():
    assert "reads" in fault(2, ONE, slots=1)
    assert fault(2, TWO, slots=1) == ""  # its second meeting separates the calls
    assert "reads" in fault(2, MIXED, slots=1)
    assert "reads" in fault(2, ONE, leave_out="await")
    assert fault(2, ONE, leave_out="raise") == "everybody waits"
    assert fault(2, ONE, careless=True) == "everybody waits"
