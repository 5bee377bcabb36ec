"""Every kernel compiles for sm_90 as it would be launched there, and no register is spilled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from boundary.kernels.add_norm import triton as add_norm
from boundary.kernels.norms import Kind, NormFormula

from .compiling import compiled, stated
from .interpreting import interpreted

STATED = stated()
VARIANTS = {
    f"{operation}-{variant.kernel.fn.__name__.strip('_')}-{index}": variant
    for operation, variants in STATED.items()
    for index, variant in enumerate(variants)
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is compiled here, and not found from before."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def test_every_operation_states_what_is_compiled():
    assert {"add_norm", "add_norm_quantize"} <= set(STATED)
    assert not [operation for operation, variants in STATED.items() if not variants]


@pytest.mark.parametrize("name", VARIANTS)
def test_it_compiles_without_spilling_a_register(name: str, tmp_path: Path):
    needed = compiled(VARIANTS[name], tmp_path)
    threads = 32 * VARIANTS[name].num_warps
    assert needed.spilled == 0 and needed.registers > 0, needed
    assert needed.registers * threads <= 65536 and needed.shared <= 48 << 10, needed


def test_a_spill_would_show(tmp_path: Path):
    longest = add_norm.LONGEST_PARAMETERS
    fitting = next(v for v in add_norm.COMPILED if v.kernel is add_norm._backward and v.constants["BLOCK"] == longest)
    assert compiled(fitting, tmp_path).spilled == 0
    crowded = replace(fitting, constants={**fitting.constants, "BLOCK": 2 * longest}, num_warps=32)
    assert compiled(crowded, tmp_path).spilled > 0


def test_what_was_interpreted_is_compiled_afterwards(tmp_path: Path):
    value = torch.ones(1, 16)
    with interpreted():
        assert add_norm.add_norm(value, value, NormFormula(Kind.RMS, None, 1e-6)) is not None
    assert compiled(add_norm.COMPILED[0], tmp_path).registers > 0
