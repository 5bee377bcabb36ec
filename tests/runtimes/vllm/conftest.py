"""The tests of the vLLM runtime are there where vLLM is (`make test-vllm`).

vLLM's own imports warn, and so does its engine as it starts; in these tests, that and nothing else is no error.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest

#: Whose warnings they are: torch's inductor of torch.jit, and vLLM's look at every attribute of torch's modules.
IGNORED = [
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:`torch.distributed.reduce_op` is deprecated:FutureWarning",
]
INSTALLED = importlib.util.find_spec("vllm") is not None

collect_ignore_glob = [] if INSTALLED else ["*"]

if INSTALLED:
    from tests.runtimes.vllm import processes

    processes.start()  # it imports vLLM while this process does
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.entrypoints.llm  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for ignored in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(ignored))
