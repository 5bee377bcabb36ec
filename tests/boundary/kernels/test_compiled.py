"""The library: compiled once, for this machine, by whoever comes first; and everything works without it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from boundary import compiled
from tests.pool import ROOT


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compiler that does not optimize, for tests of what becomes of a library and not of what it computes."""
    command = tmp_path_factory.mktemp("compiler") / "cc"
    compiler = " ".join(map(shlex.quote, compiled._compiler()))
    command.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
    command.chmod(0o755)
    return str(command)


def run(code: str, tmp_path: Path, **environment: str) -> str:
    """What a fresh process prints that runs `code` with a cache of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


ASK = "from boundary.compiled import *; print(library() is not None, fingerprint())"


def test_processes_that_start_together_compile_once(tmp_path: Path, quick: str):
    with ThreadPoolExecutor(3) as pool:
        answers = set(pool.map(lambda _: run(ASK, tmp_path, CC=quick), range(3)))
    assert len(answers) == 1 and answers.pop().startswith("True ")
    (library,) = (tmp_path / "unsharded").glob("*.so")
    made = library.stat().st_mtime_ns
    assert run(ASK, tmp_path, CC=quick).startswith("True ") and library.stat().st_mtime_ns == made
    assert {path.suffix for path in (tmp_path / "unsharded").iterdir()} <= {".so", ".lock"}


@pytest.mark.parametrize("compiler", ["/nonexistent", "false"])
def test_without_a_working_compiler_there_is_no_library_and_no_error(tmp_path: Path, compiler: str):
    code = (
        "import logging; logging.basicConfig(level=logging.INFO, format='%(message)s');"
        "from boundary.compiled import *; from boundary.shared_memory import available;"
        "print(library(), dtypes(), repr(fingerprint()), repr(available(2)))"
    )
    assert run(code, tmp_path, CC=compiler) == "None {} '' ''"
    assert not list(tmp_path.glob("unsharded/*.so"))


def test_a_library_is_made_where_the_cache_cannot_be_written(tmp_path: Path, quick: str):
    assert run(ASK, tmp_path, XDG_CACHE_HOME="/proc/nowhere", CC=quick).startswith("True ")


def test_another_compiler_makes_another_library(tmp_path: Path):
    cc = compiled._compiler()
    assert compiled._digest(cc) == compiled._digest(cc) != compiled._digest([*cc, "-g0"])
    other = tmp_path / "cc"
    other.write_bytes(Path(cc[0]).read_bytes())
    assert compiled._digest([str(other)]) != compiled._digest(cc)


@pytest.mark.parametrize("name", compiled.SOURCES)
def test_the_sources_compile_without_a_warning(name: str):
    """Compiled in full, because `-fsyntax-only` names no unused function; with the least optimization that finds what
    is not initialized."""
    folder = Path(compiled.__file__).parent
    assert sorted(path.name for path in folder.glob("*.[ch]")) == sorted(compiled.SOURCES + compiled.HEADERS)
    command = [*compiled._compiler(), *compiled.FLAGS, "-Wall", "-Wextra", "-Werror", "-O1", "-S"]
    subprocess.run([*command, str(folder / name), "-o", os.devnull], check=True, timeout=120)


KERNELS = """
import torch
from boundary.kernels.add_norm import add_norm, naive
from boundary.kernels.norms import Kind, NormFormula
torch.manual_seed(0)
value, residual = torch.randn(2, 3, 17)
formula = NormFormula(Kind.RMS, torch.randn(17), 1e-6)
made, wanted = add_norm(value, residual, formula), naive.add_norm(value, residual, formula)
print(all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True)))
"""


def test_without_a_library_kernels_are_their_definitions(tmp_path: Path):
    assert run(KERNELS, tmp_path, CC="/nonexistent") == "True"


GROUPS = """
import os, sys, tempfile
import torch, torch.distributed as dist, torch.multiprocessing as mp

def rank_main(rank, path, compilers):
    os.environ["CC"] = compilers[rank]
    torch.set_num_threads(1)
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    from boundary import Topology
    from boundary.kernels.all_reduce_add_norm import all_reduce_add_norm
    from boundary.parallel import from_torch_distributed
    from interleave.groups import Groups
    groups = [from_torch_distributed(Topology(attention_tp=2), 20.0).tp]
    groups.append(Groups(dist.PrefixStore("g", store), 20.0).ours([0, 1]))
    for group in groups:
        assert group.all_reduce(torch.full((3,), rank + 1.0)).tolist() == [3.0] * 3
        made = all_reduce_add_norm(torch.full((2, 3), rank + 1.0), group, torch.ones(2, 3), None, "k")[1]
        assert made.tolist() == [[4.0] * 3] * 2
    if rank == 0:
        print(*(type(group).__name__ for group in groups), flush=True)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder + "/store", sys.argv[1:]), nprocs=2)
"""


@pytest.mark.parametrize(
    ("compilers", "kinds"),
    [
        (("/nonexistent", "/nonexistent"), "GlooGroup SocketGroup"),
        (("cc", "/nonexistent"), "GlooGroup SocketGroup"),
    ],
    ids=["none", "one"],
)
def test_ranks_share_memory_only_if_all_have_one_library(tmp_path: Path, compilers: tuple[str, str], kinds: str):
    program = tmp_path / "program.py"
    program.write_text(GROUPS)
    done = subprocess.run(
        [sys.executable, str(program), *compilers],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == kinds
