"""Each script of `examples/boundary` runs, and says that every rank equals one process."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "boundary"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))


def test_every_kind_of_stack_has_an_example():
    names = {script.stem for script in SCRIPTS}
    assert names == {"dense", "draft", "hybrid", "hyper_connections", "moe", "pipeline", "shortcut"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_script_runs(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines and all("equal on" in line for line in lines)
