"""What goes wrong in one request is told to the one who asked, with his line; the engine and the others go on."""

from __future__ import annotations

import functools
import inspect
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from vllm.exceptions import VLLMValidationError

from interleave.errors import DivergedBlock, InterleaveError, ShapeChanged
from interleave.nnsight_port import OutOfOrderError
from tests import harness
from tests.runtimes.vllm.engines import traced

pytestmark = pytest.mark.vllm

PROMPT = [5, 17, 3, 99, 42, 149, 8, 60, 120]


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    with traced("llama", request.param) as model:
        yield model


@pytest.fixture(autouse=True)
def the_engine_goes_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """After whatever a test did, a trace gives what it gave before, and no worker holds on to a request."""
    if "engine" not in request.fixturenames:
        yield
        return
    engine = request.getfixturevalue("engine")
    before = stream(engine)
    yield
    assert torch.equal(stream(engine), before)
    assert set(engine._ask("nnsight_request_count")) == {0}


def stream(engine: Any) -> torch.Tensor:
    with engine.trace(PROMPT):
        hidden = engine.model.layers[1].output.save()
    return hidden


class Own(Exception):
    """A user's exception, with a constructor that pickle cannot call."""

    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{why} ({code})")


def line_of(error: BaseException) -> tuple[str, str]:
    """The file and the text of the innermost line that the user sees."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename, last.line or ""


def test_an_exception_in_a_block_is_the_users_own(engine: Any) -> None:
    with pytest.raises(ZeroDivisionError) as raised, engine.trace(PROMPT):
        hidden = engine.model.layers[0].output
        hidden / (1 // 0)
    assert line_of(raised.value) == (__file__, "hidden / (1 // 0)")


def test_an_exception_of_the_users_type_arrives(engine: Any) -> None:
    with pytest.raises(Exception, match="no use") as raised, engine.trace(PROMPT):
        engine.model.layers[0].output
        raise Own(3, why="no use")
    assert "Own" in f"{type(raised.value).__name__}: {raised.value}"


def test_an_exception_in_a_called_function_shows_its_lines(engine: Any) -> None:
    def deep(hidden: torch.Tensor) -> torch.Tensor:
        raise KeyError("deep inside")

    with pytest.raises(KeyError) as raised, engine.trace(PROMPT):
        deep(engine.model.layers[0].output)
    frames = traceback.extract_tb(raised.value.__traceback__)
    assert [frame.name for frame in frames][-1] == "deep"
    assert [frame.filename for frame in frames][-2:] == [__file__, __file__]
    assert len(frames) < 5


def test_the_other_invokes_values_arrive(engine: Any) -> None:
    with pytest.raises(RuntimeError, match="mine alone"), engine.trace() as tracer:
        with tracer.invoke(PROMPT):
            first = engine.model.layers[1].output.save()
        with tracer.invoke(PROMPT[:4]):
            engine.model.layers[0].output
            raise RuntimeError("mine alone")
        with tracer.invoke(PROMPT[:3]):
            third = engine.model.layers[1].output.save()
    assert torch.equal(first, stream(engine))
    assert third.shape == (1, 3, 96)


def test_a_generation_ends_where_its_block_raised(engine: Any) -> None:
    steps: list[int] = []
    with pytest.raises(ValueError, match="third"), engine.generate(PROMPT, max_new_tokens=8, ignore_eos=True) as tracer:
        for step in tracer.iter[:8]:
            engine.model.layers[0].output
            steps.append(step)
            if step == 2:
                raise ValueError("third")
    assert steps == [0, 1, 2]


def test_stopping_is_silent_and_keeps_what_was_saved(engine: Any) -> None:
    with engine.trace(PROMPT) as tracer:
        hidden = engine.model.layers[0].output.save()
        tracer.stop()
        engine.model.layers[1].output.save()
    assert hidden.shape == (1, len(PROMPT), 96)
    with engine.generate(PROMPT, max_new_tokens=6) as tracer:
        seen = list().save()
        for step in tracer.iter[:6]:
            seen.append(engine.model.layers[0].output)
            if step == 1:
                tracer.stop()
    assert len(seen) == 2


@pytest.mark.parametrize(
    "replacement",
    [
        lambda hidden: hidden[:, :3],
        lambda hidden: hidden[..., :7],
        lambda hidden: (hidden, hidden),
        lambda hidden: None,
        lambda hidden: "words",
        lambda hidden: hidden.tolist(),
    ],
    ids=["rows", "features", "tuple", "None", "str", "list"],
)
@pytest.mark.parametrize("way", ["output", "input", "skip"])
def test_what_does_not_fit_is_refused_at_its_line(engine: Any, replacement: Any, way: str) -> None:
    with pytest.raises((InterleaveError, TypeError)) as raised, engine.trace(PROMPT):
        hidden = engine.model.embed_tokens.output
        mlp = engine.model.layers[0].mlp
        if way == "output":
            mlp.output = replacement(hidden)
        elif way == "input":
            mlp.input = replacement(hidden)
        else:
            mlp.skip(replacement(hidden))
        engine.lm_head.output.save()
    assert "replacement(hidden)" in line_of(raised.value)[1]


def at(engine: Any, path: str) -> Any:
    return functools.reduce(
        lambda envoy, name: envoy[int(name)] if name.isdigit() else getattr(envoy, name), path.split("."), engine
    )


def put(of: str, side: str, value: Any) -> Callable[[Any], None]:
    """Assigns at `engine.<of>.<side>`."""
    return lambda engine: setattr(at(engine, of) if of else engine, side, value)


def fill(of: str, value: float) -> Callable[[Any], None]:
    """Writes into the tensor at `engine.<of>`."""
    return lambda engine: at(engine, of).fill_(value)


ROWS = torch.zeros(1, len(PROMPT), 96)
SPOILED: dict[str, Callable[[Any], None]] = {
    "a tensor for a pair": put("model.layers.0.self_attn", "output", ROWS),
    "a pair for a tensor": put("model.norm", "output", (ROWS, ROWS)),
    "no arguments of a layer": put("model.layers.0", "inputs", ((), {})),
    "no arguments of a block": put("model.layers.0.mlp", "inputs", ((), {})),
    "None for the stack's output": put("model", "output", None),
    "None for the head's": put("lm_head", "output", None),
    "numbers for ids": put("model", "input", ROWS[..., 0]),
    "ids of no token": put("model", "input", torch.full((1, len(PROMPT)), 10**6)),
    "ids of no token, in place": fill("model.embed_tokens.input", 10**6),
    "ids of no token, raw": fill("model.embed_tokens.raw.input", 10**6),
    "samples of no token": lambda engine: setattr(engine, "samples", torch.full_like(engine.samples, 10**7)),
    "samples of no token, in place": fill("samples", 10**7),
    "words for samples": put("", "samples", "words"),
    "logits of another width": put("", "logits", torch.zeros(3)),
    "None for logits": put("", "logits", None),
    "half of a raw pair": put("model.layers.0.raw", "output", (ROWS[0],)),
    "words for a raw pair": put("model.layers.0.raw", "output", "words"),
    "None for a fused linear's": put("model.layers.0.self_attn.qkv_proj.raw", "output", None),
    "another shape for the attention's": put("model.layers.0.self_attn.attn", "output", torch.zeros(2, 2)),
    "other queries": put("model.layers.0.self_attn.attn", "input", torch.zeros(len(PROMPT), 5)),
    "the attention skipped": lambda engine: engine.model.layers[0].self_attn.attn.skip(None),
    "None for the rotated": put("model.layers.0.self_attn.rotary_emb", "output", None),
    "positions that are none": fill("model.layers.0.self_attn.rotary_emb.input", 10**6),
    "None for the sampled logits": put("logits_processor", "output", None),
    "another request's logits": fill("logits_processor.output", 0.0),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_what_would_break_the_engine_is_its_own_requests_error(engine: Any, spoil: Callable[[Any], None]) -> None:
    with (
        pytest.raises((InterleaveError, OutOfOrderError)),
        engine.generate(max_new_tokens=2, ignore_eos=True) as tracer,
    ):
        with tracer.invoke(PROMPT[:4]):
            other = engine.model.layers[1].output.save()
        with tracer.invoke(PROMPT):
            spoil(engine)
            engine.lm_head.output
    with engine.trace(PROMPT[:4]):
        expected = engine.model.layers[1].output.save()
    assert harness.difference(expected, other) == ""


def test_a_write_that_the_model_would_not_see_is_refused(engine: Any) -> None:
    with pytest.raises(InterleaveError, match=r"q_proj\.output` after the engine had gone on"), engine.trace(PROMPT):
        query = engine.model.layers[0].self_attn.q_proj.output
        engine.model.layers[0].self_attn.k_proj.output
        query[:] = 0
        engine.model.layers[0].output
    with (
        pytest.raises(InterleaveError, match=r"embed_tokens\.output` after the engine had gone on"),
        engine.trace(PROMPT),
    ):
        embedded = engine.model.embed_tokens.output
        engine.model.layers[0].input
        embedded *= 2
        engine.lm_head.output


def test_a_block_may_change_what_the_model_is_done_with(engine: Any) -> None:
    with engine.trace(PROMPT):
        first = engine.model.layers[0].output.save()
        engine.model.layers[1].output
        first /= first.norm()
        logits = engine.lm_head.output.save()
        logits[:] = 0
    assert float(first.norm()) == pytest.approx(1, abs=1e-5)
    assert not logits.any()


def test_what_is_inside_a_skipped_module_does_not_happen_for_its_request(engine: Any) -> None:
    with pytest.raises(OutOfOrderError, match="gate_proj"), engine.trace() as tracer:
        with tracer.invoke(PROMPT[:4]):
            other = engine.model.layers[0].mlp.gate_proj.output.save()
        with tracer.invoke(PROMPT):
            engine.model.layers[0].mlp.skip(ROWS)
            engine.model.layers[0].mlp.gate_proj.output
    assert other.shape == (1, 4, 144)
    with engine.trace(PROMPT) as tracer:
        cache = tracer.cache()
        engine.model.layers[0].mlp.skip(ROWS)
    assert torch.equal(cache["model.model.layers.0.mlp"].output, ROWS)
    assert "model.model.layers.0.mlp.gate_proj" not in cache
    assert "model.model.layers.1.mlp.gate_proj" in cache


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("way", ["output", "input", "skip", "in place"])
def test_a_replacement_of_another_dtype_is_taken_in_the_models(engine: Any, dtype: torch.dtype, way: str) -> None:
    def edited(dtype: torch.dtype) -> torch.Tensor:
        with engine.trace(PROMPT):
            new = torch.full((1, len(PROMPT), 96), 2.0, dtype=dtype)
            mlp = engine.model.layers[0].mlp
            if way == "output":
                mlp.output = new
            elif way == "input":
                mlp.input = new
            elif way == "skip":
                mlp.skip(new)
            else:
                mlp.output[:] = new
            hidden = engine.model.layers[1].output.save()
        return hidden

    assert torch.equal(edited(dtype), edited(torch.float32))


def test_a_location_that_never_comes_is_told_at_its_line(engine: Any) -> None:
    with pytest.raises(OutOfOrderError, match=r"layers\.0\.output") as raised, engine.trace(PROMPT):
        engine.model.layers[1].output.save()
        engine.model.layers[0].output.save()
    assert line_of(raised.value) == (__file__, "engine.model.layers[0].output.save()")


def test_a_loop_that_asks_for_more_steps_than_there_are_warns(engine: Any) -> None:
    with pytest.warns(UserWarning, match="never reached"), engine.generate(PROMPT, max_new_tokens=2) as tracer:
        seen = list().save()
        for _ in tracer.iter[:5]:
            seen.append(engine.model.layers[0].output)
    assert len(seen) == 2


def test_what_cannot_travel_is_named(engine: Any) -> None:
    file = Path(__file__).open()  # noqa: SIM115 - it is to be open
    with file, pytest.raises(InterleaveError, match="'file'"), engine.trace(PROMPT):
        engine.model.layers[0].output
        file.read()
    with pytest.raises(InterleaveError, match="'frame'"), engine.trace(PROMPT):
        engine.model.layers[0].output
        frame = inspect.currentframe().save()  # noqa: F841 - saved
    del file


def test_unknown_options_are_named(engine: Any) -> None:
    with pytest.raises(InterleaveError, match="'temprature'"), engine.trace(PROMPT, temprature=1.0):
        engine.model.layers[0].output.save()
    with pytest.raises(InterleaveError, match="'temprature'"), engine.trace() as tracer:
        with tracer.invoke(PROMPT, temprature=1.0):
            engine.model.layers[0].output.save()
    with pytest.raises(InterleaveError, match="'temprature'"):
        engine.generate(PROMPT, temprature=1.0)


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        [[]],
        [PROMPT, []],
        [999999],
        list(range(3, 147)) * 2,
        [-4, 5],
        torch.ones(2, 2, 2, dtype=torch.long),
        17,
        None,
        "words",
        [1.5, 2.5],
    ],
    ids=[
        "empty",
        "list of empty",
        "one of two",
        "unknown id",
        "too long",
        "negative",
        "three dims",
        "number",
        "None",
        "text",
        "floats",
    ],
)
def test_a_prompt_that_is_none_is_refused(engine: Any, prompt: Any) -> None:
    with pytest.raises((InterleaveError, VLLMValidationError)), engine.trace(prompt):
        engine.model.layers[0].output.save()


def test_one_bad_prompt_of_several_leaves_nothing_behind(engine: Any) -> None:
    with pytest.raises((ValueError, InterleaveError)), engine.trace([PROMPT, [999999], PROMPT[:3]]):
        engine.model.layers[0].output.save()
    assert not engine.vllm_entrypoint.llm_engine.has_unfinished_requests()


def test_an_invoke_without_a_prompt_is_refused(engine: Any) -> None:
    with pytest.raises(InterleaveError, match="without a prompt"), engine.trace() as tracer:
        with tracer.invoke(PROMPT):
            engine.model.layers[0].output.save()
        with tracer.invoke():
            engine.model.layers[1].output.save()


def test_the_engine_computes_without_gradients(engine: Any) -> None:
    with pytest.raises((InterleaveError, RuntimeError, NotImplementedError)), engine.trace(PROMPT):
        hidden = engine.model.layers[0].output
        engine.lm_head.output.sum().backward()
        hidden.grad.save()


def test_an_error_after_the_result_is_the_requests(engine: Any) -> None:
    with pytest.raises(ZeroDivisionError), engine.generate(PROMPT, max_new_tokens=2) as tracer:
        tracer.result.save()
        1 // 0


def test_what_the_block_catches_is_no_error(engine: Any) -> None:
    with engine.trace(PROMPT):
        engine.model.layers[0].input
        try:
            engine.model.layers[0].mlp.output = torch.zeros(1, 2, 3)
        except ShapeChanged:
            caught = True
        hidden = engine.model.layers[1].output.save()
        flag = torch.tensor(caught).save()
    assert flag and torch.equal(hidden, stream(engine))


def resident(engine: Any) -> list[int]:
    """The bytes of memory that each rank uses."""
    ranks = engine.vllm_entrypoint.llm_engine.model_executor.workers
    return [int(Path(f"/proc/{rank.proc.pid}/statm").read_text().split()[1]) * 4096 for rank in ranks]


def test_many_traces_leave_nothing_behind(engine: Any) -> None:
    def some(count: int) -> None:
        for number in range(count):
            kept = []
            with engine.trace([PROMPT, PROMPT[:3]]):
                kept.append(engine.model.layers[0].output.save())
                weight = torch.ones(64, 1024)
                engine.model.layers[1].mlp.output[:] += weight.sum() * 0
                if number % 5 == 0:
                    engine.model.layers[1].output.save()
            fails = number % 10 == 0
            expected = pytest.raises(InterleaveError, match="Own: again") if fails else nullcontext()
            with expected, engine.trace(PROMPT):
                engine.model.layers[0].output.save()
                if number % 10 == 0:
                    raise Own(1, why="again")

    some(30)
    before = resident(engine)
    some(150)
    after = resident(engine)
    assert set(engine._ask("nnsight_request_count")) == {0}
    assert all(new - old < 4 << 20 for old, new in zip(before, after, strict=True)), (before, after)


def test_a_block_that_only_one_rank_runs_is_told_in_time_and_the_next_trace_works() -> None:
    with traced("llama", 2, limit=3.0) as engine:
        before = stream(engine)
        start = time.monotonic()
        with pytest.raises(DivergedBlock), engine.trace(PROMPT):
            engine.model.layers[0].input
            if torch.distributed.get_rank() == 0:
                engine.model.layers[0].mlp.gate_proj.output.save()
        assert time.monotonic() - start < 20
        for _ in range(2):
            assert torch.equal(stream(engine), before)
            with engine.trace(PROMPT):
                gate = engine.model.layers[0].mlp.gate_proj.output.save()
            assert gate.shape == (1, len(PROMPT), 144)
