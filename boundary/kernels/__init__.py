"""The operations of a boundary that are one pass over the data where torch makes several.

A directory is one operation:

* `naive.py` is its definition, in plain torch; every other file is judged by it.
* `triton.py` is the kernel for GPUs, and `cpu.py` the path through the compiled library, where these pay; each takes
  what it can do as defined and answers None to all else.
* the directory itself is the dispatcher: it offers the operation to whoever is called, and chooses.

The numbers mean the same whichever way is taken: sums are accumulated in float32 (float64 where the tensors are),
the norm is taken of the sum before it is rounded, and each result is rounded once.
"""
