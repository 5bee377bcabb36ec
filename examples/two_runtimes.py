"""One block, on transformers and on vLLM.

The function `block` knows nothing of either: it reads the residual stream, queries and a gate, silences a head, steers
a layer, looks at a middle layer through the head, and asks for the logits of every position. It is run on the same
prompts with both runtimes, each split over several ranks; every value is compared, and so is the time.

    python examples/two_runtimes.py                       # SmolLM2, transformers and vLLM on 3 ranks each
    python examples/two_runtimes.py --tp 1
    python examples/two_runtimes.py MODEL --prompt "Two and two is" --prompt "Hello"
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from typing import Annotated, Any

# Engines log at every step of their start; what goes wrong still shows.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import interleave
from runtimes.transformers.smollm2 import smollm2

TOLERANCE = 1e-4
ROUNDS = 3
RUNTIMES = {"transformers": {}, "vllm": {"max_model_len": 256, "use_tqdm_on_load": False}}
PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of one hundred degrees",
    "The opposite of hot is",
    "Once upon a time there was a little",
]
Values = dict[str, Any]


def block(model: Any, prompt: Any) -> Values:
    """What a researcher might do with one prompt. The same on any runtime and any number of ranks."""
    layers = model.model.layers
    first, middle, late = (round(part * (len(layers) - 1)) for part in (0.2, 0.5, 0.7))
    with torch.no_grad(), model.trace(prompt):
        stream = layers[first].output.save()
        queries = layers[first + 1].self_attn.q_proj.output.save()
        gate = layers[first + 1].mlp.gate_proj.output.save()
        layers[middle].self_attn.o_proj.input[..., :64] = 0  # silence a head
        layers[middle].output[:, -1] += 2.0  # steer the last position
        steered = layers[middle + 1].input.save()
        lens = model.lm_head(model.model.norm(layers[late].output)).save()
        logits = model.lm_head.output.save()
    return {
        f"residual stream after layer {first}": stream,
        f"q_proj of layer {first + 1}": queries,
        f"gate_proj of layer {first + 1}": gate,
        f"residual stream after both edits (layer {middle})": steered,
        f"layer {late} through the model's head": lens,
        "logits of every position": logits,
    }


def timed(model: Any, run: Any) -> float:
    """The median seconds of a few runs."""
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        run(model)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def one_by_one(model: Any, prompts: list[str]) -> list[Values]:
    return [block(model, prompt) for prompt in prompts]


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest magnitude; infinite if the shapes or NaNs differ."""
    if found.shape != expected.shape:
        return torch.inf
    # A NaN on either side is the largest difference there is.
    return float((found - expected).abs().nan_to_num(nan=torch.inf).max() / expected.abs().max())


def compare(found: list[Values], expected: list[Values]) -> dict[str, float]:
    """By value, the largest difference of all prompts."""
    return {
        name: max(difference(ours[name], theirs[name]) for ours, theirs in zip(found, expected, strict=True))
        for name in expected[0]
    }


def guesses(tokenizer: Any, logits: torch.Tensor, count: int = 3) -> str:
    """The most probable next tokens, with their probabilities."""
    best, tokens = logits[0, -1].softmax(-1).topk(count)
    return "  ".join(
        escape(f"{tokenizer.decode([int(token)]).strip() or '␣'} {share:.0%}")
        for share, token in zip(best, tokens, strict=True)
    )


def main(
    source: Annotated[
        str | None, typer.Argument(help="A HuggingFace directory or repo id; default: SmolLM2-135M-Instruct.")
    ] = None,
    tp: Annotated[int, typer.Option(help="How many ranks each runtime splits the model over.")] = 3,
    prompt: Annotated[list[str] | None, typer.Option(help="What the model reads; may be given several times.")] = None,
) -> None:
    """One block on transformers and on vLLM, compared value by value."""
    console = Console(width=110, soft_wrap=True)
    if importlib.util.find_spec("vllm") is None:
        console.print("vLLM is not installed here: [bold]make demo-vllm[/] installs it, and runs this.")
        sys.exit(2)
    source, prompts = source or str(smollm2()), prompt or PROMPTS
    results: dict[str, list[Values]] = {}
    seconds: dict[str, float] = {}
    tokenizer: Any = None
    for runtime, options in RUNTIMES.items():
        start = time.perf_counter()
        try:
            model = interleave.load(source, runtime=runtime, tp=tp, dtype="float32", **options)
        except interleave.InterleaveError as error:
            console.print(f"[red]{runtime} does not load it:[/] {escape(str(error))}")
            sys.exit(2)
        try:
            console.print(f"{runtime}: {escape(source)} on {tp} ranks, loaded in {time.perf_counter() - start:.1f} s")
            tokenizer = model.tokenizer
            results[runtime] = one_by_one(model, prompts)
            seconds[f"{runtime}, one prompt after the other"] = timed(model, lambda model: one_by_one(model, prompts))
            if runtime == "vllm" and len(prompts) > 1:
                # A list of prompts: the block runs once for each, in one batch of the engine.
                batch = block(model, prompts)
                results["vllm, in one batch"] = [
                    {name: values[place] for name, values in batch.items()} for place in range(len(prompts))
                ]
                seconds["vllm, in one batch"] = timed(model, lambda model: block(model, prompts))
        finally:
            model.close()

    expected = results.pop("transformers")
    found = {name: compare(values, expected) for name, values in results.items()}
    table = Table(
        title=f"\nLargest relative difference from transformers, {len(prompts)} prompts", title_justify="left"
    )
    table.add_column("value")
    table.add_column("shape", justify="right")
    for name in found:
        table.add_column(name, justify="right")
    for name, value in expected[0].items():
        table.add_row(name, " x ".join(map(str, value.shape)), *(f"{each[name]:.1e}" for each in found.values()))
    console.print(table)

    words = Table("prompt", "transformers", "vllm", title="\nNext token, with both edits", title_justify="left")
    for place, text in enumerate(prompts):
        pair = (expected[place], results["vllm"][place])
        words.add_row(escape(text), *(guesses(tokenizer, each["logits of every position"]) for each in pair))
    console.print(words)

    times = Table("all prompts", "seconds", title="\nTime, edits and lens included", title_justify="left")
    for name, value in seconds.items():
        times.add_row(name, f"{value:.2f}")
    console.print(times)

    worst = max(max(each.values()) for each in found.values())
    verdict = "[green]equal[/]" if worst < TOLERANCE else "[red]NOT EQUAL[/]"
    console.print(f"\nLargest relative difference: [bold]{worst:.1e}[/], tolerance {TOLERANCE:.0e}: {verdict}")
    sys.exit(0 if worst < TOLERANCE else 1)


if __name__ == "__main__":
    typer.run(main)
