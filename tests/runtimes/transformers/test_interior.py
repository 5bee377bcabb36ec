"""What lies inside a sharded forward: every operation of attention and MLP reads as on one process, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import interleave
from interleave import nnsight_port as port
from interleave.fragments import Withheld
from tests.models import tiny
from tests.pool import Pools, World

IDS = torch.arange(3, 12)[None]
#: What may be refused: a KV cache object, which holds this rank's heads.
MAY_BE_REFUSED = ("past_key_values", "layer_past")


def load(world: World | None, path: str) -> Any:
    if world is None:
        return interleave.load(path, dtype="float32", attn_implementation="eager")
    return world.keep(path, lambda: interleave.load(path, tp=world.size, dtype="float32", attn_implementation="eager"))


def operations(world: World | None, path: str) -> dict[str, Any]:
    """Location of each tensor -> its value, or the string "refused"."""
    model = load(world, path)
    found: dict[str, Any] = {}

    def enter(location: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[location] = value
        elif isinstance(value, Withheld):
            found[location] = "refused"
        elif isinstance(value, dict):
            for key, item in value.items():
                enter(f"{location}[{key}]", item)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                enter(f"{location}[{index}]", item)

    layer = model.get(next(e.path for e in model.modules() if hasattr(type(e), "residual"))[len(model.path) + 1 :])
    for child in layer:
        if not any(name in child.path for name in ("attn", "attention", "mlp")) or "norm" in child.path:
            continue
        for operation in child.source:
            for side in ("inputs", "output"):
                try:
                    with torch.no_grad(), model.trace(IDS):
                        value = port.save(getattr(operation, side))
                except interleave.UnknownLayout:
                    found[f"{operation.path}.{side}"] = "refused"
                else:
                    enter(f"{operation.path}.{side}", value)
    return found


def compare(world: World, path: str, truths: dict[str, Any]) -> tuple[int, list[str]]:
    wrong = []
    right = 0
    for location, value in operations(world, path).items():
        if isinstance(value, str):
            if not location.endswith(MAY_BE_REFUSED):
                wrong.append(f"{location} is refused")
            continue
        truth = truths[location]
        scale = truth.abs().max().item() or 1.0
        if value.shape != truth.shape or (value - truth).abs().max().item() > 1e-5 * scale:
            wrong.append(f"{location}: {tuple(value.shape)} for {tuple(truth.shape)}")
        else:
            right += 1
    return right, wrong


@pytest.mark.parametrize("kind", ["llama-bias", "llama-grouped", "qwen3", "gemma2", "gpt-neox"])
def test_every_operation_of_a_sharded_forward_reads_as_on_one_process(pools: Pools, kind: str) -> None:
    path = str(tiny(kind))
    truths = {k: v for k, v in operations(None, path).items() if isinstance(v, torch.Tensor)}
    for right, wrong in pools(2).run(compare, path, truths, timeout=120):
        assert not wrong, "\n".join(wrong)
        assert right > 20


def heads_edited(world: World | None, path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits before and after one head's contribution is zeroed where attention has just computed it."""
    model = load(world, path)
    with torch.no_grad(), model.trace(IDS):
        before = model.lm_head.output.save()
    with torch.no_grad(), model.trace(IDS):
        model.model.layers[0].self_attn.source.attention_interface_1.output[0][:, :, 7] = 0
        model.model.layers[1].mlp.act_fn.output[..., 5:9] = 3.0
        after = model.lm_head.output.save()
    return before, after


def test_an_edit_inside_a_sharded_forward_reaches_the_model(pools: Pools) -> None:
    path = str(tiny("llama-bias"))
    before, truth = heads_edited(None, path)
    assert (truth - before).abs().max() > 1e-2 * before.abs().max()
    for _, after in pools(2).run(heads_edited, path):
        torch.testing.assert_close(after, truth, rtol=1e-5, atol=1e-5)
