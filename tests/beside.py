"""Scripts that run beside the tests.

A script in a process of its own takes long and needs little: it waits for imports and for ranks to start. So all that
the selected tests look at are run from the first test on, one after another and at a lower priority than the tests;
the tests that look at how they ended come last.

    LENS = Script(EXAMPLE)

    @LENS.looked_at
    def test_the_demo(): assert LENS.ended().returncode == 0
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import pytest

MARK = "beside"
#: Seconds after which a script is killed.
LIMIT = 400


class Script:
    """One run of a script in a directory of its own.

    Args:
        path: The script. Relative: a new one in that directory, which reads `text`.
        arguments: What it is given.
        text: The script itself, where there is no file of it.
        environment: Is added to this process's.
    """

    def __init__(self, path: Path, *arguments: str, text: str | None = None, **environment: str) -> None:
        self.path, self.arguments, self.text, self.environment = path, arguments, text, environment

    @cached_property
    def folder(self) -> Path:
        """Where it runs."""
        folder = Path(tempfile.mkdtemp(prefix="beside-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder

    @cached_property
    def looked_at(self) -> pytest.MarkDecorator:
        """Marks the test that looks at it."""
        return pytest.mark.beside(self)

    def ended(self) -> subprocess.CompletedProcess[str]:
        """How it ended; waits for that. Raises TimeoutExpired if it ran too long."""
        return self._run.result()

    def start(self) -> None:
        """Have it run when those before it have ended."""
        _ = self._run

    @cached_property
    def _run(self) -> Future[subprocess.CompletedProcess[str]]:
        return _thread.submit(self._wait)

    def _wait(self) -> subprocess.CompletedProcess[str]:
        path = self.folder / self.path
        if self.text is not None:
            path.write_text(self.text)
        command = ["nice", "-n", "5", sys.executable, str(path), *self.arguments]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.folder,
            env=os.environ | self.environment, start_new_session=True,
        ) as process:  # fmt: skip
            _running.add(process.pid)
            try:
                # Whoever is left holds the pipes open, and this waits for it.
                stdout, stderr = process.communicate(timeout=LIMIT)
            except BaseException:
                _kill(process.pid)
                raise
            finally:
                _running.discard(process.pid)
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


_thread = ThreadPoolExecutor(1, "beside")
#: The process groups that run.
_running: set[int] = set()


def scripts(item: pytest.Item) -> list[Script]:
    return [mark.args[0] for mark in item.iter_markers(MARK)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that look at scripts come last."""
    items.sort(key=lambda item: bool(scripts(item)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the scripts of the selected tests."""
    if not session.config.option.collectonly:
        for item in session.items:
            for script in scripts(item):
                script.start()


def pytest_sessionfinish() -> None:
    """End what still runs."""
    _thread.shutdown(wait=False, cancel_futures=True)
    for group in tuple(_running):
        _kill(group)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
