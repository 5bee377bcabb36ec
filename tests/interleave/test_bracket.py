"""The bracket on two real ranks: what is gathered and how often, what counts as an edit, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import interleave
from boundary.collectives import record
from interleave.fragments import Withheld, same_bits
from interleave.layout import Shard
from tests.models import tiny
from tests.pool import Pools, World

IDS = torch.arange(3, 12)[None]


@pytest.fixture
def ranks(pools: Pools) -> Any:
    return pools(2)


def sharded(world: World, path: str, **options: Any) -> Any:
    key = (path, *sorted(options.items()))
    return world.keep(key, lambda: interleave.load(path, tp=world.size, dtype="float32", **options))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad(), model.trace(IDS):
        out = model.lm_head.output.save()
    return out


# -- looking changes nothing -------------------------------------------------------------------------------------


def untouched_comes_back(world: World, path: str) -> None:
    fragments = sharded(world, path).interleaver.fragments
    output, entry = "model.model.layers.0.mlp.gate_proj.output", "model.model.layers.0.mlp.down_proj.input"
    piece = torch.randn(1, 9, 36, generator=torch.Generator().manual_seed(world.rank))
    whole, undo = fragments.whole(output, piece)
    assert whole.shape == (1, 9, 72)
    assert undo(whole) is piece
    whole.copy_(whole.clone())  # a write that changes no bit is not an edit
    assert undo(whole) is piece
    whole.view(-1)[:] = whole.view(-1)
    assert undo(whole[...]) is piece, "a view of the same elements is the same value"
    value = ((piece,), {})
    opened, undo = fragments.whole(entry, value)
    assert undo(opened) is value
    assert undo(((opened[0][0],), {})) is value


def edited_goes_on(world: World, path: str) -> None:
    fragments = sharded(world, path).interleaver.fragments
    output = "model.model.layers.0.mlp.gate_proj.output"
    piece = torch.randn(1, 9, 36, generator=torch.Generator().manual_seed(world.rank))
    mine = slice(36 * world.rank, 36 * (world.rank + 1))

    def in_place(whole: torch.Tensor) -> torch.Tensor:
        whole[..., ::2] = 7.0
        return whole

    def data(whole: torch.Tensor) -> torch.Tensor:
        whole.data.add_(1.0)
        return whole

    def numpy(whole: torch.Tensor) -> torch.Tensor:
        whole.numpy()[...] *= 2
        return whole

    def sign_of_zero(whole: torch.Tensor) -> torch.Tensor:
        whole.zero_().neg_()
        return whole

    def replaced(whole: torch.Tensor) -> torch.Tensor:
        return (whole + 1).to(torch.float64)

    for edit in (in_place, data, numpy, sign_of_zero, replaced):
        whole, undo = fragments.whole(output, piece)
        left = edit(whole)
        back = undo(left)
        assert back is not piece, edit.__name__
        assert same_bits(back, left[..., mine]), edit.__name__


def reading_changes_no_bit(world: World, path: str) -> None:
    model = sharded(world, path)
    before = logits(model)
    with torch.no_grad(), model.trace(IDS) as tracer:
        tracer.cache(include_inputs=True)
        for layer in model.model.layers:
            layer.self_attn.q_proj.output.sum()
            layer.mlp.gate_proj.output.sum()
            layer.mlp.down_proj.input.sum()
        out = model.lm_head.output.save()
    assert same_bits(out, before)
    with torch.enable_grad(), model.trace(IDS):
        for layer in model.model.layers:
            layer.mlp.gate_proj.output.sum()
        recorded = model.lm_head.output.save()
    with torch.enable_grad(), model.trace(IDS):
        plain = model.lm_head.output.save()
    assert same_bits(recorded.detach(), plain.detach())


def in_inference_mode(world: World, path: str) -> None:
    model = sharded(world, path)
    with torch.inference_mode(), model.trace(IDS):
        gate = model.model.layers[0].mlp.gate_proj.output
        version = gate._version
        gate[..., :5] = 0
        assert gate._version > version
        queries = model.model.layers[1].self_attn.q_proj.output
        model.model.layers[1].self_attn.k_proj.output.sum()
        queries[..., 3:9] = 0  # late: the model has gone on
        out = model.lm_head.output.save()
    with torch.no_grad(), model.trace(IDS):
        model.model.layers[0].mlp.gate_proj.output[..., :5] = 0
        model.model.layers[1].self_attn.q_proj.output[..., 3:9] = 0
        expected = model.lm_head.output.save()
    assert same_bits(out.clone(), expected)


@pytest.mark.parametrize("claim", [untouched_comes_back, edited_goes_on, reading_changes_no_bit, in_inference_mode])
def test_only_an_edit_goes_on(ranks: Any, claim: Any) -> None:
    ranks.run(claim, str(tiny("llama-bias")))


# -- one visit, one exchange -------------------------------------------------------------------------------------


def exchanges(world: World, path: str) -> dict[str, int]:
    model = sharded(world, path)
    counts = {}

    with torch.no_grad(), record() as events, model.trace(IDS):
        model.model.layers[0].self_attn.o_proj.output.save()
        model.model.layers[0].output.save()
        model.lm_head.output.save()
    counts["wholes"] = len(events)

    with torch.no_grad(), record() as events, model.trace(IDS):
        model.model.layers[0].mlp.gate_proj.output.save()
    counts["one reader"] = len(events)

    with torch.no_grad(), record() as events, model.trace() as tracer:
        for _ in range(64):
            with tracer.invoke(IDS):
                model.model.layers[0].mlp.gate_proj.output.save()
    counts["64 readers"] = len(events)

    with torch.no_grad(), record() as events, model.trace(IDS) as tracer:
        pieces = [
            module
            for layer in model.model.layers
            for module in (
                layer.self_attn.q_proj,
                layer.self_attn.k_proj,
                layer.self_attn.v_proj,
                layer.mlp.gate_proj,
                layer.mlp.up_proj,
                layer.mlp.act_fn,
            )
        ]
        tracer.cache(modules=[*pieces, *(layer.mlp.down_proj for layer in model.model.layers)], include_inputs=True)
    counts["a cache"] = len(events)

    with torch.no_grad(), record() as events, model.trace(IDS):
        model.model.layers[0].mlp.gate_proj.output = torch.ones(1, 9, 72)
        model.lm_head.output.save()
    counts["a replacement"] = len(events)

    with torch.no_grad(), record() as events:
        logits(model)
    counts["nobody"] = len(events)
    return counts


def test_a_visit_makes_one_exchange_however_many_read_it(ranks: Any) -> None:
    for counts in ranks.run(exchanges, str(tiny("llama-bias"))):
        assert counts == {
            "wholes": 0,
            "one reader": 1,
            "64 readers": 1,
            "a cache": 1,
            "a replacement": 0,
            "nobody": 0,
        }


def early_caches(world: World, path: str) -> None:
    model = sharded(world, path)
    with torch.no_grad(), model.trace(IDS):
        truth = model.model.layers[0].mlp.gate_proj.output.save()
        late = model.model.layers[1].mlp.gate_proj.output.save()
    with torch.no_grad(), model.trace(IDS) as tracer:
        cache = tracer.cache(modules=[layer.mlp.gate_proj for layer in model.model.layers])
        model.model.layers[0].output.sum()
        inside = interleave.nnsight_port.save(cache["model.model.layers.0.mlp.gate_proj"].output)
        tracer.stop()
    assert same_bits(inside, truth)
    assert "model.model.layers.1.mlp.gate_proj" not in cache
    with torch.no_grad(), model.trace(IDS) as tracer:
        stopped = tracer.cache(modules=[model.model.layers[0].mlp.gate_proj], dtype=torch.float64)
        model.model.layers[0].output.sum()
        tracer.stop()
    assert same_bits(stopped["model.model.layers.0.mlp.gate_proj"].output, truth.double())
    with model.trace(IDS) as tracer:
        kept = tracer.cache(modules=[model.model.layers[1].mlp.gate_proj], detach=False)
    output = kept["model.model.layers.1.mlp.gate_proj"].output
    assert output.requires_grad
    torch.testing.assert_close(output.detach(), late, rtol=1e-5, atol=1e-5)


def test_a_cache_is_assembled_when_it_is_read_and_when_the_trace_stops(ranks: Any) -> None:
    ranks.run(early_caches, str(tiny("llama-bias")))


# -- refusals ----------------------------------------------------------------------------------------------------


def refused_in_the_block(world: World, path: str) -> None:
    model = sharded(world, path)
    before = logits(model)
    lines: list[str] = []
    with torch.no_grad(), model.trace(IDS) as tracer:
        cache = tracer.cache()
        mlp = model.model.layers[0].mlp
        try:
            mlp.up_proj.source.F_linear_0.output.sum()
        except interleave.UnknownLayout as error:
            lines.append(str(error))
        down = mlp.down_proj.output.save()
        out = model.lm_head.output.save()
    assert len(lines) == 1
    assert "model.model.layers.0.mlp.up_proj.source.F_linear_0.output" in lines[0]
    assert down.shape == (1, 9, 48)
    assert same_bits(out, before)
    past = cache["model.model"].output.past_key_values
    assert isinstance(past, Withheld)
    with pytest.raises(interleave.UnknownLayout, match="this rank's heads"):
        _ = past.layers
    with pytest.raises(interleave.UnknownLayout, match=r"q_proj\.source"), model.trace(IDS):
        model.model.layers[1].self_attn.q_proj.source.F_linear_0.output.save()
    assert same_bits(logits(model), before)


def shapes_refused(world: World, path: str) -> None:
    model = sharded(world, path)
    before = logits(model)
    gate = model.model.layers[0].mlp.gate_proj
    for wrong in (torch.zeros(1, 9, 71), torch.zeros(72, 9, 1), torch.tensor(1.0)):
        with pytest.raises(interleave.ShapeChanged, match=r"gate_proj\.output"), model.trace(IDS):
            gate.output = wrong
        with pytest.raises(interleave.ShapeChanged, match=r"gate_proj\.output"), model.trace(IDS):
            gate.skip(wrong)
        with pytest.raises(interleave.ShapeChanged, match=r"down_proj\.input"), model.trace(IDS):
            model.model.layers[0].mlp.down_proj.input = wrong
    assert same_bits(logits(model), before)


def declared(world: World, path: str) -> None:
    model = sharded(world, path)
    location = "model.layers.*.mlp.up_proj.source.F_linear_0.output"
    model.declare(location, Shard(-1))
    try:
        with torch.no_grad(), model.trace(IDS):
            seen = model.model.layers[0].mlp.up_proj.source.F_linear_0.output.save()
            truth = model.model.layers[0].mlp.up_proj.output.save()
        assert same_bits(seen, truth)
    finally:
        for layer in range(2):
            del model.interleaver.fragments.tree[f"model.model.layers.{layer}.mlp.up_proj.source.F_linear_0.output"]


@pytest.mark.parametrize("claim", [refused_in_the_block, shapes_refused, declared])
def test_what_is_refused_is_refused_at_its_line_and_nothing_else_changes(ranks: Any, claim: Any) -> None:
    ranks.run(claim, str(tiny("llama-bias")))


# -- parameters, and what a user knows ---------------------------------------------------------------------------


def parameters(world: World, path: str, reference: dict[str, torch.Tensor]) -> None:
    model = sharded(world, path)
    gate = model.model.layers[0].mlp.gate_proj
    with torch.no_grad(), model.trace(IDS):
        weight = interleave.nnsight_port.save(gate.weight)
        norm = interleave.nnsight_port.save(float(gate.weight.norm()))
        head = interleave.nnsight_port.save(model.lm_head.weight[5])
        bias = interleave.nnsight_port.save(gate.bias)
    assert same_bits(weight, reference["gate"])
    assert norm == float(reference["gate"].norm())
    assert same_bits(head, reference["head"][5])
    assert same_bits(bias, reference["bias"])
    before = logits(model)
    with torch.no_grad(), model.trace(IDS):
        model.model.layers[0].mlp.gate_proj.weight[40:] = 0
        edited = model.lm_head.output.save()
    torch.testing.assert_close(edited, reference["edited"], rtol=1e-5, atol=1e-5)
    assert (edited - before).abs().max() > 1e-3 * before.abs().max()
    with torch.no_grad(), model.trace(IDS):
        model.model.layers[0].mlp.gate_proj.weight[...] = reference["gate"]
    assert same_bits(logits(model), before)


def test_a_parameter_reads_whole_and_takes_edits(ranks: Any) -> None:
    model = interleave.load(tiny("llama-bias"), dtype="float32")
    gate = model.model.layers[0].mlp.gate_proj._module
    reference = {"gate": gate.weight.detach().clone(), "bias": gate.bias.detach().clone()}
    reference["head"] = model.lm_head._module.weight.detach().clone()
    with torch.no_grad():
        gate.weight[40:] = 0
    reference["edited"] = logits(model)
    ranks.run(parameters, str(tiny("llama-bias")), reference)


def by_hand(world: World, path: str) -> None:
    model = sharded(world, path)
    with torch.no_grad(), model.trace(IDS):
        gate = model.model.layers[0].mlp.gate_proj.output
        piece = interleave.shard(gate)
        whole = interleave.nnsight_port.save(interleave.gather(piece))
        narrow = interleave.nnsight_port.save(piece)
        gate = interleave.nnsight_port.save(gate)
    assert narrow.shape == (1, 9, 36)
    assert same_bits(whole, gate)
    with pytest.raises(interleave.InterleaveError, match="inside a trace block"):
        interleave.gather(whole)


def test_gather_and_shard_by_hand_undo_each_other(ranks: Any) -> None:
    ranks.run(by_hand, str(tiny("llama-bias")))


# -- the kinds of blocks that people write -----------------------------------------------------------------------


def late(model: Any) -> Any:
    """An edit that comes after the block has asked for something else, as on a tensor that the model holds too."""
    with torch.no_grad(), model.trace(IDS):
        queries = model.model.layers[0].self_attn.q_proj.output
        model.model.layers[0].self_attn.k_proj.output.sum()
        queries[..., :24] = 0
        out = model.lm_head.output.save()
    return out


def late_replacement(model: Any) -> Any:
    with torch.no_grad(), model.trace(IDS):
        mine = torch.ones(1, 9, 72)
        model.model.layers[0].mlp.gate_proj.output = mine
        up = model.model.layers[0].mlp.up_proj.output
        up[..., 3:9] = 2.0
        out = model.lm_head.output.save()
    return out


def by_keyword(model: Any) -> Any:
    with torch.no_grad(), model.trace(IDS):
        taken = model.model.layers[0].mlp.down_proj.input
        out = model.model.layers[0].mlp.down_proj(input=taken).save()
    return out


def unnamed_output(model: Any) -> Any:
    with torch.no_grad(), model.trace(IDS, return_dict=False, output_attentions=True):
        parts = interleave.nnsight_port.save(model.output)
    return torch.stack(parts[-1])


def generated(model: Any) -> Any:
    options = {"return_dict_in_generate": True, "output_attentions": True, "do_sample": False}
    with torch.no_grad(), model.generate(IDS, max_new_tokens=3, **options) as tracer:
        result = interleave.nnsight_port.save(tracer.result)
    return torch.cat([result.sequences.float().flatten(), *(step[0].flatten() for step in result.attentions)])


def integers(model: Any) -> Any:
    with torch.no_grad(), model.trace(IDS):
        model.model.layers[0].mlp.up_proj.output = torch.arange(72).expand(1, 9, 72)
        out = model.lm_head.output.save()
    return out


def norms_of_parameters(model: Any) -> Any:
    with torch.no_grad(), model.trace(IDS):
        norms = [float(p.norm()) for _, p in model.model.layers[0].mlp.named_parameters()]
        norms += [float(p.norm()) for p in model.model.layers[0].self_attn.parameters()]
        norms += [float(p.norm()) for p in model.lm_head.state_dict().values()]
        norms = interleave.nnsight_port.save(torch.tensor(norms))
    return norms


def gradient_of_a_parameter(model: Any) -> Any:
    with torch.enable_grad(), model.trace(IDS):
        (model.lm_head.output**2).mean().backward()
        gradient = interleave.nnsight_port.save(model.model.layers[0].mlp.gate_proj.weight.grad.clone())
    model._module.zero_grad()
    return gradient


def parameter_written_through_data(model: Any) -> Any:
    with torch.no_grad(), model.trace(IDS):
        weight = model.lm_head.weight
        before = weight.clone()
        weight.data[5] = 0
        out = model.lm_head.output.save()
        weight[...] = before
    return out


BLOCKS = (
    late,
    late_replacement,
    by_keyword,
    unnamed_output,
    generated,
    integers,
    norms_of_parameters,
    gradient_of_a_parameter,
    parameter_written_through_data,
)


def on_a_rank(world: World, path: str, truths: list[torch.Tensor]) -> None:
    model = sharded(world, path, attn_implementation="eager")
    before = logits(model)
    for block, truth in zip(BLOCKS, truths, strict=True):
        value = block(model)
        assert value.shape == truth.shape, block.__name__
        scale = truth.abs().max().item()
        assert (value - truth).abs().max().item() <= 1e-5 * scale, block.__name__
        assert same_bits(logits(model), before), f"{block.__name__} left something behind"


def test_blocks_give_what_they_give_on_one_process(ranks: Any) -> None:
    path = str(tiny("llama-bias"))
    model = interleave.load(path, dtype="float32", attn_implementation="eager")
    truths = [block(model).detach().clone() for block in BLOCKS]
    plain = logits(model)
    for edited in (late, late_replacement, integers, parameter_written_through_data):
        truth = truths[BLOCKS.index(edited)]
        assert (truth - plain).abs().max() > 1e-3 * plain.abs().max(), f"{edited.__name__} edits nothing"
    ranks.run(on_a_rank, path, truths)


def failed_traces(world: World, path: str) -> None:
    model = sharded(world, path)
    kept = {}
    with pytest.raises(ZeroDivisionError), torch.no_grad(), model.trace(IDS) as tracer:
        kept["cache"] = tracer.cache(modules=[model.model.layers[0].mlp.gate_proj])
        model.model.layers[1].input.sum()
        _ = 1 / 0
    with pytest.raises(interleave.UnknownLayout, match="raised before its caches"):
        kept["cache"]["model.model.layers.0.mlp.gate_proj"].output.sum()
    with pytest.raises(ZeroDivisionError), torch.no_grad(), model.trace(IDS):
        model.lm_head.weight.sum()
        _ = 1 / 0
    assert not model.interleaver.parameters._held

    with torch.no_grad(), record() as events, model.trace() as tracer:
        for _ in range(16):
            with tracer.invoke(IDS):
                tracer.cache(modules=[model.model.layers[0].mlp.gate_proj])
    assert len(events) == 1
    assert events[0].nbytes == 2 * 16 * 9 * 36 * 4, "each row crosses once, however many caches keep it"


def test_a_failed_trace_leaves_nothing_and_caches_of_many_invokes_share(ranks: Any) -> None:
    ranks.run(failed_traces, str(tiny("llama-bias")))


# -- ranks that disagree -----------------------------------------------------------------------------------------


def everything_read(model: Any) -> torch.Tensor:
    """The logits of a trace that reads pieces at every place where another one may have failed."""
    with torch.no_grad(), model.trace(IDS):
        for layer in model.model.layers:
            layer.self_attn.q_proj.output.sum()
            layer.mlp.gate_proj.output.sum()
            layer.mlp.up_proj.output.sum()
        out = model.lm_head.output.save()
    return out


def disagree(world: World, path: str, how: str) -> str:
    model = sharded(world, path, limit=3.0)
    before = logits(model)
    odd = world.rank == 0
    try:
        with torch.no_grad(), model.trace(IDS):
            mlp = model.model.layers[0].mlp
            if how == "one reads" and odd:
                mlp.gate_proj.output.sum()
            elif how == "two of equal size":
                (mlp.gate_proj if odd else mlp.up_proj).output.sum()
            elif how == "two of unequal size":
                (mlp.gate_proj if odd else model.model.layers[1].self_attn.q_proj).output.sum()
            elif how == "one raises" and odd:
                mlp.input.sum()
                raise ValueError("only here")
            model.lm_head.output.save()
    except (interleave.DivergedBlock, ValueError) as error:
        message = str(error)
    else:
        message = "nothing was raised"
    assert same_bits(everything_read(model), before), "the next trace is right, also where this one failed"
    assert same_bits(everything_read(model), before)
    return message


@pytest.mark.parametrize("how", ["one reads", "two of equal size", "two of unequal size", "one raises"])
def test_ranks_that_disagree_all_raise_and_the_next_trace_is_right(ranks: Any, how: str) -> None:
    messages = ranks.run(disagree, str(tiny("llama-bias")), how)
    if how == "one raises":
        assert messages.pop(0) == "only here"
    for message in messages:
        assert "did not run the same block" in message
