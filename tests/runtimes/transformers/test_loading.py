"""What is refused, by name and before weights are read, and what `wrap` and the command line make of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig
from typer.testing import CliRunner

import interleave
from interleave.__main__ import app
from interleave.load import LoadRequest
from runtimes.transformers import fragments as transformers_fragments
from runtimes.transformers.loading import check
from tests.models import SIZES, tiny
from tests.pool import Pools, World

IDS = torch.arange(3, 12)[None]


def config_only(directory: Path, model_type: str, **changes: Any) -> str:
    """A directory that holds a config and no weights: a refusal that passes here has read none."""
    AutoConfig.for_model(model_type, **changes).save_pretrained(directory)
    return str(directory)


def test_a_degree_that_cannot_work_is_refused_with_those_that_do(tmp_path: Path) -> None:
    path = config_only(tmp_path, "llama", **SIZES)
    with pytest.raises(interleave.Unshardable, match=r"tp=5.*num_attention_heads is 12.*2, 3, 4, 6, 12\."):
        interleave.load(path, tp=5)
    check(LoadRequest(path, tp=3))


def test_smollm2s_nine_heads_go_three_ways(tmp_path: Path) -> None:
    sizes = SIZES | {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "intermediate_size": 1536}
    path = config_only(tmp_path, "llama", **sizes)
    with pytest.raises(interleave.Unshardable, match=r"degrees that work are 3\."):
        interleave.load(path, tp=2)


def test_more_ranks_than_key_value_heads_are_refused(tmp_path: Path) -> None:
    path = config_only(tmp_path, "llama", **SIZES | {"num_key_value_heads": 2})
    with pytest.raises(interleave.Unshardable, match="num_key_value_heads is 2"):
        interleave.load(path, tp=4)


@pytest.mark.parametrize(
    ("model_type", "said"), [("gpt2", "publishes no tensor-parallel plan"), ("deepseek_v2", "Mla")]
)
def test_a_plan_that_is_missing_or_not_understood_is_refused(tmp_path: Path, model_type: str, said: str) -> None:
    path = config_only(tmp_path, model_type)
    with pytest.raises(interleave.Unshardable, match=said):
        interleave.load(path, tp=2)


def test_a_quantized_checkpoint_is_refused_across_ranks(tmp_path: Path) -> None:
    path = config_only(tmp_path, "llama", **SIZES)
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(interleave.Unshardable, match="quantized"):
        interleave.load(path, tp=2)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(interleave.InterleaveError, match="PEFT adapter"):
        interleave.load(tmp_path, tp=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp": 2, "device_map": "auto"}, "device_map="),
        ({"tp": 2, "distributed_config": {}}, "distributed_config= is decided by tp="),
        ({"pp": 2}, "pp=2"),
        ({"tp": 0}, "tp=0"),
        ({"dtype": "float33"}, "float33"),
        ({"device": "gpu"}, "'cpu' and 'cuda'"),
        ({"limit": -1}, "positive number of seconds"),
        ({"runtime": "jax"}, "no runtime 'jax'"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(interleave.InterleaveError, match=said):
        interleave.load(tiny("llama"), **options)


def test_what_is_no_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(interleave.InterleaveError, match="does not exist"):
        interleave.load(tmp_path / "nowhere", tp=2)
    with pytest.raises(interleave.InterleaveError, match="no HuggingFace model directory"):
        interleave.load(tmp_path, tp=2)
    with pytest.raises(interleave.InterleaveError, match="not None"):
        interleave.load(None)  # type: ignore[arg-type]
    path = config_only(tmp_path / "t5", "t5")
    with pytest.raises(interleave.InterleaveError, match="T5Config"):
        interleave.load(path, tp=2)
    with pytest.raises(interleave.InterleaveError, match="could not load"):
        interleave.load(config_only(tmp_path / "hollow", "llama", **SIZES))


def test_a_text_prompt_without_a_tokenizer_is_refused() -> None:
    model = interleave.load(tiny("llama"), dtype="float32")
    with pytest.raises(interleave.InterleaveError, match="no tokenizer"), model.trace("some words"):
        model.lm_head.output.save()


# -- wrap --------------------------------------------------------------------------------------------------------


def wrapped(world: World, path: str) -> dict[str, torch.Tensor]:
    module = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=world.size)
    ).eval()
    found = read(interleave.wrap(module))
    alone = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model = interleave.wrap(alone)
    assert model.interleaver.agreement is None, "what is not sharded runs as on one process"
    for name, value in read(model).items():
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name
    return found


def read(model: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad(), model.trace(IDS):
        gate = model.model.layers[0].mlp.gate_proj.output.save()
        active = model.model.layers[0].mlp.act_fn.output.save()
        model.model.layers[1].self_attn.o_proj.input[..., :8] = 0
        out = model.lm_head.output.save()
    return {"gate": gate, "active": active, "out": out}


def test_wrap_puts_the_tree_over_a_model_that_is_sharded_already(pools: Pools) -> None:
    truth = read(interleave.load(tiny("llama-bias"), dtype="float32"))
    for found in pools(2).run(wrapped, str(tiny("llama-bias"))):
        for name, value in truth.items():
            assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


def test_wrap_refuses_what_it_cannot_be_right_about() -> None:
    module = AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float32)
    with pytest.raises(interleave.InterleaveError, match="causal language model"):
        interleave.wrap(module.model)
    with pytest.raises(interleave.InterleaveError, match="no runtime knows"):
        interleave.wrap(torch.nn.Linear(2, 2))
    module.peft_config = {}
    with pytest.raises(interleave.Unshardable, match="PEFT"):
        interleave.wrap(module)


def finds_nothing(world: World, path: str) -> None:
    found = transformers_fragments.installed
    transformers_fragments.installed = lambda module: None
    try:
        with pytest.raises(interleave.InterleaveError, match="nothing of it was found sharded"):
            interleave.load(path, tp=world.size, dtype="float32")
    finally:
        transformers_fragments.installed = found


def test_it_is_an_error_if_nothing_of_a_sharded_model_is_found_sharded(pools: Pools) -> None:
    pools(2).run(finds_nothing, str(tiny("llama")))


# -- the command line --------------------------------------------------------------------------------------------


def test_the_layout_table_comes_from_the_config_alone(tmp_path: Path) -> None:
    path = config_only(tmp_path, "llama", **SIZES)
    done = CliRunner().invoke(app, ["layout", path, "--tp", "3"])
    assert done.exit_code == 0, done.output
    for shown in (
        "model.model.layers.*.mlp.gate_proj.output",
        "24+24+24",
        "mlp.down_proj.input",
        "decided when the model",
    ):
        assert shown in done.output
    assert "o_proj.output" not in done.output
    refused = CliRunner().invoke(app, ["layout", path, "--tp", "5"])
    assert refused.exit_code == 2
    assert "The degrees that work are 2, 3, 4, 6, 12." in refused.output
