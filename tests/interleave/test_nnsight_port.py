"""The contract with nnsight: what this project leans on is there and means what it meant."""

from __future__ import annotations

import ast
import gc
import inspect
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from interleave import nnsight_port as port


def test_the_interleaver_has_the_parts_that_handle_works_with() -> None:
    interleaver = port.Interleaver()
    assert interleaver.counts == {}
    assert interleaver.parked == set()
    assert interleaver.observers == {}
    assert interleaver.batcher is None
    assert interleaver.defer_exceptions is False
    assert interleaver.fragments is None
    assert interleaver._ready("nowhere") == []
    interleaver._reindex_parked()
    for name in ("handle", "instrument", "reindex", "cancel", "check_dangling_mediators"):
        assert callable(getattr(interleaver, name))


def test_a_mediator_parks_on_a_pending_request() -> None:
    assert port.Pending._fields == ("event", "provider", "iteration", "value")
    parameters = inspect.signature(port.Mediator.switch).parameters
    assert list(parameters) == ["self", "args"]
    mediator = port.Mediator(compile("pass", "block", "exec"), {}, {})
    assert mediator.pending is None
    assert mediator.iteration == 0
    assert mediator.batch_group is None
    assert mediator.caches == []


class Doubling(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_a_module_flagged_body_forward_keeps_its_wrapper_inside_the_controller() -> None:
    module = Doubling()
    inner = module.forward
    module.forward = lambda x: inner(x) + 1  # type: ignore[method-assign]
    module.__dict__[port.BODY_FORWARD] = True
    envoy = port.Envoy(module)
    with envoy.trace(torch.ones(2)):
        seen = envoy.output.save()
    assert seen.tolist() == [3.0, 3.0], "the value outside the wrapper is served"
    assert isinstance(module.__dict__["forward"], port.Controller)


def test_the_worker_of_a_block_can_be_told_of_an_error_and_go_on() -> None:
    told: list[str] = []

    class Refusing(port.Interleaver):
        def handle(self, provider: str, value: object) -> object:
            if provider == "model.0.output":
                (mediator,) = self._ready(provider)
                mediator.worker.parent = port.getcurrent()
                mediator.pending = mediator.worker.throw(ValueError("refused"))
                self._reindex_parked()
            return super().handle(provider, value)

    envoy = port.Envoy(torch.nn.Sequential(Doubling(), Doubling()), interleaver=Refusing())
    with envoy.trace(torch.ones(1)):
        first = envoy[0]
        try:
            first.output.save()
        except ValueError as error:
            told.append(str(error))
        after = envoy[1].output.save()
    assert told == ["refused"]
    assert after.tolist() == [4.0]


def test_nothing_here_imports_nnsights_own_tensor_parallelism() -> None:
    program = (
        "import sys, interleave, runtimes.transformers\n"
        "print([name for name in sys.modules if name.startswith('nnsight.modeling.tp')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


class Cycle:
    """Garbage that only a collection finds, and whose finalizer lets another thread run."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(1e-5)


def test_threads_may_read_the_source_of_their_blocks_at_the_same_instant() -> None:
    source = Path(__file__).read_text()
    failed: list[BaseException] = []

    def parse(depth: int) -> None:
        if depth:
            return parse(depth - 1)
        try:
            for _ in range(20):
                for _ in range(20):
                    Cycle()
                port.Tracer.__new__(port.Tracer).parse(source, 1)
        except BaseException as error:
            failed.append(error)

    thresholds = gc.get_threshold()
    gc.set_threshold(50)
    try:
        threads = [threading.Thread(target=parse, args=(5 * index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*thresholds)
    assert failed == []


def test_no_other_part_of_nnsights_that_is_used_builds_syntax_trees() -> None:
    root = Path(port.nnsight.__file__).parent
    found = {
        (str(path.relative_to(root)), function.name)
        for path in root.rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef) and "ast.parse(" in ast.unparse(function)
    }
    assert found == {
        ("tracing/tracer.py", "parse"),
        ("tracing/tracer.py", "_parse_block"),  # of `parse`
        ("intervention/source.py", "source_tree"),
        ("intervention/serialization.py", "_referenced_names"),
        ("intervention/serialization.py", "_lambda_source"),
        ("modeling/vllm/serve/server.py", "_build_tracer"),  # nnsight's own server
    }
