"""The checks of `tests.benchmarks.gpu`, interpreted here, so that they are ready where there is a GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from boundary.kernels import gpu as launching
from boundary.kernels.add_norm import triton as add_norm
from boundary.kernels.all_reduce_add_norm import triton as all_reduce
from boundary.kernels.reduce_scatter_add_norm import triton as reduce_scatter
from boundary.kernels.silu_mul import triton as silu
from tests.benchmarks import gpu
from tests.benchmarks.kernels import Table
from tests.pool import ROOT

from .compiling import stated
from .interpreting import interpreted

CPU = torch.device("cpu")
SHAPES = [(0, 7, False), (2, 33, True)]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(all_reduce, "PROGRAMS", 3)
    monkeypatch.setattr(reduce_scatter, "PROGRAMS", 3)
    with interpreted():
        yield


class Endless(BaseException):
    """Which no check takes for a wrong kernel."""


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """Ends a test in which a rank waits for a flag that nobody raises."""

    def late(*_: object) -> None:
        raise Endless("a kernel does not end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(120)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_the_checks_launch_every_kernel_and_find_nothing_wrong(monkeypatch: pytest.MonkeyPatch):
    launched, launch = set(), launching.launch

    def noted(kernel: Any, *arguments: Any, **options: Any) -> None:
        launched.add(kernel)
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(launching, "launch", noted)
    assert gpu.run_checks(CPU, SHAPES, gpu.DTYPES) == []
    every = {variant.kernel for variants in stated().values() for variant in variants}
    assert {kernel.fn.__name__ for kernel in every - launched} == set()


def test_a_kernel_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch):
    forward = add_norm.add_norm
    monkeypatch.setattr(gpu, "CHECKS", {"add_norm": gpu.check_add_norm})

    def off(*arguments: Any) -> Any:
        made = forward(*arguments)
        assert made is not None
        return made[0] * 1.0001, made[1]

    monkeypatch.setattr(add_norm, "add_norm", off)
    (found,) = gpu.run_checks(CPU, [(2, 7, False)], [torch.float32])
    assert found.startswith("add_norm of [2, 7] float32: rms: off by up to")
    monkeypatch.setattr(add_norm, "add_norm", lambda *_: None)
    (found,) = gpu.run_checks(CPU, [(2, 7, False)], [torch.float32])
    assert "the kernel declined" in found


def test_a_kernel_that_raises_is_named_and_the_other_cases_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gpu, "CHECKS", {"add_norm": gpu.check_add_norm, "silu_mul": gpu.check_silu_mul})
    forward = add_norm.add_norm

    def raises(value: torch.Tensor, *arguments: Any) -> Any:
        if value.dtype == torch.bfloat16:
            raise RuntimeError("out of resource:\n shared memory")
        return forward(value, *arguments)

    monkeypatch.setattr(add_norm, "add_norm", raises)
    monkeypatch.setattr(silu, "silu_mul", lambda *_: None)
    found = gpu.run_checks(CPU, [(2, 7, False)], [torch.bfloat16, torch.float32])
    assert found[0] == "add_norm of [2, 7] bfloat16: RuntimeError: out of resource: shared memory"
    assert [line.split(":")[0] for line in found[1:]] == ["silu_mul of [2, 7] bfloat16", "silu_mul of [2, 7] float32"]
    # After an error that ends all that the device does, nothing else could be right.
    monkeypatch.setattr(gpu, "works", lambda device: False)
    first, last = gpu.run_checks(CPU, [(2, 7, False)], [torch.bfloat16, torch.float32])
    assert first == found[0] and "runs nothing any more" in last


def test_a_device_works_unless_it_raises():
    assert gpu.works(CPU)
    assert torch.cuda.is_available() or not gpu.works(torch.device("cuda"))


class Event:
    """An event that happens when it is recorded."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> gpu.Bench:
    """What is timed, in a size and by a clock for the interpreter."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    sizes = {
        "NORMED": [(3, 16)],
        "OTHER": (3, 16),
        "COMPLETED": [(8, 16)],
        "SHOTS": [64, 128],
        "SHOT_HIDDEN": 16,
        "PROGRAM_COUNTS": [2, 5],
    }
    for name, size in (sizes | {"ROUNDS": 1, "FLUSH": 1 << 10, "COPIED": 1 << 14}).items():
        monkeypatch.setattr(gpu, name, size)
    return gpu.Bench(CPU, time.monotonic() + 60, Table())


def test_what_is_timed_runs_and_is_right(small: gpu.Bench, capsys: pytest.CaptureFixture[str]):
    for part in (gpu.norms, gpu.others, gpu.completions, gpu.shots, gpu.two_gpus):
        part(small)
    printed = capsys.readouterr().out
    for row in ("add_norm [3, 16]", "int8 by row", "by tensor", "backward", "silu_mul", "moe_finalize_add_norm of 8",
                "gather_rows", "scatter_rows", "mix of 4", "collapse of 4", "8 terms [8, 16]", "a rank's own rows",
                "5 programs", "TWO_SHOTS from", "two ranks: not run"):  # fmt: skip
        assert row in printed
    assert "wrong" not in printed and "the time is over" not in printed


def test_what_there_is_no_time_for_is_missed(small: gpu.Bench, capsys: pytest.CaptureFixture[str]):
    small.until = time.monotonic()
    gpu.norms(small)
    gpu.completions(small)
    printed = capsys.readouterr().out
    assert small.table.missed == printed.count("not run: the time is over") > 5


def test_without_a_gpu_it_says_so_and_exits_with_2():
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.gpu"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "there is no CUDA GPU here" in done.stderr
