"""Blocks as users write them: what they return on ranks is what they return on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from interleave.errors import UnknownLayout
from interleave.nnsight_port import save
from tests.harness import IDS, Case, agree, loaded
from tests.models import tiny
from tests.pool import Pools, World

ROWS = torch.tensor(IDS)


def test_fragmented_answers_alike_on_every_rank(pools: Pools):
    answers = pools(3).run(fragmented, Case(tiny("qwen3")))
    assert answers[0] == answers[1] == answers[2]
    assert {True, False} == set(answers[0].values())
    assert answers[0]["model.model.layers.1.mlp.up_proj.output"]
    assert not answers[0]["model.model.layers.1.mlp.down_proj.output"]


def fragmented(world: World, case: Case) -> dict[str, bool]:
    model = loaded(world, case)
    places = [f"{path}.{side}" for path, _ in model.named_modules() for side in ("input", "output")]
    return {place: model.interleaver.fragments.fragmented(place) for place in places}


def test_a_logit_lens_calls_the_head_on_every_layer(pools: Pools):
    assert len(agree(pools(3), Case(tiny("llama")), logit_lens)) == 3


def logit_lens(model: Any) -> Any:
    with model.trace(ROWS):
        lens = [model.lm_head(model.model.norm(layer.output)) for layer in model.model.layers]
        lens.append(model.lm_head.output)
        save(lens)
    return lens


def test_a_head_is_ablated_in_place_without_a_clone(pools: Pools):
    plain, ablated = agree(pools(3), Case(tiny("llama")), ablation)
    assert (plain - ablated).abs().max() > 0.01


def ablation(model: Any) -> Any:
    with model.trace(ROWS):
        plain = model.lm_head.output.save()
    with model.trace(ROWS):
        model.model.layers[0].self_attn.o_proj.input[..., 8:12] = 0
        model.model.layers[1].mlp.down_proj.input[..., 20:50] *= 3
        ablated = model.lm_head.output.save()
    return plain, ablated


def test_inference_mode_changes_nothing(pools: Pools):
    agree(pools(3), Case(tiny("llama-bias")), in_inference_mode)


def in_inference_mode(model: Any) -> Any:
    with torch.inference_mode():
        return ablation(model)


def test_a_sharded_module_is_called_while_its_own_visit_is_open(pools: Pools):
    results = agree(pools(3), Case(tiny("llama-bias")), calls_in_open_visits)
    for called, own, again, _ in results[:-1]:
        assert torch.equal(called, own)
        assert not torch.allclose(again, own, rtol=1e-2)


def calls_in_open_visits(model: Any) -> Any:
    layer = model.model.layers[0]
    results: list[Any] = []
    with model.trace(ROWS):
        for module in (layer.self_attn.v_proj, layer.self_attn.o_proj, layer.mlp.up_proj, layer.mlp.down_proj):
            given = module.input
            called = module(given)
            own = module.output
            again = module(given * 2)
            module.output = own + again
            results.append([called.clone(), own.clone(), again.clone(), module.output.clone()])
        results.append(model.lm_head.output)
        save(results)
    return results


def test_a_value_saved_in_one_trace_is_assigned_in_another(pools: Pools):
    patched, source = agree(pools(2), Case(tiny("llama-bias")), patching)
    assert not torch.allclose(patched, source, atol=1e-3)


def patching(model: Any) -> Any:
    with model.trace(ROWS[:1]):
        gate = model.model.layers[0].mlp.gate_proj.output.save()
        heads = model.model.layers[1].self_attn.o_proj.input.save()
        source = model.lm_head.output.save()
    with model.trace(ROWS[1:]):
        model.model.layers[0].mlp.gate_proj.output = gate
        model.model.layers[1].self_attn.o_proj.input = heads * 2
        patched = model.lm_head.output.save()
    return patched, source


def test_two_invokes_each_see_and_edit_their_own_rows(pools: Pools):
    first, second, third = agree(pools(2), Case(tiny("llama")), two_invokes)
    assert first.shape[0] == second.shape[0] == 1
    assert third.shape[0] == 2


def two_invokes(model: Any) -> Any:
    with model.trace() as tracer:
        with tracer.invoke(ROWS[:1]):
            first = model.model.layers[0].mlp.up_proj.output.save()
            model.model.layers[1].mlp.down_proj.input[..., :40] = 0
        with tracer.invoke(ROWS[1:]):
            model.model.layers[0].self_attn.q_proj.output *= 2
            second = model.model.layers[0].mlp.up_proj.output.save()
        with tracer.invoke():
            third = model.lm_head.output.save()
    return first, second, third


def test_a_cache_keeps_values_as_they_were_after_the_edits(pools: Pools):
    cached, edited = agree(pools(3), Case(tiny("llama")), cache_of_edits)
    assert torch.equal(cached[0], edited)


def cache_of_edits(model: Any) -> Any:
    gate = model.model.layers[0].mlp.gate_proj
    down = model.model.layers[0].mlp.down_proj
    with model.trace(ROWS) as tracer:
        cache = tracer.cache([gate, down], include_inputs=True)
        gate.output[..., :30] = 1.5
        edited = gate.output.save()
    return [cache[gate.path].output, cache[down.path].input, cache[down.path].output], edited


def test_after_an_early_stop_the_next_trace_is_right(pools: Pools):
    agree(pools(2), Case(tiny("llama")), stop_and_go_on)


def stop_and_go_on(model: Any) -> Any:
    with model.trace(ROWS) as tracer:
        early = model.model.layers[0].mlp.gate_proj.output.save()
        tracer.stop()
    with model.trace(ROWS):
        logits = model.lm_head.output.save()
    return early, logits


def test_greedy_tokens_are_the_same_with_a_read_and_with_an_edit_in_every_step(pools: Pools):
    plain, watched, edited, steps = agree(pools(3), Case(tiny("llama")), greedy)
    assert torch.equal(plain, watched)
    assert not torch.equal(plain, edited)
    assert [step.shape[1] for step in steps] == [7, 1, 1, 1, 1]


def greedy(model: Any) -> Any:
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    plain = model.generate(ROWS, **options)
    with model.generate(ROWS, **options) as tracer:
        model.model.layers[1].mlp.gate_proj.output.save()
        watched = tracer.result.save()
    with model.generate(ROWS, **options) as tracer:
        model.model.layers[1].mlp.gate_proj.output *= -2
        edited = tracer.result.save()
    steps: list[torch.Tensor] = []
    with model.generate(ROWS, **options) as tracer:
        for _ in tracer.iter[:5]:
            steps.append(model.model.layers[0].self_attn.v_proj.output.save())
    return plain, watched, edited, steps


def test_sampled_tokens_are_those_of_rank_0s_seed_on_every_rank(pools: Pools):
    first, second = agree(pools(3), Case(tiny("llama")), sampled)
    assert not torch.equal(first, second)


def sampled(model: Any) -> Any:
    # One seed per rank: the ranks draw alike all the same, and as one process with rank 0's seed does.
    torch.manual_seed(100 + (dist.get_rank() if dist.is_initialized() else 0))
    drawn = []
    for _ in range(2):
        with model.generate(ROWS, max_new_tokens=6, min_new_tokens=6, do_sample=True) as tracer:
            model.model.layers[0].mlp.gate_proj.output.save()
            tokens = tracer.result.save()
        drawn.append(tokens)
    return drawn


def test_noise_drawn_in_a_block_is_the_same_on_every_rank(pools: Pools):
    agree(pools(3), Case(tiny("llama")), noisy)


def noisy(model: Any) -> Any:
    torch.manual_seed(7 + (dist.get_rank() if dist.is_initialized() else 0))
    with model.trace(ROWS):
        gate = model.model.layers[0].mlp.gate_proj.output
        model.model.layers[0].mlp.gate_proj.output = gate + torch.randn(gate.shape)
        logits = model.lm_head.output.save()
    return logits


def test_an_edited_gradient_flows_on(pools: Pools):
    plain, edited = agree(pools(2), Case(tiny("llama")), edited_gradient)
    assert not torch.allclose(plain, edited, rtol=1e-3)


def edited_gradient(model: Any) -> Any:
    found = []
    for factor in (1, 3):
        with model.trace(ROWS):
            early = model.model.embed_tokens.output
            up = model.model.layers[1].mlp.up_proj.output
            loss = model.lm_head.output.square().sum()
            with loss.backward():
                up.grad = up.grad * factor
                found.append(early.grad.save())
    return found


def test_a_module_replaces_another_and_is_called_where_it_never_runs(pools: Pools):
    agree(pools(2), Case(tiny("llama")), borrowed)


def borrowed(model: Any) -> Any:
    first, second = model.model.layers
    with model.trace(ROWS):
        hidden = first.mlp.input
        first.mlp.output = second.mlp(hidden) + second.mlp.down_proj(second.mlp.gate_proj(hidden))
        logits = model.lm_head.output.save()
    return logits


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_parameters_read_whole(pools: Pools, kind: str):
    agree(pools(3), Case(tiny(kind)), parameters)


def parameters(model: Any) -> Any:
    gate = model.model.layers[0].mlp.gate_proj.weight
    down = model.model.layers[0].mlp.down_proj.weight
    return gate.norm().item(), down[3], model.lm_head.weight[5], model.model.embed_tokens.weight[[5, 90]]


def test_a_refusal_is_raised_at_its_line_and_the_block_goes_on(pools: Pools):
    refused = pools(2).run(refusal, Case(tiny("llama")))
    assert refused[0] == refused[1]
    assert [kind for kind, _ in refused[0]] == ["UnknownLayout", "read"]
    assert "model.model.layers.0.self_attn" in refused[0][0][1]


def refusal(world: World, case: Case) -> list[tuple[str, Any]]:
    model = loaded(world, case)
    seen: list[tuple[str, Any]] = []
    with model.trace(ROWS):
        cache = model.model.layers[0].self_attn.inputs[1]["past_key_values"]
        try:
            seen.append(("read", cache.layers[0].keys))
        except UnknownLayout as error:
            seen.append(("UnknownLayout", str(error)))
        seen.append(("read", model.lm_head.output.sum().item()))
    return seen


def test_two_invokes_each_get_the_gradient_of_their_own_rows(pools: Pools):
    first, second = agree(pools(2), Case(tiny("llama-bias")), gradients_of_two_invokes)
    assert first.shape == second.shape
    assert not torch.allclose(first, second, rtol=1e-3)


def gradients_of_two_invokes(model: Any) -> Any:
    with model.trace() as tracer:
        with tracer.invoke(ROWS[:1]):
            up = model.model.layers[0].mlp.up_proj.output
            loss = model.lm_head.output.square().sum()
            with loss.backward(retain_graph=True):
                first = up.grad.save()
        with tracer.invoke(ROWS[1:]):
            gate = model.model.layers[0].mlp.gate_proj.output
            loss = model.lm_head.output.square().sum()
            with loss.backward(retain_graph=True):
                second = gate.grad.save()
    return first, second


def test_a_source_opened_in_one_trace_does_not_disturb_generating_in_another(pools: Pools):
    heads, tokens = agree(pools(2), Case(tiny("gemma2")), source_then_generate)
    assert heads.dim() == 4
    assert tokens.shape == (2, ROWS.shape[1] + 4)


def source_then_generate(model: Any) -> Any:
    with torch.no_grad(), model.trace(ROWS):
        heads = model.model.layers[0].self_attn.source.attention_interface_1.output[0].save()
    with torch.no_grad(), model.generate(ROWS, max_new_tokens=4, min_new_tokens=4, do_sample=False) as tracer:
        tokens = tracer.result.save()
    return heads, tokens


def test_rows_of_a_padded_batch_keep_their_places(pools: Pools):
    agree(pools(3), Case(tiny("llama-bias")), padded)


def padded(model: Any) -> Any:
    mask = torch.ones_like(ROWS)
    mask[0, :3] = 0
    with torch.no_grad(), model.trace(ROWS, attention_mask=mask):
        queries = model.model.layers[0].self_attn.q_proj.output
        queries[0, 3:, :4] = 0
        gate = model.model.layers[1].mlp.act_fn.output.save()
        out = model.lm_head.output[:, -1].save()
    return gate[1], out
