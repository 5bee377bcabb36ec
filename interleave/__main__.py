"""The command line: `interleave layout MODEL --tp N`, from the config alone."""

from __future__ import annotations

import re
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .errors import InterleaveError
from .load import LoadRequest, runtime_of
from .model import Model, describe

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def main() -> None:
    """Interventions on sharded language models."""


@app.command()
def layout(
    source: Annotated[str, typer.Argument(help="A HuggingFace directory or repo id.", metavar="MODEL")],
    tp: Annotated[int, typer.Option(help="The tensor-parallel degree.")] = 2,
    runtime: Annotated[str, typer.Option(help="The runtime that shards it.")] = "transformers",
    everything: Annotated[bool, typer.Option("--all", help="Also the locations that are whole anyway.")] = False,
) -> None:
    """Print what each location's value is on each rank. Reads the config, no weights.

    Layers that are alike share a row, with `*` for their number.
    """
    request = LoadRequest(source, runtime, tp=tp)
    try:
        loader = runtime_of(request)
        loader.check(request)
        rows = table_rows(loader.outline(request), everything)
    except InterleaveError as error:
        print(f"interleave: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    table = Table(title=f"{source} at tp={tp}", show_lines=False)
    for column in ("location", "on each rank"):
        table.add_column(column, overflow="fold")
    for location, text in rows:
        table.add_row(location, text)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if not everything:
        print("Locations that are not listed are whole. Those inside a sharded forward are decided at load.")


def table_rows(model: Model, everything: bool = False) -> list[tuple[str, str]]:
    """The rows of the table: a location, with `*` for the numbers of layers that are alike, and its layout."""
    found: dict[str, list[str]] = {}
    for envoy in reversed(model.modules()):
        for side in ("input", "output"):
            location = f"{envoy.path}.{side}"
            text = describe(model.interleaver.fragments.layout(location))
            if text != "whole" or everything:
                texts = found.setdefault(re.sub(r"\.\d+(?=\.)", ".*", location), [])
                if text not in texts:
                    texts.append(text)
    return [(location, " or ".join(texts)) for location, texts in found.items()]


if __name__ == "__main__":
    app()
