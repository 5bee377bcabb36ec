"""The example that runs one block on two runtimes, as `make demo-vllm` runs it, and its judge."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.beside import Script

pytestmark = pytest.mark.vllm

EXAMPLE = Path(__file__).parents[3] / "examples" / "two_runtimes.py"
DEMO = Script(EXAMPLE, OMP_NUM_THREADS="1")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("two_runtimes", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["two_runtimes"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=cwd, check=False, env=environment)


@DEMO.looked_at
def test_one_block_gives_the_same_values_on_transformers_and_vllm():
    result = DEMO.ended()
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split("│")[1:-1] for line in result.stdout.splitlines() if line.count("│") == 5]
    compared = {row[0].strip(): [float(cell) for cell in row[2:]] for row in rows if " x " in row[1]}
    assert len(compared) == 6
    assert all(len(differences) == 2 and max(differences) < 1e-4 for differences in compared.values())
    # Runtimes that compute with other kernels never agree to the last bit: zeros would mean that nothing was compared.
    assert all(max(differences) > 0 for differences in compared.values())
    assert "cold 75%" in result.stdout
    assert "in one batch" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("equal")


def test_a_degree_that_cannot_work_ends_in_words(tmp_path: Path):
    result = run("--tp", "2", cwd=tmp_path)
    assert result.returncode == 2
    assert "9" in result.stdout and "heads" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("broken", [torch.tensor([1.0, torch.nan]), torch.tensor([[1.0, 2.0]])])
def test_the_judge_passes_neither_a_nan_nor_another_shape(example: ModuleType, broken: torch.Tensor):
    assert example.difference(broken, torch.tensor([1.0, 2.0])) == torch.inf


def test_the_judge_keeps_the_worst_prompt(example: ModuleType):
    expected = [{"a": torch.tensor([1.0, -4.0])}, {"a": torch.tensor([8.0])}]
    found = [{"a": torch.tensor([1.5, -4.0])}, {"a": torch.tensor([9.0])}]
    assert example.compare(found, expected) == {"a": 0.125}
    assert example.compare([found[0], expected[1]], expected) == {"a": 0.125}
    assert example.compare(expected, expected) == {"a": 0.0}
