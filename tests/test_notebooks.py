"""The notebooks run in a real kernel, and what is committed in them is what they print.

`python -m tests.test_notebooks` (`make notebooks`) runs them and stores their output.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples" / "notebooks").glob("*.ipynb"))


def execute(path: Path, folder: Path) -> NotebookNode:
    """The notebook with the output of a fresh kernel that works in `folder`; raises at the first cell that does.

    Without what went to stderr: progress bars differ from run to run, and warnings name the machine's paths.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources, record_timing=False).execute()
    for cell in code_cells(notebook):
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: NotebookNode) -> list[list[str]]:
    """Per code cell what it printed and returned; of a picture that it was drawn, not its pixels."""
    return [
        [
            output.text
            if output.output_type == "stream"
            else "a picture"
            if "image/png" in output.data
            else output.data["text/plain"]
            for output in cell.outputs
        ]
        for cell in code_cells(notebook)
    ]


def test_there_is_a_notebook():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_kernel_prints_what_the_committed_notebook_shows(path: Path, tmp_path: Path):
    committed = printed(nbformat.read(path, as_version=4))
    assert ["a picture"] in committed
    assert printed(execute(path, tmp_path)) == committed, "`make notebooks` stores the output anew"


if __name__ == "__main__":
    for path in NOTEBOOKS:
        nbformat.write(execute(path, path.parent), path)
        print(path.name)
