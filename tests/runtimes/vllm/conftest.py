"""The tests of the vLLM runtime are collected where vLLM is installed (`make test-vllm`).

Its imports take ten seconds and raise one warning, of torch's, which is no error here.
"""

from __future__ import annotations

import importlib.util
import warnings

INSTALLED = importlib.util.find_spec("vllm") is not None

collect_ignore_glob = [] if INSTALLED else ["*"]

if INSTALLED:
    from tests.runtimes.vllm import processes

    processes.start()  # it imports vLLM while this process does
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script_method` is deprecated", DeprecationWarning)
        import vllm.entrypoints.llm  # noqa: F401
