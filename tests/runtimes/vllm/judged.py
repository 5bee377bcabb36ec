"""Every location of an engine, compared with transformers: the judge of `tests.harness`, on a vLLM engine.

The plan - which locations there are, and the value, shape and structure of each - is that of transformers' model on
one process. The engine plays the same blocks. Whatever it does not serve is named here, with the reason, by pattern: a location that
is refused and not named is a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import interleave
from interleave.errors import UnknownLayout
from runtimes.transformers.smollm2 import smollm2
from tests import harness, operations
from tests.operations import Log
from tests.plan import Plan, kept
from tests.runtimes.vllm.checkpoints import tiny
from tests.runtimes.vllm.engines import OPTIONS, surroundings

#: Largest difference from transformers, relative to the largest magnitude: vLLM's kernels add in another order.
TOLERANCE = 1e-4
IDS = harness.IDS[:1]

NO_ARGUMENT = "vLLM's modules take no such argument"
PAGED = "the engine keeps keys and values in pages of its own"
NO_MODULE = "vLLM's model has no such module"
WEIGHTS = "the engine's attention never holds its weights"
ROUTES = "vLLM routes inside its experts"
SHARED = "vLLM's experts add the shared experts' output"
ABSORBED = "vLLM's attention takes this linear apart"
OPEN_ORDER = "HuggingFace leaves the order of the chosen experts open"
STEP = "computes with all requests of a step"
AXES = "HuggingFace exchanges heads and tokens first"
SCALED = "HuggingFace scales in the embedding, vLLM behind it"

#: What is refused, of a name of `tests.operations` with layer numbers left out -> why.
REFUSED: dict[str, str] = {
    "*.input[1]['attention_mask']*": NO_ARGUMENT,
    "*.input[1]['position_ids']*": NO_ARGUMENT,
    "*.input[1]['position_embeddings']*": NO_ARGUMENT,
    "*.input[1]['use_cache']*": NO_ARGUMENT,
    "*.input[1]['inputs_embeds']*": NO_ARGUMENT,
    "*.input[1]['output_router_logits']*": NO_ARGUMENT,
    "*.input[1]['past_key_values']*": PAGED,
    "*.output['past_key_values']*": PAGED,
    "model.model.rotary_emb*": NO_MODULE,
    "model.model.rotary_emb_local*": NO_MODULE,
    "*.experts.act_fn*": NO_MODULE,
    "*.experts.input*": ROUTES,
    "*.gate.output* = *": ROUTES,
    "*.router.output* = *": ROUTES,
    "*.gate.skip": ROUTES,
    "*.router.skip": ROUTES,
    "model.skip": STEP,
    "model.model.skip": STEP,
    "model.output* called *": STEP,
    "model.model.output* called *": STEP,
    "*.layers.N.output called *": STEP,
    "*.self_attn.output* called *": STEP,
    "*.mlp.output* called after the run": STEP,
    "*.experts.output called after the run": STEP,
}
#: The same for one kind of model.
REFUSED_OF: dict[str, dict[str, str]] = {
    "gpt-oss": {
        "*.self_attn.output[1]*": WEIGHTS,
        "*.mlp.output[1]*": "the router's weights are the router's `output[1]`",
    },
    "deepseek": {
        "*.kv_b_proj*": ABSORBED,
        "*.gate.output[1]*": OPEN_ORDER,
        "*.gate.output[2]*": OPEN_ORDER,
        "*.experts.output*": SHARED,
        "*.experts.skip": SHARED,
    },
    "gemma3": {
        "*.q_norm*": AXES,
        "*.k_norm*": AXES,
        "model.model.embed_tokens.output*": SCALED,
        "model.model.embed_tokens.skip": SCALED,
    },
}
REFUSED_OF["deepseek-q-lora"] = REFUSED_OF["deepseek"]


def reason(kind: str, name: str) -> str | None:
    """Why `name` may be refused; None if it must be right."""
    name = re.sub(r"\.layers\.\d+", ".layers.N", name)
    for pattern, why in {**REFUSED, **REFUSED_OF.get(kind, {})}.items():
        # Names have brackets in them, which would be sets of letters to fnmatch.
        if re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), name):
            return why
    return None


def source(kind: str) -> Path:
    """The checkpoint: SmolLM2, or a tiny one."""
    return smollm2() if kind == "smollm2" else tiny(kind)


@contextmanager
def engine(kind: str, tp: int = 1, **options: Any) -> Iterator[Any]:
    """A traced engine over the checkpoint of `kind`."""
    with surroundings():
        model = interleave.load(source(kind), runtime="vllm", tp=tp, limit=30, **{**OPTIONS, **options})
        try:
            yield model
        finally:
            model.close()


def cache(model: Any, plan: Plan) -> Log:
    """`operations.cache`, for an engine: what is not in its model is not in its cache."""
    log: Log = {}
    with model.trace(**plan.inputs) as tracer:
        entries = tracer.cache(include_inputs=True)
    for visit in plan.visits:
        for spot in visit.spots:
            try:
                entry = entries[visit.module]
                value = entry.inputs if visit.side == "input" else entry.output
                log[spot.name] = kept(operations.leaf_at(value, spot))
            except (KeyError, UnknownLayout) as error:
                log[spot.name] = operations.Refused(str(error))
    return log


OPERATIONS = {**harness.OPERATIONS, "cache": cache}


def judge(model: Any, kind: str, chosen: list[str], modules: str = ".*") -> dict[str, dict[str, tuple[str, str]]]:
    """Operation -> name -> verdict and detail, of everything that proves something.

    Args:
        chosen: Operations.
        modules: Which modules are edited, skipped and called: a pattern for their whole path.
    """
    case = harness.Case(source(kind), ids=IDS, edited=modules)
    file = harness.reference(case, tuple((name, False) for name in chosen))
    expected = torch.load(file, weights_only=False)
    found: dict[str, dict[str, tuple[str, str]]] = {}
    with (
        mock.patch.object(harness, "TOLERANCE", TOLERANCE),
        mock.patch.object(operations, "logits_of", lambda model, plan: torch.zeros(1)),
    ):
        for (operation, grad), noted in expected["logs"].items():
            log = OPERATIONS[operation](model, expected["plans"][operation])
            found[operation] = {
                name: harness.judge(value, log.get(name, harness.Failed("absent")))
                for name, value in noted.items()
                if (operation, grad, name) not in expected["idle"] and not name.startswith("the logits are")
            }
    return found


def faults(kind: str, found: dict[str, dict[str, tuple[str, str]]]) -> list[str]:
    """What is wrong, or refused without a reason."""
    bad = []
    for operation, verdicts in found.items():
        for name, (verdict, detail) in verdicts.items():
            why = reason(kind, name)
            if verdict == "wrong" or (verdict == "refused" and why is None):
                bad.append(f"{operation}: {name}: {verdict}: {detail[:200]}")
    return bad
