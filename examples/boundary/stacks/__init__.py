"""Small decoders whose layers meet through `boundary`, and the same decoders written for one process.

* `parts`: compute modules, sharded by the package's linears; they know nothing of residuals or norms.
* `decoders`: the stacks: dense and MoE decoders, a hybrid of mixers, a shortcut branch, hyper-connections, a
  draft.
* `reference`: each of them unsharded, in a few lines, without the package.
* `worlds`: run a function on every rank of a topology, as threads or as gloo processes.

All values are binary fractions of few digits: norms and activations round to a grid. So every sum is exact in
float64, in whatever order it is taken, and a sharded result can be compared for equality.
"""
