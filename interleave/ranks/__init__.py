"""A driver process and the rank processes it starts: blocks go there, saved values come back.

In a script or a notebook the model lives in rank processes and this process holds an outline of it: the envoy
tree on meta tensors. A traced block is captured here, as nnsight does it, and sent to every rank; each runs it
against its own part of the model, in step with the others. Rank 0 sends back what the block saved and changed.

    start          starts the ranks for a `LoadRequest` and makes an outline their driver
    driver.py      packs a block, judges the replies, takes over the results
    fleet.py       asks all ranks, waits for all; errors, deaths, interrupts
    processes.py   the processes, their logs and their end
    rank.py        the program that each rank runs
    work.py        what is asked (a block, a call) and answered
    packing.py     what crosses, and how both sides name the same objects
    tensors.py     the bytes of tensors
    surroundings.py  random states and modes that travel with a block
    raised.py      exceptions with the user's frames
    console.py     a rank's streams
    channel.py     messages over a private socket

Under `torchrun`, and on one process, nothing of this is used.
"""

from .driver import Backend, Ranks, start

__all__ = ["Backend", "Ranks", "start"]
