"""What holds for all tests of the kernels: memory that nobody has written is full of NaN."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN, so that whatever reads or returns it shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert math.isnan(torch.empty(1).item())
        yield
    finally:
        torch.use_deterministic_algorithms(before)
