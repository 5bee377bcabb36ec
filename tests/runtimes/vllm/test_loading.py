"""What cannot work is said before an engine starts; what was started ends."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

import interleave
from interleave.errors import InterleaveError, Unshardable
from tests.beside import Script
from tests.runtimes.vllm.checkpoints import tiny
from tests.runtimes.vllm.engines import OPTIONS, surroundings, traced

pytestmark = pytest.mark.vllm

PROMPT = [5, 17, 3, 99]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tp": 5}, Unshardable, "12 attention heads.* 1, 2, 3, 6, 12"),
        ({"tp": 4}, Unshardable, "6 key-value heads"),
        ({"dp": 2}, Unshardable, "dp=2"),
        ({"cp": 2}, Unshardable, "cp=2"),
        ({"tp": 3, "ep": 2}, Unshardable, "ep=2"),
        ({"tp": 2, "ep": 2}, Unshardable, "take no notice of which experts"),
        ({"max_modle_len": 64}, InterleaveError, "'max_modle_len'.*'max_model_len'"),
        ({"tensor_parallel_size": 2}, InterleaveError, "tp="),
        ({"mode": "fast"}, InterleaveError, "'fast'"),
        ({"taps": ["model.layers.*.output"], "enforce_eager": True}, InterleaveError, "taps"),
        ({"enforce_eager": False}, InterleaveError, "taps"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_said_before_an_engine_starts(options: dict[str, Any], error: type, words: str) -> None:
    start = time.monotonic()
    with pytest.raises(error, match=words):
        interleave.load(tiny("llama"), runtime="vllm", **options)
    assert time.monotonic() - start < 5


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InterleaveError, match=str(tmp_path)):
        interleave.load(tmp_path, runtime="vllm")


def test_without_vllm_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    with pytest.raises(InterleaveError, match="pip install"):
        interleave.load(tiny("llama"), runtime="vllm")


def test_layouts_are_told_by_huggingfaces_names() -> None:
    with traced("llama", 2) as model:
        assert model.layout("model.layers.0.output") == "whole"
        assert "tp" in model.layout("model.layers.0.mlp.gate_proj.output")
        assert "tp" in model.layout("model.layers.0.self_attn.q_proj.output")
        with pytest.raises(InterleaveError, match="nowhere"):
            model.layout("model.nowhere")
        shown = repr(model)
        assert "q_proj" in shown and "gate_proj" in shown


def test_an_alias_of_huggingfaces_can_be_told() -> None:
    with traced("gpt-oss") as model:
        assert model.layout("model.layers.0.self_attn.output") == "whole"
        assert model.layout("model.model.layers.0.mlp.router") == model.layout("model.layers.0.mlp.router.output")


def test_closing_ends_the_processes_and_a_closed_model_refuses() -> None:
    with surroundings():
        with interleave.load(tiny("llama"), runtime="vllm", tp=2, **OPTIONS) as model:
            ranks = [rank.proc for rank in model.vllm_entrypoint.llm_engine.model_executor.workers]
            assert all(rank.is_alive() for rank in ranks) and len(ranks) == 2
            arenas = Path(model.arenas.path)
            assert arenas.is_dir()
        assert not arenas.exists()
        assert not any(rank.is_alive() for rank in ranks)
        model.close()
        with pytest.raises(InterleaveError, match="closed"), model.trace(PROMPT):
            model.model.layers[0].output.save()
        with pytest.raises(InterleaveError, match="closed"):
            model.generate(PROMPT)
        with pytest.raises(InterleaveError, match="closed"), model.edit():
            model.model.layers[0].output.save()


SCRIPT = """
import sys
import interleave

model = interleave.load(
    sys.argv[1], runtime="vllm", dtype="float32", max_model_len=64, skip_tokenizer_init=True,
    kv_cache_memory_bytes=64 << 20,
)
with model.trace([5, 17, 3]):
    hidden = model.model.layers[0].output.save()
print("shape", tuple(hidden.shape), flush=True)
print("arenas", model.arenas.path, flush=True)
"""


GUARDLESS = Script(
    Path("guardless.py"), str(tiny("llama")), text=SCRIPT, VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1"
)


@GUARDLESS.looked_at
def test_a_script_needs_no_guard_and_ends_with_all_that_it_started() -> None:
    """As users write it: no `if __name__ == "__main__"`, although vLLM spawns its ranks, and no `close`."""
    ended = GUARDLESS.ended()
    assert ended.returncode == 0, ended.stderr
    told = dict(line.split(" ", 1) for line in ended.stdout.splitlines() if line.startswith(("shape", "arenas")))
    assert told["shape"] == "(1, 3, 96)"
    assert not Path(told["arenas"]).exists()
