"""Handoffs that a sequence of prepare and finish cannot express, and hooks for particular compute.

* `attention`: attention that takes slices and gathers its latents instead of its rows.
* `cp`: how token order is dealt out over context-parallel ranks, and put back.
* `lora`: which rows LoRA runs on.
* `tbo`: two microbatches that overlap.
* `branch`: a stage sequence beside the main stack.
"""
