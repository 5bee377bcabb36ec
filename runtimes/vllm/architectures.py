"""The architectures whose every location has been compared with transformers, and what differs there.

That a module of vLLM's has the name of one of HuggingFace's, and a value of its shape, does not make the values equal:
one model scales its embedding inside the module, the other behind it. So HuggingFace's names are served where the tests
have compared them (`tests/runtimes/vllm/test_locations.py`), and elsewhere on request only.
"""

from __future__ import annotations

import fnmatch

ABSORBED = "vLLM's attention takes this linear apart, and in decoding multiplies it into others"
OPEN_ORDER = "HuggingFace leaves open in which order the chosen experts come; the logits are `output[0]`"
OTHER_AXES = "HuggingFace computes this norm after it has exchanged heads and tokens"

#: vLLM's name of an architecture -> what it does not have of HuggingFace's: a location (of the HuggingFace name, below
#: the model, `*` for anything) -> why. `output[1]` is one part of a value.
CHECKED: dict[str, dict[str, str]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3MoeForCausalLM": {},
    "GptOssForCausalLM": {},
    "DeepseekV2ForCausalLM": {
        "model.layers.*.self_attn.kv_b_proj.*": ABSORBED,
        "model.layers.*.mlp.gate.output[1]": OPEN_ORDER,
        "model.layers.*.mlp.gate.output[2]": OPEN_ORDER,
    },
    "Gemma2ForCausalLM": {},
    "Gemma3ForCausalLM": {
        "model.layers.*.self_attn.q_norm.*": OTHER_AXES,
        "model.layers.*.self_attn.k_norm.*": OTHER_AXES,
    },
}

UNCHECKED = (
    "this architecture has not been compared with transformers. `.raw` gives vLLM's own value; "
    "`load(..., unchecked=True)` serves HuggingFace's names by what the modules' classes promise"
)


def exceptions(architecture: str, name: str, side: str) -> dict[int | None, str]:
    """Why `name.side` is not served: by part of the value, under None all of it."""
    found: dict[int | None, str] = {}
    for pattern, reason in CHECKED.get(architecture, {}).items():
        whole, bracket, part = pattern.partition("[")
        # A bracket would be a set of letters to fnmatch.
        if fnmatch.fnmatchcase(f"{name}.{side}", whole):
            found[int(part.rstrip("]")) if bracket else None] = reason
    return found
