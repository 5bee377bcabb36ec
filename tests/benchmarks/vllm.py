"""What blocks cost in a serving engine: SmolLM2, a batch of 32 prompts, next to the same batch without a block.

    python -m tests.benchmarks.vllm [--rounds N] [--tp 1 --tp 3] [--plain]

Every figure is the median of ratios within rounds that run all sides one after the other, in one engine; absolute times
on shared machines mean nothing. Nothing is printed unless what was captured equals transformers' within 1e-4, every
prompt its own rows. `--plain` starts vLLM's own engine, without our worker, beside ours.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import nnsight
import torch
import typer
from transformers import AutoModelForCausalLM

import interleave
from runtimes.transformers.smollm2 import smollm2

TOLERANCE = 1e-4
NEW = 8
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 32,
    "enable_prefix_caching": False,
    # Room for all prompts, and for a second engine beside the first.
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 256 << 20,
    "use_tqdm_on_load": False,
}
#: Ratio -> the target for it.
TARGETS = {"captured": 1.25, "steered": 1.10}

Batch = list[list[int]]
Streams = list[list[torch.Tensor]]

#: nnsight's own wrapper on this model; prints how that ended.
NNSIGHT = """
import os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
from nnsight.modeling.vllm import VLLM
try:
    VLLM(sys.argv[1], dispatch=True, dtype="float32", max_model_len=256, distributed_executor_backend="uni")
    print("runs here")
except BaseException as error:
    print(f"does not run here: {type(error).__name__}: {error}")
sys.stdout.flush()
os._exit(0)
"""


def prompts() -> Batch:
    """32 prompts of 20 to 60 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 61, (32,), generator=generator)
    return [torch.randint(100, 40000, (int(length),), generator=generator).tolist() for length in lengths]


def bare(engine: Any, batch: Batch, tokens: int = 1) -> list[list[int]]:
    """The batch, as a client of vLLM's own submits it; the tokens it gives."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    requests: list[Any] = [{"prompt_token_ids": ids} for ids in batch]
    return [list(output.outputs[0].token_ids) for output in engine.generate(requests, params, use_tqdm=False)]


def captured(model: Any, batch: Batch) -> Streams:
    """The residual stream after every layer, of every token of every prompt."""
    with model.trace(batch):
        streams = nnsight.save([layer.output for layer in model.model.layers])
    return streams


def captured_in_generation(model: Any, batch: Batch, tokens: int) -> Streams:
    """The same in every step of a generation: by prompt, the layers' streams step after step."""
    with model.generate(batch, max_tokens=tokens, ignore_eos=True) as tracer:
        streams = nnsight.save([])
        for _ in tracer.iter[:tokens]:
            streams.extend([layer.output for layer in model.model.layers])
    return streams


def steered(model: Any, batch: Batch, tokens: int = 1) -> None:
    """One layer of every prompt steered."""
    with model.trace(batch, max_tokens=tokens, ignore_eos=True):
        model.model.layers[15].output[:] += 0.5


def reference(batch: Batch, generated: Batch) -> Streams:
    """The residual stream after every layer, by transformers: each prompt's, and then that of each step that follows it
    in a generation of these tokens (the last is not computed with)."""
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.float32)
    found: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, args, output: found.append(output))
    streams = []
    with torch.no_grad():
        for ids, new in zip(batch, generated, strict=True):
            found.clear()
            model(torch.tensor([ids + new[:-1]]))
            steps = [slice(0, len(ids)), *(slice(place, place + 1) for place in range(len(ids), len(ids + new) - 1))]
            streams.append([stream[:, step] for step in steps for stream in found])
    return streams


def steering(model: Any, ids: Any) -> torch.Tensor:
    """What becomes of the last layer's stream as one is steered."""
    with torch.no_grad(), model.trace(ids):
        model.model.layers[15].output[:] += 0.5
        stream = model.model.layers[-1].output.save()
    return stream


def check(found: Streams, expected: Streams) -> float:
    """The largest relative difference of all values; raises if one is not its own prompt's."""
    worst = 0.0
    assert len(found) == len(expected)
    for streams, references in zip(found, expected, strict=True):
        for stream, truth in zip(streams, references, strict=True):
            assert stream.shape == truth.shape, (stream.shape, truth.shape)
            worst = max(worst, float((stream - truth).abs().nan_to_num(nan=torch.inf).max() / truth.abs().max()))
    if worst > TOLERANCE:
        raise SystemExit(f"captured values differ from transformers' by {worst:.1e}")
    return worst


def ratios(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Each side's seconds over those of the first, the median over rounds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            times[name].append(time.perf_counter() - start)
    first = next(iter(times.values()))
    return {
        name: statistics.median(own / bare for own, bare in zip(series, first, strict=True))
        for name, series in times.items()
    }


def report(title: str, found: dict[str, float], targets: dict[str, float]) -> None:
    print(f"  {title}")
    for name, ratio in list(found.items())[1:]:
        target = f"  (target {targets[name]:.2f})" if name in targets else ""
        print(f"    {name:32} {ratio:5.2f}{target}", flush=True)


def main(
    rounds: Annotated[int, typer.Option(help="How often each side runs.")] = 7,
    tp: Annotated[list[int] | None, typer.Option(help="Ranks; may be given several times.")] = None,
    plain: Annotated[bool, typer.Option(help="Start vLLM's own engine beside ours.")] = False,
) -> None:
    """What blocks cost in a serving engine."""
    batch = prompts()
    expected: Streams = []
    alone = interleave.load(smollm2(), dtype="float32")
    for degree in tp or [1, 3]:
        with interleave.load(smollm2(), runtime="vllm", tp=degree, **OPTIONS) as model:
            engine = model.vllm_entrypoint
            tokens = bare(engine, batch, NEW)
            expected = expected or reference(batch, tokens)
            layers = len(model.model.layers)
            worst = check(captured(model, batch), [streams[:layers] for streams in expected])
            worst = max(worst, check(captured_in_generation(model, batch, NEW), expected))
            worst = max(worst, check([[steering(model, batch[0])]], [[steering(alone, torch.tensor(batch[:1]))]]))
            steered(model, batch)
            print(f"{degree} ranks, {len(batch)} prompts of {sum(map(len, batch))} tokens in all")
            print(f"  captured values equal transformers' within {worst:.1e}")
            sides: dict[str, Callable[[], Any]] = {
                "bare": lambda engine=engine: bare(engine, batch),
                "captured": lambda model=model: captured(model, batch),
                "steered": lambda model=model: steered(model, batch),
            }
            report("one forward, over the bare batch", ratios(sides, rounds), TARGETS)
            sides = {
                "bare": lambda engine=engine: bare(engine, batch, NEW),
                "captured": lambda model=model: captured_in_generation(model, batch, NEW),
                "steered": lambda model=model: steered(model, batch, NEW),
            }
            report(f"{NEW} tokens generated, over the bare batch", ratios(sides, rounds), {})
            if plain:
                from vllm import LLM

                theirs = LLM(str(smollm2()), tensor_parallel_size=degree, enforce_eager=True, **OPTIONS)
                assert bare(theirs, batch, NEW) == tokens, "the engines disagree"
                sides = {
                    "bare": lambda theirs=theirs: bare(theirs, batch),
                    "our worker, no block": lambda engine=engine: bare(engine, batch),
                }
                report("one forward, over vLLM's own engine", ratios(sides, rounds), {})
                theirs.llm_engine.engine_core.shutdown()
    command = [sys.executable, "-c", NNSIGHT, str(smollm2())]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in tried.stdout.splitlines() if "run" in line and "here" in line]
    print(f"nnsight's own vLLM wrapper {lines[-1] if lines else f'ended with {tried.returncode}'}")


if __name__ == "__main__":
    typer.run(main)
