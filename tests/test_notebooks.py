"""The notebooks run in a real kernel, and what is committed in them is what they print."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))


def printed(notebook: NotebookNode) -> list[list[str]]:
    """Per code cell what it printed and returned. Not its progress bars, nor the pixels of its pictures."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        [
            output.text if output.output_type == "stream" else output.data["text/plain"]
            for output in cell.outputs
            if output.get("name") != "stderr" and "image/png" not in output.get("data", {})
        ]
        for cell in cells
    ]


def pictures(notebook: NotebookNode) -> int:
    return sum(
        "image/png" in output.get("data", {})
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )


def test_there_is_a_notebook():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_kernel_prints_what_the_committed_notebook_shows(path: Path, tmp_path: Path):
    committed = nbformat.read(path, as_version=4)
    executed = nbformat.read(path, as_version=4)
    # `execute` raises at the first cell that does.
    NotebookClient(
        executed, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    assert printed(executed) == printed(committed), "`make notebooks` stores the output anew"
    assert pictures(executed) == pictures(committed) > 0
