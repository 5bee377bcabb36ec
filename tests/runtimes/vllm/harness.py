"""HuggingFace's model is the judge of the engine: the same blocks on both, compared at every location.

What there is to compare, and how, is `tests.plan`, `tests.operations` and `tests.harness`: the list of locations is
what transformers' unsharded model passes between its modules. Three things are particular to an engine:

* Its kernels are not transformers': values may differ by `KERNELS`, and by `tests.harness.TOLERANCE` between two
  degrees of the engine itself.
* It lacks some of what transformers' model has. `REFUSALS` lists that, with the reason that a block must be given; a
  location that is refused and not in the list, or refused for another reason, fails the test.
* A module that it does not have is not in a cache.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from runtimes.transformers.smollm2 import smollm2
from tests import harness, operations
from tests.harness import Case, Finding
from tests.operations import Failed, Log, Refused
from tests.plan import Plan, kept
from tests.runtimes.vllm.checkpoints import tiny

#: Largest difference allowed between an engine's kernels and transformers', relative to the largest magnitude.
KERNELS = 1e-4

#: The same where there are many layers. In SmolLM2's thirty transformers' float32 is up to 2.6e-4 from its own float64,
#: and the engine up to 1.1e-4.
KERNELS_OF = {"smollm2": 5e-4}

#: Of the pages that an engine does not show, one leaf in each value is asked for.
OF_A_CACHE = re.compile(r"\['past_key_values'\]\.layers\[(\d+\]\.values|[1-9]\d*\]\.keys)")

#: How many requests, each with an edit of its own, are in one step.
AT_ONCE = 12

NOT_CACHED = "no such module in the cache"

OPERATIONS = ("read", "cache", "write", "skip", "call")

ROUTES = "vLLM routes inside its experts"

#: Which names may be refused, and the words of the reason that must be given: a pattern for the start of the name,
#: of any operation; `@` stands for a layer. The first that fits counts.
REFUSALS: dict[str, str] = {
    # What a paged engine does not have at all.
    r"model(\.model)?\.output\['past_key_values'\]": "pages of its own|no such",
    r"model\.model\.rotary_emb\w*\.": "no such module",
    r"@\.mlp\.experts\.act_fn\.": "no such module",
    r"@\.self_attn\.output\[1\](?! called)": "never holds its weights",
    # vLLM's modules take the tensor, and find the rest by themselves.
    r"(model|model\.model|@|@\.self_attn)\.input\[1\]\['(?!hidden_states|input_ids)": "no such argument",
    # What computes with the requests of a step cannot be called apart from them.
    r"(model|model\.model|@|@\.self_attn)\.output\S* called ": "computes with the requests of a step",
    r"@\.mlp\.output\S* called after": "that is over in this step",
    # The engine's other requests need it.
    r"model(\.model)?\.skip": "the engine's other requests need it",
    # The router can be looked at.
    r"@\.mlp\.experts\.input": ROUTES,
    r"@\.mlp\.experts\.output called": ROUTES,
    r"@\.mlp\.(gate|router)\.(output\[[12]\](\[\.\.\., :k\])? = |skip)": ROUTES,
}

DEEPSEEK = {
    r"@\.self_attn\.kv_b_proj\.": "vLLM's attention takes this linear apart",
    r"@\.mlp\.gate\.output\[[12]\]": "HuggingFace leaves open in which order",
    r"@\.mlp\.experts\.(output|skip)": "vLLM's experts add the shared experts' output to it|" + ROUTES,
}
GEMMA = {
    r"model\.model\.embed_tokens\.": "HuggingFace's embedding does more than|a part of HuggingFace's embedding",
}
#: The same for one kind only.
OF_KIND: dict[str, dict[str, str]] = {
    "deepseek": DEEPSEEK,
    "deepseek-q-lora": DEEPSEEK,
    "gemma2": GEMMA,
    "gemma3": {**GEMMA, r"@\.self_attn\.[qk]_norm\.": "after it has exchanged heads and tokens"},
    "gpt-oss": {r"@\.mlp\.output\[1\]": "the router's weights are the router's|that is over in this step"},
}


def soft_attention(*args: Any, **options: Any) -> tuple[torch.Tensor, None]:
    """Attention with Gemma's cap on its scores, which torch's own does not have; like that it gives no weights."""
    return eager_attention_forward(*args, **options)[0], None


AttentionInterface.register("soft", soft_attention)
AttentionMaskInterface.register("soft", eager_mask)


def source_of(kind: str) -> Path:
    """The checkpoint of `kind`: a tiny one, or SmolLM2."""
    return smollm2() if kind == "smollm2" else tiny(kind)


#: Of layers that are alike, those that are written, skipped and called; every layer is read. Else: all.
LAYERS = {
    **dict.fromkeys(["llama-bias", "llama-tied", "llama-mqa", "qwen2", "qwen3", "gpt-oss"], "1"),
    **dict.fromkeys(["deepseek", "deepseek-q-lora"], "0|2"),
    "smollm2": "17",
}


def outside_of_layers_and_in(layers: str) -> str:
    """A pattern of the modules that are in no layer, or in one of these."""
    return rf"(?!.*\.layers\.).*|.*\.layers\.({layers})(\..*)?"


@functools.cache
def expected(kind: str, chosen: tuple[str, ...] = OPERATIONS, edited: str | None = None) -> dict[str, Any]:
    """What transformers' model does: the plans, the log of each operation, and what in it proves nothing.

    Args:
        kind: A key of `checkpoints.KINDS`, or `smollm2`.
        chosen: The operations.
        edited: The layers that are written, skipped and called: numbers, with `|` between. None: those of `LAYERS`.

    A cache is to hold what a block reads. (transformers' own cannot be asked: it would hold a module's last call.)
    """
    options = (("attn_implementation", "soft"),) if kind == "gemma2" else ()
    edited = outside_of_layers_and_in(edited or LAYERS.get(kind, r"\d+"))
    case = Case(source_of(kind), options, ids=harness.IDS[:1], edited=edited)
    plays = tuple((name, False) for name in chosen if name != "cache")
    known = torch.load(harness.reference(case, plays), weights_only=False) | {"kind": kind}
    for (name, _), log in known["logs"].items():
        for visit in known["plans"][name].visits:
            visit.spots[:] = [spot for spot in visit.spots if not OF_A_CACHE.search(spot.name)]
        for spot in [spot for spot in log if OF_A_CACHE.search(spot)]:
            del log[spot]
    if "cache" in chosen:
        reads = known["logs"]["read", False]
        known["plans"]["cache"] = known["plans"]["read"]
        known["logs"]["cache", False] = {spot.name: reads[spot.name] for _, spot in known["plans"]["read"].spots()}
    return known


def cache(model: Any, plan: Plan) -> Log:
    """Every leaf of every visit, as `tracer.cache` kept it."""
    log: Log = {}
    caches: list[Any] = []
    operations.play(model, plan.inputs, lambda tracer: caches.append(tracer.cache(include_inputs=True)))
    for visit in plan.visits:
        names = [spot.name for spot in visit.spots]
        with operations.refusals(log, *names):
            try:
                entry = caches[0][visit.module]
                value = entry.inputs if visit.side == "input" else entry.output
            except KeyError:
                log.update(dict.fromkeys(names, Refused(NOT_CACHED)))
                continue
            for spot in visit.spots:
                with operations.refusals(log, spot.name):
                    log[spot.name] = kept(operations.leaf_at(value, spot))
    return log


def watched_less(model: Any, plan: Plan) -> torch.Tensor:
    """The logits of a run in which nothing else is looked at."""
    with model.trace(**plan.inputs) as tracer:
        logits = tracer.result.logits.save()
    return logits


def edits(log: Log, model: Any, plan: Plan, changes: list[tuple[str, Callable[[], None]]]) -> None:
    """Note under each name the logits of a request whose block makes that change: many requests in a step."""
    for start in range(0, len(changes), AT_ONCE):
        noted: Log = {}  # it travels with every block, and what is known already need not
        with model.trace() as tracer:
            for name, change in changes[start : start + AT_ONCE]:
                with tracer.invoke(plan.inputs["input_ids"]):
                    with operations.ended(noted, [name]):
                        change()
                        noted[name] = kept(tracer.result.logits)
        log.update(noted)


def edited(operation: str, model: Any, plan: Plan) -> Log:
    """An operation whose every name is an edit of its own."""
    changes: list[tuple[str, Callable[[], None]]] = []

    def note(log: Log, name: str, model: Any, plan: Plan, change: Callable[[], None]) -> None:
        changes.append((name, change))

    with mock.patch.object(operations, "edit", note):
        log = harness.OPERATIONS[operation](model, plan)
    edits(log, model, plan, changes)
    return log


PLAYED: dict[str, Callable[[Any, Plan], Log]] = {
    **harness.OPERATIONS,
    "cache": cache,
    **{name: functools.partial(edited, name) for name in ("write", "skip")},
}


def play(model: Any, expected: dict[str, Any]) -> dict[str, Log]:
    """The same operations on an engine."""
    with mock.patch.object(operations, "logits_of", watched_less):
        return {name: PLAYED[name](model, expected["plans"][name]) for name, _ in expected["logs"]}


def judged(
    expected: dict[str, Log], found: dict[str, Log], idle: set[tuple[str, bool, str]], tolerance: float
) -> list[Finding]:
    """The verdict on every name in the logs of `expected`, except what proves nothing."""
    findings = []
    with mock.patch.object(harness, "TOLERANCE", tolerance):
        for operation, log in expected.items():
            for name, value in log.items():
                if (operation, False, name) not in idle:
                    verdict, detail = harness.judge(value, found[operation].get(name, Failed("absent")))
                    findings.append(Finding(operation, False, name, verdict, detail))
    return findings


def by_transformers(expected: dict[str, Any], found: dict[str, Log]) -> list[Finding]:
    """The engine, compared with transformers."""
    logs = {name: log for (name, _), log in expected["logs"].items()}
    return judged(logs, found, expected["idle"], KERNELS_OF.get(expected["kind"], KERNELS))


def by_one_rank(expected: dict[str, Any], alone: dict[str, Log], found: dict[str, Log]) -> list[Finding]:
    """The engine on several ranks, compared with itself on one, wherever that one serves a value."""
    logs = {
        operation: {name: value for name, value in log.items() if not isinstance(value, Refused | Failed)}
        for operation, log in alone.items()
    }
    return judged(logs, found, expected["idle"], harness.TOLERANCE)


def reason_for(kind: str, finding: Finding) -> str | None:
    """What the reason must say for which a name is refused, a pattern; None if it may not be refused."""
    name = re.sub(r"^model\.model\.layers\.\d+", "@", finding.name)
    if finding.detail == NOT_CACHED:
        return NOT_CACHED if re.match(r"model\.model\.rotary_emb|@\.mlp\.experts\.act_fn", name) else None
    known = {**OF_KIND.get(kind, {}), **REFUSALS}
    return next((reason for pattern, reason in known.items() if re.match(pattern, name)), None)


def may_be_refused(kind: str, finding: Finding) -> bool:
    """Whether a name is refused where it may be, and for the right reason."""
    reason = reason_for(kind, finding)
    return reason is not None and re.search(reason, finding.detail) is not None
