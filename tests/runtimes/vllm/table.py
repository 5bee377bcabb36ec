"""Write the tables of docs/runtimes/vllm.md: what an engine has of transformers' model, and what it refuses.

python -m tests.runtimes.vllm.table  # one engine after another: some minutes
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.harness import Finding
from tests.runtimes.vllm import harness, processes
from tests.runtimes.vllm.checkpoints import KINDS
from tests.runtimes.vllm.engines import traced

PAGE = Path(__file__).parents[3] / "docs" / "runtimes" / "vllm.md"
DETAILED = ("llama", "qwen3-moe")
OPERATIONS = harness.OPERATIONS


def findings(kind: str, **options: int) -> list[Finding]:
    """The verdict on every name, on an engine of several ranks. Raises SystemExit if anything is wrong."""
    expected = harness.expected(kind)
    with traced(harness.source_of(kind), **options) as model:
        found = harness.by_transformers(expected, harness.play(model, expected))
    wrong = [str(finding) for finding in found if finding.verdict == "wrong"]
    if wrong:
        raise SystemExit("\n".join(wrong[:20]))
    return found


def summary(rows: dict[str, list[Finding]]) -> Iterator[str]:
    """A line a model: right / refused, by operation."""
    yield "| model | " + " | ".join(f"{operation}: right / refused" for operation in OPERATIONS) + " |"
    yield "|---|" + "---|" * len(OPERATIONS)
    for name, found in rows.items():
        counts = Counter((finding.operation, finding.verdict) for finding in found)
        cells = [f"{counts[operation, 'right']} / {counts[operation, 'refused']}" for operation in OPERATIONS]
        yield f"| {name} | " + " | ".join(cells) + " |"


def locations(found: list[Finding]) -> Iterator[str]:
    """A line a location, layers taken together: what a block may do there, and why not what it may not."""
    table: dict[str, dict[str, str]] = {}
    reasons: dict[str, str] = {}
    for finding in found:
        name = re.sub(r"\.layers\.\d+", ".layers.*", finding.name)
        name = re.sub(r"( called .*| after a call of it| = \.\.\.|\[\.\.\., :k\] = c)$", "", name)
        location = re.sub(r"\.skip$", ".output", name)
        location = re.sub(r"\.layers\[\d+\]\.(keys|values)$", "", location)
        cell = "yes" if finding.verdict == "right" else "-"
        row = table.setdefault(location, {})
        row[finding.operation] = "-" if "-" in (cell, row.get(finding.operation, cell)) else cell
        if cell == "-" and finding.operation == "read":
            reasons[location] = finding.detail.partition(": ")[2] or finding.detail
    yield "| location | read | written | skipped | called | |"
    yield "|---|---|---|---|---|---|"
    for location, row in table.items():
        cells = [row.get(operation, "") for operation in ("read", "write", "skip", "call")]
        yield f"| `{location}` | " + " | ".join(cells) + f" | {reasons.get(location, '')} |"


def write(rows: dict[str, list[Finding]]) -> None:
    """Put the tables between the page's marks."""
    lines = ["", "Names by operation; of layers that are alike, one is edited:", "", *summary(rows)]
    for kind in DETAILED:
        lines += ["", f"The locations of `{kind}`, on two ranks:", "", *locations(rows[f"{kind}, tp=2"])]
    text = PAGE.read_text()
    before, _, rest = text.partition("<!-- table -->")
    after = rest.partition("<!-- /table -->")[2]
    PAGE.write_text(f"{before}<!-- table -->{chr(10).join(lines)}\n\n<!-- /table -->{after}")


def main() -> None:
    processes.start()
    rows = {f"{kind}, tp=2": findings(kind, tp=2) for kind in KINDS}
    rows["qwen3-moe, tp=3"] = findings("qwen3-moe", tp=3)
    rows |= {f"smollm2, tp={tp}": findings("smollm2", tp=tp) for tp in (1, 3)}
    rows["llama, pp=2"] = findings("llama", pp=2)
    rows["llama-tied, tp=2, pp=2"] = findings("llama-tied", tp=2, pp=2)
    write(rows)


if __name__ == "__main__":
    main()
