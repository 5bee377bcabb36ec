"""What the documentation shows runs: the Python of each page, top to bottom, as one script in a process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.beside import Script

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def script(page: Path) -> str:
    """The page's Python, each line at the line it has on the page, so that a traceback points there."""
    text = page.read_text()
    lines = [""] * len(text.splitlines())
    for fence in FENCE.finditer(text):
        first = text.count("\n", 0, fence.start(1))
        code = fence.group(1).splitlines()
        lines[first : first + len(code)] = code
    return "\n".join(lines) + "\n"


RUNNABLE = [page for page in PAGES if script(page).strip()]
# Under a name of its own: a bare `transformers.py` would stand in for the library.
SCRIPTS = {page: Script(Path(f"page_{page.stem}.py"), text=script(page)) for page in RUNNABLE}
#: The vLLM runtime's page needs vLLM.
MARKED = [
    pytest.param(page, marks=[SCRIPTS[page].looked_at, *([pytest.mark.vllm] if page.stem == "vllm" else [])])
    for page in RUNNABLE
]


def test_the_pages_that_show_code_are_found():
    assert {page.name for page in RUNNABLE} >= {"README.md", "index.md", "pieces.md", "transformers.md"}


@pytest.mark.parametrize("page", MARKED, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs(page: Path):
    result = SCRIPTS[page].ended()
    assert result.returncode == 0, f"{page.relative_to(ROOT)}:\n{result.stdout}\n{result.stderr}"


def test_the_site_builds_without_a_warning(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "site" / "index.html").is_file()
