"""The demo, as `make demo` runs it, and its judge."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.beside import Script

EXAMPLE = Path(__file__).parent.parent / "examples" / "logit_lens.py"
DEMO = Script(EXAMPLE)


@pytest.fixture(scope="module")
def logit_lens() -> ModuleType:
    spec = importlib.util.spec_from_file_location("logit_lens", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["logit_lens"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLE), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        check=False,
    )


@DEMO.looked_at
def test_the_demo_prints_the_lens_draws_it_and_agrees_with_one_process():
    result = DEMO.ended()
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [line.split("│")[1:] for line in result.stdout.splitlines() if line.count("│") == 7]
    assert [int(row[0]) for row in rows] == list(range(30))
    assert rows[-1][1].split() == ["Paris", "77%"]
    assert "head 23.4" in result.stdout
    assert result.stdout.splitlines()[-1].endswith("equal")
    assert (DEMO.folder / "out" / "logit-lens.png").read_bytes().startswith(b"\x89PNG")


def test_a_path_that_is_no_model_ends_in_an_error(tmp_path: Path):
    result = run(str(tmp_path / "nothing"), cwd=tmp_path)
    assert result.returncode != 0
    assert "nothing" in result.stderr


def test_the_judge_finds_the_largest_relative_difference(logit_lens: ModuleType):
    expected = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([[10.0]])}
    near = {"a": torch.tensor([1.5, -4.0]), "b": torch.tensor([[10.5]])}
    assert logit_lens.largest_difference(near, expected) == (0.125, "a")
    assert logit_lens.largest_difference(expected, expected)[0] == 0


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_judge_never_passes_a_nan(logit_lens: ModuleType, name: str):
    expected = {"a": torch.tensor([1.0, -4.0]), "b": torch.tensor([[10.0]])}
    broken = expected | {name: torch.full_like(expected[name], torch.nan)}
    assert logit_lens.largest_difference(broken, expected) == (torch.inf, name)


def test_the_judge_does_not_compare_values_of_other_shapes(logit_lens: ModuleType):
    with pytest.raises(AssertionError, match="a"):
        logit_lens.largest_difference({"a": torch.ones(1, 2)}, {"a": torch.ones(2)})


class Tokenizer:
    def decode(self, tokens: list[int]) -> str:
        return [" Paris", "ing", " ", "\n", "  ", "漢"][tokens[0]]


@pytest.mark.parametrize(("token", "shown"), [(0, "Paris"), (1, "ing"), (2, "␣"), (3, "↵"), (4, "␣␣"), (5, "�")])
def test_every_token_is_visible(logit_lens: ModuleType, token: int, shown: str):
    assert logit_lens.word(Tokenizer(), token) == shown
