"""A driver and two real ranks: what a block saves, changes, prints and raises there is as if it had run here."""

from __future__ import annotations

import ast
import gc
import linecache
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import interleave
from interleave import nnsight_port as port
from interleave.errors import DivergedBlock, InterleaveError, RankDied
from interleave.ranks.fleet import Fleet
from tests.models import tiny

IDS = torch.arange(3, 12)[None]


@pytest.fixture(scope="module")
def held() -> Iterator[list]:
    """The only place that holds the tiny Llama on two ranks."""
    held = [interleave.load(tiny("llama"), tp=2, dtype="float32", limit=12.0)]
    yield held
    for model in held:
        model.close()


@pytest.fixture
def model(held: list) -> Any:
    return held[0]


@pytest.fixture(scope="module")
def local() -> Any:
    """The same on one process."""
    return interleave.load(tiny("llama"), dtype="float32")


@pytest.fixture
def on_both(model: Any, local: Any) -> Any:
    """Runs a test's block on the ranks and here: `on_both(block)` gives the two results."""
    return lambda block: (block(model), block(local))


def pids(model: Any) -> list[int]:
    return [handler.proc.pid for handler in model.ranks._fleet._processes._handlers.values()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def soon(condition: Any, seconds: float = 10.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def works(model: Any, local: Any) -> bool:
    """Whether a trace that needs collectives is right, at every place where an earlier one may have ended."""
    values = []
    for each in (model, local):
        with each.trace(IDS):
            gates = [layer.mlp.gate_proj.output.detach() for layer in each.model.layers]
            gates = port.save(torch.stack(gates))
        values.append(gates)
    return torch.allclose(values[0], values[1], rtol=1e-5, atol=1e-5)


class Results:
    """A plain object of a caller."""

    def __init__(self) -> None:
        self.stale = 1
        self.kept: list = []


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


class OwnError(Exception):
    """An exception class whose constructor does not take what it keeps."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code


def helper(value: torch.Tensor) -> torch.Tensor:
    # A line that only the user's source has.
    return value @ torch.ones(3, 4)


# -- what comes back ----------------------------------------------------------------------------------------


def test_saved_names_are_bound_and_unsaved_ones_are_not(model: Any, local: Any) -> None:
    assert works(model, local)
    with model.trace(IDS):
        unsaved = model.model.layers[0].output
        saved = (unsaved * 1).save()
    assert saved.shape == (1, 9, 48)
    assert "unsaved" not in locals()


def test_outer_containers_are_changed_in_place_and_keep_their_identity(model: Any) -> None:
    outs: list = []
    nested = {"inner": outs, "old": 1}
    names = {"a"}
    results, slotted, array, ordered = Results(), Slotted(), np.zeros(3), bytearray(b"ab")
    before = results.kept
    with model.trace(IDS):
        hidden = model.model.layers[0].output.save()
        outs.append(hidden)
        nested["inner"].append([hidden, outs])
        del nested["old"]
        nested["new"] = {"deep": results}
        names.add("b")
        results.kept.append("x")
        results.fresh = names
        del results.stale
        slotted.value = 7
        array[1] = 5.0
        ordered.extend(b"c")
    assert outs[0] is hidden
    assert outs[1][0] is hidden
    assert outs[1][1] is outs
    assert nested["inner"] is outs
    assert "old" not in nested
    assert nested["new"]["deep"] is results
    assert names == {"a", "b"}
    assert results.kept is before
    assert results.kept == ["x"]
    assert results.fresh is names  # type: ignore[attr-defined]
    assert not hasattr(results, "stale")
    assert slotted.value == 7
    assert array.tolist() == [0.0, 5.0, 0.0]
    assert ordered == b"abc"


def test_an_outer_tensor_that_the_block_writes_changes_in_place(model: Any) -> None:
    plain, through_data, expanded = torch.zeros(4), torch.zeros(30_000), torch.zeros(1, 1).expand(3, 1)
    row = plain[1:3]
    untouched = torch.zeros(2)
    versions = plain._version, untouched._version
    with model.trace(IDS):
        row[0] = 3.0
        through_data.data[7] = 4.0
        expanded.data[0, 0] = 5.0
        untouched + 1
    assert plain.tolist() == [0.0, 3.0, 0.0, 0.0]
    assert through_data[7] == 4.0
    assert through_data.sum() == 4.0
    assert expanded.tolist() == [[5.0]] * 3
    assert plain._version > versions[0]
    assert untouched._version == versions[1]


def test_saved_tensors_are_detached_on_the_cpu_and_own_no_more_memory_than_they_show(model: Any) -> None:
    big = torch.zeros(1000, 1000)
    with torch.enable_grad(), model.trace(IDS):
        logits = model.lm_head.output.save()
        corner = (big + 1)[::500, ::500].save()
        full = (big + 2).save()
    assert not logits.requires_grad
    assert logits.device.type == "cpu"
    assert corner.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert corner.untyped_storage().nbytes() == 16
    assert (full == 2).all()
    assert full.shape == (1000, 1000)
    logits[0] = 0


def test_tensors_that_shared_memory_on_the_rank_share_it_here(model: Any) -> None:
    with model.trace(IDS):
        whole = model.model.layers[0].output.clone().save()
        tail = whole[:, -1].save()
        same = whole.save()
    assert same is whole
    whole[:, -1] = 17.0
    assert (tail == 17.0).all()


def test_model_outputs_and_caches_come_back_attached_to_the_drivers_tree(on_both: Any) -> None:
    def block(model: Any) -> Any:
        with model.trace(IDS) as tracer:
            cache = tracer.cache(modules=[model.model.layers[0].mlp, "model.model.layers.1"])
            output = model.output.save()
        assert cache._cache.model is model
        value = cache.model.model.layers[0].mlp.output
        assert cache["model.model.layers.0.mlp"].output is value
        return value.detach(), output.logits.detach()

    for driven, alone in zip(*on_both(block), strict=True):
        assert torch.allclose(driven, alone, rtol=1e-5, atol=1e-5)


# -- what goes there ----------------------------------------------------------------------------------------


def test_a_captured_module_is_sent_once_and_a_changed_one_again(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = torch.nn.Linear(48, 1000)
    sent: list[int] = []
    ask = Fleet.ask

    def recording(self: Fleet, kind: str, body: Any, arena: int | None = None) -> Any:
        sent.append(0 if arena is None else os.fstat(arena).st_size)
        return ask(self, kind, body, arena)

    monkeypatch.setattr(Fleet, "ask", recording)

    def score() -> torch.Tensor:
        with model.trace(IDS):
            score = probe(model.model.layers[0].output).save()
            hidden = model.model.layers[0].output.save()
        assert torch.allclose(score, probe(hidden).detach(), atol=1e-5)
        return score

    first = score()
    assert torch.equal(score(), first)
    with torch.no_grad():
        probe.weight.data[0, 0] += 1
    assert not torch.equal(score(), first)
    weight = probe.weight.numel() * 4
    assert sent[0] >= weight
    assert sent[1] == 0
    assert sent[2] >= weight


def test_a_module_trained_in_the_block_is_trained_here(model: Any) -> None:
    probe = torch.nn.Linear(48, 1)
    optimizer = torch.optim.Adam(probe.parameters(), lr=0.1)
    weight, before = probe.weight, probe.weight.detach().clone()
    with torch.enable_grad(), model.trace(IDS):
        probe(model.model.layers[0].output.detach()).sum().backward()
        optimizer.step()
    assert probe.weight is weight
    assert not torch.equal(probe.weight, before)
    assert probe.weight.grad is not None
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize(
    "make",
    [threading.Lock, lambda: Path(__file__).open(), lambda: (x for x in ())],  # noqa: SIM115
    ids=["lock", "file", "generator"],
)
def test_what_cannot_cross_is_refused_by_name_and_line_before_anything_is_sent(
    model: Any, local: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    obstacle = make()
    monkeypatch.setattr(Fleet, "ask", lambda *_: pytest.fail("something was sent"))
    line = sys._getframe().f_lineno + 1
    with pytest.raises(InterleaveError, match="obstacle") as caught, model.trace(IDS):
        print(obstacle)
    assert f"{__file__}:{line}" in str(caught.value)
    if hasattr(obstacle, "close"):
        obstacle.close()
    monkeypatch.undo()
    assert works(model, local)


def test_what_cannot_come_back_is_refused_by_name(model: Any, local: Any) -> None:
    with pytest.raises(InterleaveError, match="'lock'"), model.trace(IDS):
        lock = port.save(threading.Lock())  # noqa: F841
    assert works(model, local)


def test_random_numbers_are_those_of_one_process_and_go_on_from_there(on_both: Any) -> None:
    def block(model: Any) -> list:
        torch.manual_seed(3)
        random.seed(4)
        np.random.seed(5)
        with model.trace(IDS):
            drawn = [torch.rand(2).tolist(), random.random(), float(np.random.rand())].save()
        with model.generate(IDS, max_new_tokens=4, do_sample=True) as tracer:
            ids = tracer.result.save()
        return [drawn, ids.tolist(), torch.rand(1).item(), random.random(), float(np.random.rand())]

    driven, alone = on_both(block)
    assert driven == alone


def test_modes_around_the_block_travel(model: Any) -> None:
    with torch.no_grad(), model.trace(IDS):
        off = [model.lm_head.output.requires_grad].save()
    with torch.enable_grad(), model.trace(IDS):
        on = [model.lm_head.output.requires_grad].save()
    with torch.inference_mode(), model.trace(IDS):
        inference = [torch.is_inference_mode_enabled()].save()
    assert (off, on, inference) == ([False], [True], [True])


def test_rank_0_prints_and_the_others_do_not(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with model.trace(IDS):
        print("seen", model.model.layers[0].output.shape)
        print("whispered", file=sys.stderr, end="")
    captured = capsys.readouterr()
    assert captured.out == "seen torch.Size([1, 9, 48])\n"
    assert captured.err == "whispered"


# -- the other ways to run ----------------------------------------------------------------------------------


def test_calls_sessions_edits_and_invokes_run_on_the_ranks(on_both: Any) -> None:
    def block(model: Any) -> list[torch.Tensor]:
        values = [model.generate(IDS, max_new_tokens=3), model.trace(IDS, trace=False).logits]
        with model.session():
            with model.trace(IDS):
                hidden = model.model.layers[0].mlp.gate_proj.output
            with model.trace(IDS):
                model.model.layers[0].mlp.gate_proj.output = hidden * 2
                twice = model.lm_head.output.save()
        values.append(twice)
        with model.edit() as (tracer, edited):
            edited.model.layers[0].output[:] = 0
        with edited.trace(IDS):
            values.append(edited.lm_head.output.save())
        with model.trace(IDS):
            values.append(model.lm_head.output.save())
        values.append(edited.trace(IDS, trace=False).logits)
        with model.trace() as tracer:
            with tracer.invoke(IDS):
                one = model.lm_head.output.save()
            with tracer.invoke(IDS + 1):
                model.model.layers[1].output[:] = 1
                other = model.lm_head.output.save()
        return [*values, one, other]

    driven, alone = on_both(block)
    assert len(driven) == len(alone) == 8
    for ours, theirs in zip(driven, alone, strict=True):
        assert torch.allclose(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-5)


def test_an_edit_made_in_place_inside_a_session_stays_on_the_model(on_both: Any) -> None:
    def block(model: Any) -> torch.Tensor:
        with model.session():
            with model.edit(inplace=True):
                model.model.layers[1].output[:] = 0
            with model.trace(IDS):
                model.lm_head.output.save()
        edited = model.trace(IDS, trace=False).logits
        model.clear_edits()
        assert not torch.equal(model.trace(IDS, trace=False).logits, edited)
        return edited

    driven, alone = on_both(block)
    assert torch.allclose(driven.detach(), alone.detach(), rtol=1e-5, atol=1e-5)


def test_two_threads_take_turns(model: Any) -> None:
    seen: list = []

    def run(value: int) -> None:
        with model.trace(IDS + value):
            first = model.model.embed_tokens.input.save()
        seen.append((value, int(first[0, 0])))

    threads = [threading.Thread(target=run, args=(value,)) for value in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [(0, 3), (1, 4), (2, 5)]


# -- errors -------------------------------------------------------------------------------------------------


def test_an_error_has_the_users_line_and_no_plumbing(model: Any) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught, model.trace(IDS):
        hidden = model.model.layers[0].output.save()

        # The lines above this one do not shift it.
        hidden = hidden @ torch.ones(
            3,
            4,
        )
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.filename == __file__
    assert linecache.getline(__file__, last.lineno or 0).strip() == "hidden = hidden @ torch.ones("


def test_an_error_in_a_function_of_the_caller_has_its_line(model: Any) -> None:
    def inner(value: torch.Tensor) -> torch.Tensor:
        return helper(value)

    with pytest.raises(RuntimeError) as caught, model.trace(IDS):
        inner(model.model.layers[0].output)
    frames = traceback.extract_tb(caught.value.__traceback__)[-2:]
    assert [frame.name for frame in frames] == ["inner", "helper"]
    assert frames[-1].line == "return value @ torch.ones(3, 4)"


def test_an_exception_that_does_not_pickle_is_named(model: Any, local: Any) -> None:
    with pytest.raises(InterleaveError, match=r"OwnError: too hot \(3\)"), model.trace(IDS):
        raise OwnError(3, "too hot")
    with pytest.raises(KeyError, match="nothing"), model.trace(IDS):
        {}["nothing"]
    assert works(model, local)


@pytest.mark.parametrize("stop", [breakpoint, input, lambda: __import__("pdb").set_trace()])
def test_stopping_for_the_user_says_how_to_debug(model: Any, local: Any, stop: Any) -> None:
    with pytest.raises(InterleaveError, match="tp=1"), model.trace(IDS):
        stop()
    assert works(model, local)


def test_ranks_that_raise_different_errors_raise_one_with_notes(model: Any, local: Any) -> None:
    with pytest.raises(ValueError, match="on 0") as caught, model.trace(IDS):
        raise ValueError(f"on {os.environ['RANK']}")
    assert caught.value.__notes__ == ["rank 1 raised ValueError: on 1"]
    assert works(model, local)


@pytest.mark.parametrize("odd", ["0", "1"])
def test_a_rank_that_raises_alone_ends_the_block_for_all_and_its_error_is_shown(
    model: Any, local: Any, odd: str
) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match="only here") as caught, model.trace(IDS):
        if os.environ["RANK"] == odd:
            raise ValueError("only here")
        model.lm_head.output.save()
    assert traceback.extract_tb(caught.value.__traceback__)[-1].line == 'raise ValueError("only here")'
    assert any("DivergedBlock" in note or "only rank" in note for note in caught.value.__notes__)
    assert time.monotonic() - started < 12.0
    assert works(model, local)


def test_a_rank_that_reads_alone_is_found_out(model: Any, local: Any) -> None:
    with pytest.raises(DivergedBlock), model.trace(IDS):
        if os.environ["RANK"] == "0":
            model.model.layers[0].mlp.gate_proj.output.save()
    assert works(model, local)


# -- interrupts, deaths, the end ------------------------------------------------------------------------------


@pytest.mark.parametrize("sleepers", ["01", "0"], ids=["all sleep", "one waits in a collective"])
def test_ctrl_c_stops_the_ranks_and_keeps_the_model(model: Any, local: Any, sleepers: str) -> None:
    before = pids(model)
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), model.trace(IDS):
        if os.environ["RANK"] in sleepers:
            time.sleep(100)
        model.lm_head.output.save()
    timer.join()
    assert time.monotonic() - started < 12.0
    assert works(model, local)
    assert pids(model) == before


def test_a_killed_rank_is_reported_and_the_next_trace_starts_new_ones(
    model: Any, local: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    before = pids(model)
    threading.Timer(1.0, os.kill, (before[1], signal.SIGKILL)).start()
    with pytest.raises(RankDied, match="rank 1 was killed by SIGKILL"), model.trace(IDS):
        time.sleep(100)
    assert soon(lambda: not any(map(is_running, before)))
    assert works(model, local)
    assert "starting 2 new ranks" in capfd.readouterr().err
    assert not set(pids(model)) & set(before)


def test_a_forked_child_is_refused_and_leaves_the_ranks_alone(model: Any, local: Any) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with model.trace(IDS):
                model.lm_head.output.save()
        except InterleaveError as error:
            os.write(writing, str(error).encode())
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert b"forked" in os.read(reading, 1000)
    os.close(reading)
    os.close(writing)
    assert works(model, local)


def test_a_model_that_nobody_holds_ends_its_ranks(held: list) -> None:
    running, directory = pids(held[0]), held[0].ranks._fleet._processes.directory
    held.clear()
    gc.collect()
    assert soon(lambda: not any(map(is_running, running)))
    assert not directory.exists()


PLAIN = """
import sys
import torch
import interleave

ids = torch.arange(3, 12)[None]
model = interleave.load(sys.argv[1], tp=2, dtype="float32")
with model.trace(ids):
    norm = model.model.layers[0].mlp.gate_proj.output.norm().save()
processes = model.ranks._fleet._processes
pids = [handler.proc.pid for handler in processes._handlers.values()]
model.close()
model.close()
try:
    with model.trace(ids):
        model.lm_head.output.save()
except interleave.InterleaveError as error:
    print(repr((float(norm), pids, str(processes.directory), str(error))))
"""


def test_a_plain_script_needs_no_guard_and_a_closed_model_refuses(tmp_path: Path, local: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(PLAIN)
    with local.trace(IDS):
        truth = local.model.layers[0].mlp.gate_proj.output.norm().save()
    command = [sys.executable, str(script), str(tiny("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    norm, started, directory, error = ast.literal_eval(done.stdout)
    assert norm == pytest.approx(truth.item(), rel=1e-5)
    assert not any(map(is_running, started))
    assert not Path(directory).exists()
    assert "closed" in error


WAITING = """
import time
from interleave.load import LoadRequest
from interleave.ranks.fleet import Fleet

processes = Fleet(LoadRequest("nothing", tp=2))._processes
print(repr(([handler.proc.pid for handler in processes._handlers.values()], str(processes.directory))), flush=True)
time.sleep(1000)
"""


def test_no_rank_outlives_a_killed_driver(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WAITING)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            started, directory = ast.literal_eval(driver.stdout.readline())
            assert all(map(is_running, started))
        finally:
            driver.kill()
    assert soon(lambda: not any(map(is_running, started)))
    assert soon(lambda: not Path(directory).exists())
