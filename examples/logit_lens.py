"""A logit lens on a language model that is split over several processes.

What would the model say if it stopped after layer `i`? The lens answers by sending every layer's output
through the model's own final norm and head. Then the heads that carry the answer are looked for, by silencing
each in turn, and silenced together until the model changes its mind. Every number that was read is compared
with one process.

    python examples/logit_lens.py                       # SmolLM2 on 3 ranks
    python examples/logit_lens.py MODEL --tp 2 --prompt "The Eiffel Tower is in"

The blocks under `with model.trace(...)` say nothing about ranks; the same ones run on one process.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import interleave
from runtimes.transformers.smollm2 import smollm2

TOLERANCE = 1e-4
Heads = list[tuple[int, int]]  # (layer, head)
Values = dict[str, torch.Tensor]  # what was read, by a name that says where


@dataclass(frozen=True)
class Parts:
    """The modules a lens needs, whatever the architecture calls them."""

    layers: list[Any]
    projections: list[Any]  # per layer: the linear that mixes the heads' outputs, head after head in its input
    norm: Any
    head: Any
    num_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: Any) -> Parts:
        config = model.config.get_text_config()
        body = member(model, "model", "transformer", "gpt_neox")
        layers = list(member(body, "layers", "h"))
        attention = [member(layer, "self_attn", "attention", "attn") for layer in layers]
        return cls(
            layers=layers,
            projections=[member(module, "o_proj", "dense", "c_proj", "out_proj") for module in attention],
            norm=member(body, "norm", "final_layer_norm", "ln_f", "final_layernorm"),
            head=member(model, "lm_head", "embed_out"),
            num_heads=config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        )

    def columns(self, head: int) -> slice:
        """The columns of a projection's input that `head` wrote."""
        return slice(head * self.head_dim, (head + 1) * self.head_dim)


def member(module: Any, *names: str) -> Any:
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise SystemExit(f"this model has none of {', '.join(names)} where a lens looks for one of them")


def lens(model: Any, prompt: str) -> Values:
    """At every position: each layer's output, what its heads wrote, and what the model would say after it."""
    parts = Parts.of(model)
    values: Values = {}
    with torch.no_grad(), model.trace(prompt):
        for i, layer in enumerate(parts.layers):
            values[f"heads of layer {i}"] = parts.projections[i].input.save()
            hidden = layer.output
            values[f"layer {i}"] = hidden.save()
            values[f"lens at layer {i}"] = parts.head(parts.norm(hidden)).save()
        values["logits"] = parts.head.output.save()
    return values


def silence_each(model: Any, prompt: str, layer: int) -> torch.Tensor:
    """The last position's logits, `[heads, vocabulary]`: row `i` without head `i` of `layer`."""
    parts = Parts.of(model)
    with torch.no_grad(), model.trace([prompt] * parts.num_heads):
        mixed = parts.projections[layer].input
        for head in range(parts.num_heads):
            mixed[head, :, parts.columns(head)] = 0
        logits = parts.head.output[:, -1].save()
    return logits


def silence(model: Any, prompt: str, heads: Heads) -> torch.Tensor:
    """The last position's logits, `[vocabulary]`, without any of `heads`."""
    parts = Parts.of(model)
    with torch.no_grad(), model.trace(prompt):
        for layer, head in sorted(heads):
            parts.projections[layer].input[..., parts.columns(head)] = 0
        logits = parts.head.output[0, -1].save()
    return logits


def search(model: Any, prompt: str, answer: int, limit: int = 4) -> tuple[Values, list[Heads]]:
    """Silence more and more of the heads that matter most for `answer`, until the model says something else.

    Returns what was read, and the sets of heads that were tried together.
    """
    parts = Parts.of(model)
    values = {f"one head out, layer {i}": silence_each(model, prompt, i) for i in range(len(parts.layers))}
    remaining = torch.stack([logits.softmax(-1)[:, answer] for logits in values.values()])
    weakest = remaining.flatten().argsort()[:limit].tolist()
    ranked = [divmod(index, parts.num_heads) for index in weakest]
    tried = []
    for count in range(1, limit + 1):
        tried.append(ranked[:count])
        logits = values[f"without {names(ranked[:count])}"] = silence(model, prompt, ranked[:count])
        if logits.argmax() != answer:
            break
    return values, tried


def repeat(model: Any, prompt: str, tried: list[Heads]) -> Values:
    """What `lens` and `search` read, read again from another model."""
    values = lens(model, prompt)
    values |= {f"one head out, layer {i}": silence_each(model, prompt, i) for i in range(len(Parts.of(model).layers))}
    return values | {f"without {names(heads)}": silence(model, prompt, heads) for heads in tried}


def largest_difference(values: Values, expected: Values) -> tuple[float, str]:
    """The largest difference of any value, relative to that value's largest entry, and the value's name."""
    assert values.keys() == expected.keys()
    differences = []
    for name, value in values.items():
        assert value.shape == expected[name].shape, name
        # A NaN on either side is the largest difference there is.
        difference = (value - expected[name]).abs().nan_to_num(nan=torch.inf).max()
        differences.append((float(difference / expected[name].abs().max()), name))
    return max(differences)


def names(heads: Heads) -> str:
    return " + ".join(f"head {layer}.{head}" for layer, head in heads)


def word(tokenizer: Any, token: int) -> str:
    """A token as people read it: without its leading space, and visible if it is only space."""
    text = tokenizer.decode([token])
    if text.isspace():
        return "".join("↵" if character == "\n" else "␣" for character in text)
    text = text.removeprefix(" ")
    return "".join(character if character.isprintable() and ord(character) < 0x250 else "�" for character in text)


def guesses(tokenizer: Any, probabilities: torch.Tensor, count: int) -> list[str]:
    """The `count` most probable tokens, with their probabilities."""
    best, tokens = probabilities.topk(count)
    return [escape(f"{word(tokenizer, int(t))} {p:.0%}") for p, t in zip(best, tokens, strict=True)]


def print_lens(console: Console, values: Values, tokenizer: Any, prompt: str) -> None:
    rows = [value[0, -1].softmax(-1) for name, value in values.items() if name.startswith("lens")]
    answer = int(rows[-1].argmax())
    title = f"[bold]{escape(prompt)}[/] …  after each layer"
    table = Table(title=title, title_justify="left", row_styles=["", "dim"])
    table.add_column("layer", justify="right")
    for place in ("1st", "2nd", "3rd"):
        table.add_column(place, min_width=14)
    table.add_column(f"P({escape(word(tokenizer, answer))})", justify="right")
    table.add_column("place", justify="right")
    for i, probabilities in enumerate(rows):
        share = float(probabilities[answer])
        place = int((probabilities > share).sum()) + 1
        table.add_row(str(i), *guesses(tokenizer, probabilities, 3), f"{share:.1%}", f"{place:,}")
    console.print(table)


def print_edits(console: Console, values: Values, tokenizer: Any, tried: list[Heads]) -> None:
    outcomes = [("nothing", values["logits"][0, -1])]
    outcomes += [(names(heads), values[f"without {names(heads)}"]) for heads in tried]
    table = Table("without", "1st", "2nd", "3rd", "4th", title="Silenced (layer.head)", title_justify="left")
    for label, logits in outcomes:
        first, *others = guesses(tokenizer, logits.softmax(-1), 4)
        table.add_row(label, f"[bold]{first}[/]", *others)
    console.print(table)


def draw(values: Values, tokenizer: Any, prompt: str, path: Path) -> None:
    """Layers by positions: the most probable next token, coloured by its probability."""
    lenses = torch.stack([value[0].softmax(-1) for name, value in values.items() if name.startswith("lens")])
    probabilities, tokens = lenses.max(-1)
    num_layers, num_positions = tokens.shape
    inputs = tokenizer(prompt).input_ids

    figure, axes = plt.subplots(figsize=(2.4 + 1.35 * num_positions, 1.6 + 0.3 * num_layers), layout="constrained")
    image = axes.imshow(probabilities, aspect="auto", origin="lower", cmap="viridis", vmin=0, vmax=1)
    for layer in range(num_layers):
        for position in range(num_positions):
            axes.text(
                position,
                layer,
                word(tokenizer, int(tokens[layer, position]))[:14],
                ha="center",
                va="center",
                fontsize=10,
                parse_math=False,
                color="white" if probabilities[layer, position] < 0.6 else "black",
            )
    axes.set_xticks(
        range(num_positions), [word(tokenizer, token)[:14] for token in inputs], fontsize=11, parse_math=False
    )
    axes.set_yticks(range(num_layers), [str(layer) for layer in range(num_layers)], fontsize=9)
    axes.set_xlabel("token read", fontsize=11)
    axes.set_ylabel("layer", fontsize=11)
    axes.set_title("What the model would say next if it stopped after this layer", fontsize=12, pad=10)
    figure.colorbar(image, label="probability", fraction=0.05, pad=0.02)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(
    source: Annotated[
        str | None, typer.Argument(help="A HuggingFace directory or repo id; default: SmolLM2-135M-Instruct.")
    ] = None,
    tp: Annotated[int, typer.Option(help="How many ranks the model is split over.")] = 3,
    prompt: Annotated[str, typer.Option(help="What the model reads.")] = "The capital of France is",
    picture: Annotated[Path, typer.Option(help="Where the heat map is written.")] = Path("out/logit-lens.png"),
) -> None:
    """A logit lens on TP ranks, checked number by number against one process."""
    console = Console(width=110, soft_wrap=True)
    source = source or str(smollm2())

    start = time.perf_counter()
    model = interleave.load(source, tp=tp, dtype="float32")
    console.print(f"{escape(source)} on {tp} ranks, loaded in {time.perf_counter() - start:.1f} s\n")
    tokenizer = model.tokenizer
    values = lens(model, prompt)
    print_lens(console, values, tokenizer, prompt)
    draw(values, tokenizer, prompt, picture)
    console.print(f"\nHeat map: {picture}\n")

    edits, tried = search(model, prompt, answer=int(values["logits"][0, -1].argmax()))
    values |= edits
    print_edits(console, values, tokenizer, tried)
    model.close()

    alone = interleave.load(source, dtype="float32")
    difference, name = largest_difference(values, repeat(alone, prompt, tried))
    verdict = "[green]equal[/]" if difference < TOLERANCE else "[red]NOT EQUAL[/]"
    console.print(
        f"\nLargest relative difference of the {len(values)} values read, {tp} ranks against one process: "
        f"[bold]{difference:.1e}[/] ({name}), tolerance {TOLERANCE:.0e}: {verdict}"
    )
    sys.exit(0 if difference < TOLERANCE else 1)


if __name__ == "__main__":
    typer.run(main)
