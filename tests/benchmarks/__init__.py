"""Benchmarks: `python -m tests.benchmarks.NAME`. Ratios from one run, both sides interleaved, medians, and the
correctness gate green in the same process before a number is printed."""
