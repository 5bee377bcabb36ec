"""The judge of a sharded model: the same blocks on one process and on N ranks, compared everywhere.

`tests.plan` says what there is to compare: every leaf of every value that one process passes between modules.
`tests.operations` are the blocks. Here they are played on the reference - nnsight's own `Envoy` around an
unsharded model, in which nothing of this project takes part - and on every rank of a sharded one, and each
name gets a verdict:

* *right*: shape and dtype equal, every position within 1e-5 of the reference's largest magnitude, on every rank;
* *refused*: every rank raised `UnknownLayout` at that access;
* *wrong*: anything else, ranks that disagree included.

An edit that one process refuses, or that does not move its logits, proves nothing: it is listed as *idle*.
"""

from __future__ import annotations

import atexit
import functools
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from nnsight.intervention.envoy import Envoy
from transformers import AutoModelForCausalLM

import interleave

from . import operations
from .operations import Failed, Log, Refused
from .plan import Plan, Way, kept, leaves, survey
from .pool import Pool, World

#: Largest difference allowed in float32, relative to the largest magnitude of the reference.
TOLERANCE = 1e-5
#: Smallest change, relative to the largest logit, by which an edit must move the logits to count as evidence.
EFFECT = 1e-3
#: Seconds after which a rank that waits for another gives up.
LIMIT = 10.0

OPERATIONS: dict[str, Callable[[Any, Plan], Log]] = {
    "read": operations.read,
    "cache": operations.cache,
    "write": operations.write,
    "skip": operations.skip,
    "call": operations.call,
    "grad": operations.grad,
    "source": operations.source,
}
#: What `compare` plays unless it is told otherwise.
USUAL = tuple(name for name in OPERATIONS if name != "source")
#: The operations that one process may refuse, and whose tensors are logits.
EDITING = ("write", "skip", "source")

#: Two rows of seven tokens.
IDS = ((3, 7, 5, 9, 4, 11, 6), (8, 3, 10, 4, 5, 6, 9))

Verdict = Literal["right", "refused", "wrong"]


@dataclass(frozen=True)
class Case:
    """A model, and how it is loaded and run on both sides.

    Attributes:
        source: The model's directory.
        options: Arguments of the loader, beyond the dtype.
        ids: The rows of input ids.
        edited: Which modules are edited, skipped, called and differentiated: a pattern for their whole path.
    """

    source: Path
    options: tuple[tuple[str, Any], ...] = ()
    ids: tuple[tuple[int, ...], ...] = IDS
    edited: str = ".*"


Loader = Callable[[World, Case], Any]
#: One operation, with grad on or off.
Play = tuple[str, bool]


@dataclass(frozen=True)
class Finding:
    """The verdict on one name of one operation."""

    operation: str
    grad: bool
    name: str
    verdict: Verdict
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.operation}, grad {'on' if self.grad else 'off'}: {self.name}: {self.verdict} {self.detail}"


@dataclass
class Report:
    """Every finding about one case at one degree.

    Attributes:
        idle: Operation, grad and name of what proves nothing, because one process refuses it, does not run it, or
            computes the same logits with and without it.
    """

    degree: int
    findings: list[Finding] = field(default_factory=list)
    idle: set[tuple[str, bool, str]] = field(default_factory=set)
    seconds: float = 0.0

    def those(self, verdict: Verdict) -> list[Finding]:
        return [finding for finding in self.findings if finding.verdict == verdict]

    def table(self) -> str:
        """One line an operation: how many names are right, refused and wrong."""
        counts = Counter((f.operation, f.grad, f.verdict) for f in self.findings)
        lines = [f"{'operation':<12}{'grad':<6}{'right':>7}{'refused':>9}{'wrong':>7}   degree {self.degree}"]
        for operation, grad in dict.fromkeys((f.operation, f.grad) for f in self.findings):
            right, refused, wrong = (counts[operation, grad, v] for v in ("right", "refused", "wrong"))
            lines.append(f"{operation:<12}{'on' if grad else 'off':<6}{right:>7}{refused:>9}{wrong:>7}")
        return "\n".join([*lines, f"{len(self.idle)} names that prove nothing; {self.seconds:.1f} s"])

    def check(self, may_be_refused: Callable[[Finding], bool]) -> None:
        """Raise AssertionError unless nothing is wrong and only what may be is refused."""
        bad = self.those("wrong") + [f for f in self.those("refused") if not may_be_refused(f)]
        if bad:
            groups: dict[str, list[Finding]] = {}
            for finding in bad:
                groups.setdefault(f"{finding.operation} {finding.grad} {finding.detail}", []).append(finding)
            shown = [f"  {found[0]} ({len(found)} alike)" for found in groups.values()]
            raise AssertionError("\n".join([f"{len(bad)} of {len(self.findings)}", *shown[:40], self.table()]))


def compare(
    pool: Pool,
    case: Case,
    chosen: Sequence[str] = USUAL,
    grads: Sequence[bool] = (False, True),
    loader: Loader | None = None,
    timeout: float = 180.0,
) -> Report:
    """Play the chosen operations on one process and on every rank of `pool`; what came of it.

    `grad` is played where grad is on only. `loader` is a module-level function that gives a rank its model.
    """
    started = time.monotonic()
    plays = tuple((name, grad) for grad in grads for name in chosen if grad or name != "grad")
    file = reference(case, plays)
    logs = pool.run(examine, loader or load, case, file, timeout=timeout)
    report = Report(pool.size, idle=torch.load(file, weights_only=False)["idle"])
    report.findings = [united(findings) for findings in zip(*logs, strict=True)]
    report.seconds = time.monotonic() - started
    return report


def united(findings: Sequence[Finding]) -> Finding:
    """What every rank found about one name, as one finding: the ranks must agree."""
    first = findings[0]
    wrong = [rank for rank, finding in enumerate(findings) if finding.verdict == "wrong"]
    if wrong:
        found = findings[wrong[0]]
        return Finding(found.operation, found.grad, found.name, "wrong", f"on ranks {wrong}: {found.detail}")
    if len({finding.verdict for finding in findings}) > 1:
        verdicts = ", ".join(finding.verdict for finding in findings)
        return Finding(first.operation, first.grad, first.name, "wrong", f"the ranks disagree: {verdicts}")
    return first


def agree(pool: Pool, case: Case, block: Callable[[Any], Any]) -> Any:
    """Call `block(model)`, a module-level function, on one process and on every rank, and compare what it
    returns.

    Here the one process, too, runs this project's code: for what nnsight's plain `Envoy` has not, such as
    prompts of several rows or generation.

    Returns:
        What the block returned on one process.

    Raises:
        AssertionError: With every leaf that differs, and the rank.
    """
    alone = block(interleave.load(case.source, dtype="float32", **dict(case.options)))
    bad = []
    for rank, found in enumerate(pool.run(played, case, block)):
        there = dict(found)
        for way, leaf in leaves(alone):
            verdict, detail = judge(kept(leaf), there.pop(way, Failed("absent")))
            if verdict != "right":
                bad.append(f"rank {rank}: {''.join(map(str, way)) or 'the value'}: {verdict}: {detail}")
        bad += [f"rank {rank}: {''.join(map(str, way))} is not there on one process" for way in there]
    if bad:
        raise AssertionError("\n".join(bad))
    return alone


def played(world: World, case: Case, block: Callable[[Any], Any]) -> list[tuple[Way, Any]]:
    """Run on every rank: the leaves of what `block(model)` returns."""
    return [(way, kept(leaf)) for way, leaf in leaves(block(loaded(world, case)))]


# -- the side of the one process -----------------------------------------------------------------------------


@functools.cache
def _directory() -> Path:
    path = tempfile.mkdtemp(prefix="references-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


@functools.cache
def reference(case: Case, plays: tuple[Play, ...]) -> Path:
    """A file with what one process does in `case`: the plans, the log of each play, and what in it is idle."""
    module = AutoModelForCausalLM.from_pretrained(case.source, dtype=torch.float32, **dict(case.options))
    plans = plans_of(module, case)
    model = Envoy(module)
    logs: dict[Play, Log] = {}
    for name, grad in plays:
        with torch.set_grad_enabled(grad):
            logs[name, grad] = OPERATIONS[name](model, plans[name])
    idle = set()
    for (name, grad), log in logs.items():
        for entry, value in log.items():
            if isinstance(value, Failed) and name not in EDITING:
                raise RuntimeError(f"one process fails at {name}, {entry}: {value.message}")
            if isinstance(value, Failed) or (name in EDITING and is_idle(value, plans[name].logits)):
                idle.add((name, grad, entry))
    path = _directory() / f"{len(list(_directory().iterdir()))}.pt"
    torch.save({"plans": plans, "logs": logs, "idle": idle}, path)
    return path


def plans_of(module: torch.nn.Module, case: Case) -> dict[str, Plan]:
    """For each operation what it covers. Reads see a KV cache; where a run is repeated or edited there is
    none."""
    ids = torch.tensor(case.ids)
    # A mask is given because the front end of a trace would add it to inputs that have none.
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cached = survey(module, inputs)
    whole = survey(module, inputs | {"use_cache": False})
    some = Plan(whole.inputs, [v for v in whole.visits if re.fullmatch(case.edited, v.module)], whole.logits)
    return {"read": cached, "cache": whole, "write": some, "skip": some, "call": some, "grad": some, "source": some}


def is_idle(noted: Any, unedited: torch.Tensor) -> bool:
    """Whether `noted` are the logits of an edit, and an edit that hardly moves them."""
    if not isinstance(noted, torch.Tensor):
        return False
    return not float((noted - unedited).abs().max()) >= EFFECT * float(unedited.abs().max())


# -- the side of a rank --------------------------------------------------------------------------------------


def load(world: World, case: Case) -> Any:
    """The model under test: sharded over the pool, this process a rank of it."""
    options = dict(case.options)
    return interleave.load(case.source, tp=world.size, dtype="float32", limit=LIMIT, **options)


def loaded(world: World, case: Case, loader: Loader = load) -> Any:
    """The model that `loader` gives this rank for `case`, kept until another one is asked for."""
    return world.keep((loader, case), lambda: loader(world, case))


def examine(world: World, loader: Loader, case: Case, file: Path) -> list[Finding]:
    """Run on every rank: play what the reference has, and judge each name that one process noted."""
    model = loaded(world, case, loader)
    expected = torch.load(file, weights_only=False)
    findings = []
    for (operation, grad), noted in expected["logs"].items():
        with torch.set_grad_enabled(grad):
            log = OPERATIONS[operation](model, expected["plans"][operation])
        for name, value in noted.items():
            if (operation, grad, name) not in expected["idle"]:
                verdict, detail = judge(value, log.get(name, Failed("absent")))
                findings.append(Finding(operation, grad, name, verdict, detail))
    return findings


def judge(expected: Any, found: Any) -> tuple[Verdict, str]:
    """The verdict on what a rank noted where one process noted `expected`, and what is the matter with it."""
    if isinstance(expected, dict) and isinstance(found, dict):
        verdicts = [judge(value, found.get(name, Failed("absent"))) for name, value in expected.items()]
        return max(verdicts, key=lambda verdict: ("right", "refused", "wrong").index(verdict[0]), default=("right", ""))
    if isinstance(found, Refused):
        return "refused", found.message
    if isinstance(found, Failed):
        return "wrong", found.message
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        problem = difference(expected, found)
    else:
        problem = "" if type(expected) is type(found) and expected == found else f"{found!r}, not {expected!r}"
    return ("wrong", problem) if problem else ("right", "")


def difference(expected: torch.Tensor, found: torch.Tensor) -> str:
    """What sets `found` apart from `expected`; empty where nothing does beyond the rounding of a sum."""
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return f"{found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    if not expected.dtype.is_floating_point:
        return "" if torch.equal(expected, found) else f"{int((expected != found).sum())} entries differ"
    finite = expected.isfinite()
    if not torch.equal(expected[~finite].nan_to_num(0.5), found[~finite].nan_to_num(0.5)):
        return "infinite or undefined entries differ"
    if not finite.any():
        return ""
    largest = float(expected[finite].abs().max())
    error = float((expected[finite] - found[finite]).abs().max())
    if error <= TOLERANCE * largest:
        return ""
    return f"differs by {error:.3g}, {error / max(largest, 1e-30):.2g} of the largest magnitude"
