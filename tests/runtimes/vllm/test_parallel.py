"""vLLM's own parallel layers over real ranks: what our layouts assemble is what one process computes.

Every rank builds the layer, loads its part of one full weight through the layer's own loader, and runs its forward. The
numbers are small integers, so that sums in any order have the same bits, and comparisons are exact.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
import pickle
import socket
import traceback
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from boundary.collectives import GlooGroup, Group
from interleave.errors import UnknownLayout, Unshardable
from interleave.layout import Layout, Partial, Shard, assemble, cut, same_bits
from runtimes.vllm.parallel import Sides, containers, parts, refuse_unknown, sequence_rows, sides, weight
from tests.runtimes.vllm import processes

pytestmark = pytest.mark.vllm

DEGREES = [2, 3, 4]
LIMIT = 30.0


# The ranks.


class Place(NamedTuple):
    """A rank's place, and vLLM's configuration there."""

    rank: int
    degree: int
    group: Group
    config: Any


class Ranks:
    """`degree` processes in which vLLM's model-parallel state stands, without an engine."""

    def __init__(self, degree: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        pipes = [processes.start().Pipe() for _ in range(degree)]
        self.alive = True
        self._ends = [ours for ours, _ in pipes]
        theirs = [end for _, end in pipes]
        self._processes = [
            processes.Forked(target=serve, args=(rank, theirs, port), daemon=True) for rank in range(degree)
        ]
        for process in self._processes:
            process.start()
        for end in theirs:
            end.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(place, *args)` on every rank; the results by rank. After an error the ranks are gone."""
        work = pickle.dumps((function, args))
        try:
            for end in self._ends:
                end.send_bytes(work)
            replies = []
            for rank, end in enumerate(self._ends):
                assert end.poll(2 * LIMIT), f"rank {rank} did not answer"
                replies.append(pickle.loads(end.recv_bytes()))
        except BaseException:
            self.close()
            raise
        errors = [f"rank {rank}: {reply}" for rank, reply in enumerate(replies) if isinstance(reply, str)]
        if errors:
            self.close()
            pytest.fail("\n".join(errors), pytrace=False)
        return [reply[0] for reply in replies]

    def close(self) -> None:
        self.alive = False
        for process in self._processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(3)` are three of them, started when first asked for."""
    started: dict[int, Ranks] = {}

    def get(degree: int) -> Ranks:
        if degree not in started or not started[degree].alive:
            started[degree] = Ranks(degree)
        return started[degree]

    yield get
    for found in started.values():
        found.close()


def serve(rank: int, ends: list[Connection], port: int) -> None:
    """A rank's life: join vLLM's groups, then call what comes until the pytest process closes its end."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    torch.set_num_threads(1)
    degree, channel = len(ends), ends[rank]
    # The ranks name different machines, so that vLLM's collectives are gloo's.
    os.environ["VLLM_DIST_IDENT"] = f"{port}-{rank}"
    config = VllmConfig()
    with set_current_vllm_config(config):
        init_distributed_environment(
            degree, rank, f"tcp://127.0.0.1:{port}", rank, "gloo", timeout=timedelta(seconds=LIMIT)
        )
        initialize_model_parallel(degree)
        transport = dist.new_group(list(range(degree)), backend="gloo")
        assert isinstance(transport, dist.ProcessGroup)
        place = Place(rank, degree, GlooGroup(transport, range(degree), LIMIT), config)
        while True:
            try:
                function, args = pickle.loads(channel.recv_bytes())
            except EOFError:
                return
            try:
                reply: Any = (function(place, *args),)
                pickle.dumps(reply)
            except BaseException:
                reply = traceback.format_exc()
            channel.send_bytes(pickle.dumps(reply))


names = itertools.count()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Small integers as floats: sums of their products are exact."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def made(kind: str, **arguments: Any) -> Any:
    """A layer of vLLM's, by the name of its class in the module of its name."""
    module, _, name = kind.rpartition(".")
    return getattr(importlib.import_module(f"vllm.model_executor.{module}"), name)(**arguments)


def loaded(layer: Any, weights: list[tuple[str, Any, Tensor]]) -> Any:
    """Full weights `(parameter, shard id or None, weight)` go through the layer's own loaders."""
    for name, shard, full in weights:
        parameter = layer.get_parameter(name)
        parameter.weight_loader(parameter, full, *(() if shard is None else (shard,)))
    return layer


def ready(layer: Any) -> Any:
    """As the engine has it when it runs: on a CPU, with its weights packed."""
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def linears(module: torch.nn.Module) -> list[Any]:
    return [inner for inner in module.modules() if hasattr(inner, "output_partition_sizes")]


def whole(place: Place, piece: Tensor, layout: Layout | None) -> Tensor:
    """What the ranks hold together, having seen that the way back gives each its piece, bit for bit."""
    if layout is None:
        return piece
    found = assemble(piece, layout, place.group, "whole")
    back = cut(found, layout, place.group)
    if isinstance(layout, Partial):
        back, piece = assemble(back, layout, place.group, "back"), found
    assert same_bits(back, piece)
    return found


class Seen(NamedTuple):
    """What one rank saw of a linear, made whole."""

    output: Tensor
    bias: Tensor | None  # the one that came back beside the output
    parameters: dict[str, Tensor]
    parts: dict[Any, Tensor]
    sides: Sides | None


def run_linear(place: Place, kind: str, arguments: dict, weights: list, x: Tensor, group_size: int = 1) -> Seen:
    place.config.parallel_config.decode_context_parallel_size = group_size
    layer = loaded(made(kind, **arguments), weights)
    layouts = {name: weight(layer, name) for name, value in layer.named_parameters(recurse=False)}
    parameters = {name: whole(place, layer.get_parameter(name).data, layout) for name, layout in layouts.items()}
    found = sides(layer, "layer")
    refuse_unknown(layer)
    ready(layer)
    with pytest.raises(UnknownLayout, match="no longer the plain parameter"):
        weight(layer, "weight")
    given = x if found is None or found.input is None else cut(x, found.input, place.group)
    result = layer(given)
    output, bias = result if isinstance(result, tuple) else (result, None)
    return Seen(
        whole(place, output, None if found is None else found.output),
        None if bias is None else whole(place, bias.data, layouts["bias"]),
        parameters,
        {
            shard: whole(place, output[:, part.start : part.start + part.width].contiguous(), part.layout)
            for shard, part in parts(layer).items()
        },
        found,
    )


# The linears.

few = settings(max_examples=6, deadline=None)
degrees = pytest.mark.parametrize("degree", DEGREES)
flags = pytest.mark.parametrize
LINEAR = "layers.linear."


def check(seen: list[Seen], x: Tensor, w: Tensor, bias: Tensor | None, skip_bias_add: bool = False) -> None:
    """Every rank saw what one process computes."""
    for one in seen:
        assert torch.equal(one.parameters["weight"], w)
        assert torch.equal(one.output, F.linear(x, w, None if skip_bias_add else bias))
        if bias is None:
            assert one.bias is None and "bias" not in one.parameters
        else:
            assert torch.equal(one.parameters["bias"], bias)
            assert (one.bias is not None) is skip_bias_add
            if one.bias is not None:
                assert torch.equal(one.bias, bias)


def with_bias(bias: Tensor | None) -> list:
    return [] if bias is None else [("bias", None, bias)]


@degrees
@flags("gather_output", [False, True])
@flags("skip_bias_add", [None, False, True])
@flags("return_bias", [True, False])
def test_column_parallel_output_is_whole(
    ranks: Callable, degree: int, gather_output: bool, skip_bias_add: bool | None, return_bias: bool
) -> None:
    """`skip_bias_add` None: no bias at all."""
    x, w = numbers(5, 7), numbers(4 * degree, 7, seed=1)
    bias = None if skip_bias_add is None else numbers(4 * degree, seed=2)
    arguments = {
        "input_size": 7,
        "output_size": 4 * degree,
        "bias": bias is not None,
        "gather_output": gather_output,
        "skip_bias_add": bool(skip_bias_add),
        "return_bias": return_bias,
    }
    weights = [("weight", None, w), *with_bias(bias)]
    seen = ranks(degree).run(run_linear, f"{LINEAR}ColumnParallelLinear", arguments, weights, x)
    if not return_bias and skip_bias_add:
        seen = [one._replace(bias=one.parameters["bias"]) for one in seen]
    check(seen, x, w, bias, bool(skip_bias_add))
    assert seen[0].sides == (Sides() if gather_output else Sides(output=Shard(-1, widths=(4,) * degree)))


@flags("degree", [1, *DEGREES])
@few
@given(data=st.data())
def test_merged_columns_come_apart_into_the_checkpoints_linears(
    ranks: Callable, degree: int, data: st.DataObject
) -> None:
    sizes = [degree * n for n in data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))]
    on_disk = data.draw(st.sampled_from(["apart", "fused"]))
    bias = numbers(sum(sizes), seed=2) if data.draw(st.booleans()) else None
    x, w = numbers(3, 6), numbers(sum(sizes), 6, seed=1)
    weights = [("weight", None, w), *with_bias(bias)]
    if on_disk == "apart":
        weights = [(name, shard, part) for name, _, full in weights for shard, part in enumerate(full.split(sizes))]
    arguments = {"input_size": 6, "output_sizes": sizes, "bias": bias is not None}
    seen = ranks(degree).run(run_linear, f"{LINEAR}MergedColumnParallelLinear", arguments, weights, x)
    check(seen, x, w, bias)
    expected = F.linear(x, w, bias).split(sizes, -1)
    for one in seen:
        assert list(one.parts) == list(range(len(sizes)))
        assert all(torch.equal(one.parts[shard], part) for shard, part in enumerate(expected))


@st.composite
def heads(draw: st.DrawFn, degree: int) -> tuple[int, int]:
    """How many query and key-value heads vLLM can split over `degree` ranks: fewer key-value heads are copied."""
    kv_heads = draw(st.sampled_from([n for n in range(1, 9) if n % degree == 0 or degree % n == 0]))
    return draw(st.integers(1, 3)) * math.lcm(degree, kv_heads), kv_heads


@flags("degree", [1, *DEGREES])
@few
@given(data=st.data())
def test_qkv_comes_apart_into_queries_keys_and_values(ranks: Callable, degree: int, data: st.DataObject) -> None:
    num_heads, kv_heads = data.draw(heads(degree))
    head_size, v_head_size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    sizes = [num_heads * head_size, kv_heads * head_size, kv_heads * v_head_size]
    bias = numbers(sum(sizes), seed=2) if data.draw(st.booleans()) else None
    x, w = numbers(3, 6), numbers(sum(sizes), 6, seed=1)
    weights = [("weight", None, w), *with_bias(bias)]
    if data.draw(st.booleans(), label="apart on disk"):
        weights = [
            (name, shard, part)
            for name, _, full in weights
            for shard, part in zip("qkv", full.split(sizes), strict=True)
        ]
    arguments = {
        "hidden_size": 6,
        "head_size": head_size,
        "total_num_heads": num_heads,
        "total_num_kv_heads": kv_heads,
        "v_head_size": v_head_size,
        "bias": bias is not None,
    }
    seen = ranks(degree).run(run_linear, f"{LINEAR}QKVParallelLinear", arguments, weights, x)
    check(seen, x, w, bias)
    expected = F.linear(x, w, bias).split(sizes, -1)
    for one in seen:
        assert list(one.parts) == ["q", "k", "v"]
        assert all(torch.equal(a, b) for a, b in zip(one.parts.values(), expected, strict=True))


@degrees
@flags("input_is_parallel", [True, False])
@flags(("reduce_results", "skip_bias_add"), [(True, None), (True, False), (True, True), (False, None), (False, True)])
def test_row_parallel_output_is_whole(
    ranks: Callable, degree: int, input_is_parallel: bool, reduce_results: bool, skip_bias_add: bool | None
) -> None:
    x, w = numbers(5, 3 * degree), numbers(4, 3 * degree, seed=1)
    bias = None if skip_bias_add is None else numbers(4, seed=2)
    arguments = {
        "input_size": 3 * degree,
        "output_size": 4,
        "bias": bias is not None,
        "input_is_parallel": input_is_parallel,
        "skip_bias_add": bool(skip_bias_add),
        "reduce_results": reduce_results,
    }
    weights = [("weight", None, w), *with_bias(bias)]
    seen = ranks(degree).run(run_linear, f"{LINEAR}RowParallelLinear", arguments, weights, x)
    check(seen, x, w, bias, bool(skip_bias_add))
    assert seen[0].sides == Sides(
        input=Shard(-1, widths=(3,) * degree) if input_is_parallel else None,
        output=None if reduce_results else Partial(),
    )


def run_late_term(place: Place, w: Tensor, bias: Tensor, x: Tensor) -> Tensor:
    layer = loaded(
        made(f"{LINEAR}RowParallelLinear", input_size=w.shape[1], output_size=w.shape[0]),
        [("weight", None, w), ("bias", None, bias)],
    )
    layer.reduce_results = False
    found = sides(layer, "layer")
    assert found is not None and found.input is not None
    return whole(place, ready(layer)(cut(x, found.input, place.group))[0], found.output)


@degrees
def test_a_bias_is_in_one_rank_s_term(ranks: Callable, degree: int) -> None:
    """Some models tell the layer after its construction not to sum: the first rank's term has the bias."""
    x, w, bias = numbers(5, 3 * degree), numbers(4, 3 * degree, seed=1), numbers(4, seed=2)
    for output in ranks(degree).run(run_late_term, w, bias, x):
        assert torch.equal(output, F.linear(x, w, bias))


REPLICATED: list[tuple[str, dict[str, Any], int]] = [
    (f"{LINEAR}ReplicatedLinear", {"output_size": 10}, 0),
    ("layers.fused_moe.router.gate_linear.GateLinear", {"output_size": 10, "bias": True}, 0),
    (f"{LINEAR}ColumnParallelLinear", {"output_size": 10, "disable_tp": True}, 0),
    (f"{LINEAR}MergedColumnParallelLinear", {"output_sizes": [7, 3], "disable_tp": True}, 2),
    (f"{LINEAR}RowParallelLinear", {"output_size": 10, "disable_tp": True}, 0),
    (
        f"{LINEAR}QKVParallelLinear",
        {"head_size": 2, "total_num_heads": 3, "total_num_kv_heads": 1, "disable_tp": True},
        3,
    ),
]


@degrees
@flags(("kind", "arguments", "num_parts"), REPLICATED)
def test_what_is_not_split_is_no_parallel_layer(
    ranks: Callable, degree: int, kind: str, arguments: dict[str, Any], num_parts: int
) -> None:
    x, w, bias = numbers(4, 5), numbers(10, 5, seed=1), numbers(10, seed=2)
    size = "hidden_size" if kind.endswith("QKVParallelLinear") else "input_size"
    weights = [("weight", None, w), ("bias", None, bias)]
    seen = ranks(degree).run(run_linear, kind, arguments | {size: 5}, weights, x)
    check(seen, x, w, bias)
    for one in seen:
        assert one.sides is None
        assert len(one.parts) == num_parts
        if num_parts:
            assert torch.equal(torch.cat(list(one.parts.values()), -1), one.output)


@degrees
def test_deepseeks_fused_latents_are_whole_and_come_apart(ranks: Callable, degree: int) -> None:
    x, w = numbers(4, 5), numbers(11, 5, seed=1)
    arguments = {"input_size": 5, "output_size": [6, 5]}
    weights = [("weight", shard, part) for shard, part in enumerate(w.split([6, 5]))]
    seen = ranks(degree).run(run_linear, "models.deepseek_v2.DeepSeekV2FusedQkvAProjLinear", arguments, weights, x)
    check(seen, x, w, None)
    for one in seen:
        assert one.sides is None
        assert torch.equal(one.parts[0], F.linear(x, w[:6])) and torch.equal(one.parts[1], F.linear(x, w[6:]))


@flags(("degree", "group_size"), [(2, 1), (2, 2), (3, 3), (4, 2), (4, 4)])
def test_columns_of_context_parallel_groups_have_copies(ranks: Callable, degree: int, group_size: int) -> None:
    x, w, bias = numbers(5, 7), numbers(4 * degree, 7, seed=1), numbers(4 * degree, seed=2)
    arguments = {"input_size": 7, "output_size": 4 * degree}
    weights = [("weight", None, w), ("bias", None, bias)]
    seen = ranks(degree).run(run_linear, f"{LINEAR}DCPGroupColumnParallelLinear", arguments, weights, x, group_size)
    check(seen, x, w, bias)
    assert (seen[0].sides is None) is (group_size == degree)


@degrees
@few
@given(data=st.data())
def test_qkv_with_an_indexer_comes_apart(ranks: Callable, degree: int, data: st.DataObject) -> None:
    num_heads, kv_heads = data.draw(heads(degree))
    head_size = data.draw(st.integers(1, 4))
    sizes = [n * head_size for n in (num_heads, kv_heads, kv_heads, kv_heads, 1)]
    x, w = numbers(3, 6), numbers(sum(sizes), 6, seed=1)
    shards = ["q", "k", "v", "index_q", "index_k"]
    arguments = {
        "hidden_size": 6,
        "head_size": head_size,
        "total_num_heads": num_heads,
        "total_num_kv_heads": kv_heads,
        "total_num_index_heads": kv_heads,
        "index_head_size": head_size,
    }
    weights = [("weight", shard, part) for shard, part in zip(shards, w.split(sizes), strict=True)]
    kind = f"{LINEAR}MinimaxM3QKVParallelLinearWithIndexer"
    seen = ranks(degree).run(run_linear, kind, arguments, weights, x)
    check(seen, x, w, None)
    for one in seen:
        assert list(one.parts) == shards
        assert torch.equal(torch.cat(list(one.parts.values()), -1), F.linear(x, w))


@degrees
def test_latents_beside_a_split_gate_have_copies(ranks: Callable, degree: int) -> None:
    sizes = [5, 3 + 2, 2 * degree * 3]
    x, w = numbers(3, 6), numbers(sum(sizes), 6, seed=1)
    arguments = {
        "hidden_size": 6,
        "q_lora_rank": 5,
        "kv_lora_rank": 3,
        "qk_rope_head_dim": 2,
        "total_num_heads": 2 * degree,
        "v_head_dim": 3,
    }
    weights = [("weight", shard, part) for shard, part in enumerate(w.split(sizes))]
    seen = ranks(degree).run(run_linear, f"{LINEAR}KimiK3MergedQKVGateLinear", arguments, weights, x)
    check(seen, x, w, None)
    for one in seen:
        assert torch.equal(torch.cat([one.parts[shard] for shard in range(3)], -1), F.linear(x, w))


def run_gathered(place: Place, sizes: list[int]) -> str:
    layer = made(f"{LINEAR}MergedColumnParallelLinear", input_size=4, output_sizes=sizes, gather_output=True)
    for ask in (lambda: sides(layer, "mlp.gate_up_proj"), lambda: parts(layer)):
        with pytest.raises(Unshardable, match="mixes its 2 parts") as refused:
            ask()
    loaded(layer, [("weight", None, numbers(sum(sizes), 4)), ("bias", None, numbers(sum(sizes)))])
    gathered = ready(layer)(numbers(2, 4, seed=1))[0]
    assert not torch.equal(gathered, F.linear(numbers(2, 4, seed=1), numbers(sum(sizes), 4), numbers(sum(sizes))))
    return str(refused.value)


@degrees
def test_parts_that_vllm_gathers_rank_by_rank_are_refused(ranks: Callable, degree: int) -> None:
    """Every rank gets all columns, in an order that no process alone has."""
    ranks(degree).run(run_gathered, [2 * degree, 3 * degree])


# The vocabulary.


class Table(NamedTuple):
    """What one rank saw of an embedding or a head, made whole."""

    output: Tensor
    parameters: dict[str, Tensor]
    sides: Sides | None


def run_vocabulary(place: Place, kind: str, arguments: dict, weights: list, x: Tensor) -> Table:
    layer = loaded(made(f"layers.vocab_parallel_embedding.{kind}", **arguments), weights)
    found = sides(layer, "layer")
    refuse_unknown(layer)
    ready(layer)
    layouts = {name: weight(layer, name) for name, _ in layer.named_parameters(recurse=False)}
    parameters = {name: whole(place, layer.get_parameter(name).data, layout) for name, layout in layouts.items()}
    if kind == "ParallelLMHead":
        # As the logits processor uses it; the logits' columns are the table's rows.
        logits = layer.quant_method.apply(layer, x, layer.bias)
        output = whole(place, logits.T, layouts["weight"]).T.contiguous()
    else:
        output = whole(place, layer(x), None if found is None else found.output)
    return Table(output, parameters, found)


vocabularies = st.tuples(st.integers(1, 40), st.integers(1, 4))


@flags("degree", [1, *DEGREES])
@few
@given(vocabulary=vocabularies, reduce_results=st.booleans(), tokens=st.integers(1, 9))
def test_an_embedding_is_whole_and_its_padding_is_no_part_of_it(
    ranks: Callable, degree: int, vocabulary: tuple[int, int], reduce_results: bool, tokens: int
) -> None:
    size, padding = vocabulary
    w = numbers(size, 6)
    ids = torch.randint(size, (tokens,), generator=torch.Generator().manual_seed(size))
    arguments = {
        "num_embeddings": size,
        "embedding_dim": 6,
        "padding_size": degree * padding,
        "reduce_results": reduce_results,
    }
    seen = ranks(degree).run(run_vocabulary, "VocabParallelEmbedding", arguments, [("weight", None, w)], ids)
    for one in seen:
        assert torch.equal(one.parameters["weight"], w)
        assert torch.equal(one.output, F.embedding(ids, w))
        assert one.sides == (None if degree == 1 else Sides(output=None if reduce_results else Partial()))


@flags("degree", [1, *DEGREES])
@few
@given(vocabulary=vocabularies, bias=st.booleans())
def test_a_head_is_whole_and_its_padding_is_no_part_of_it(
    ranks: Callable, degree: int, vocabulary: tuple[int, int], bias: bool
) -> None:
    size, padding = vocabulary
    w, b, x = numbers(size, 6), numbers(size, seed=1) if bias else None, numbers(3, 6, seed=2)
    arguments = {"num_embeddings": size, "embedding_dim": 6, "padding_size": degree * padding, "bias": bias}
    weights = [("weight", None, w), *with_bias(b)]
    for one in ranks(degree).run(run_vocabulary, "ParallelLMHead", arguments, weights, x):
        assert torch.equal(one.parameters["weight"], w)
        assert b is None or torch.equal(one.parameters["bias"], b)
        assert torch.equal(one.output, F.linear(x, w, b))
        assert one.sides is None


def run_tied(place: Place, w: Tensor) -> list[Tensor]:
    arguments = {"num_embeddings": len(w), "embedding_dim": w.shape[1], "padding_size": 2 * place.degree}
    embedding = loaded(
        made("layers.vocab_parallel_embedding.VocabParallelEmbedding", **arguments), [("weight", None, w)]
    )
    head = made("layers.vocab_parallel_embedding.ParallelLMHead", **arguments).tie_weights(embedding)
    return [whole(place, layer.weight.data, weight(layer, "weight")) for layer in (embedding, head)]


@degrees
def test_a_tied_table_is_whole_under_both_names(ranks: Callable, degree: int) -> None:
    for embedding, head in ranks(degree).run(run_tied, w := numbers(11, 4)):
        assert torch.equal(embedding, w) and torch.equal(head, w)


def run_added(place: Place) -> None:
    arguments = {"num_embeddings": 11, "org_num_embeddings": 9, "embedding_dim": 4, "padding_size": 2 * place.degree}
    layer = made("layers.vocab_parallel_embedding.ParallelLMHead", prefix="lm_head", **arguments)
    with pytest.raises(UnknownLayout, match=r"lm_head.*added tokens"):
        weight(layer, "weight")


@degrees
def test_added_tokens_are_refused(ranks: Callable, degree: int) -> None:
    """They stand behind the padding of each rank's own rows, where no run of rows is the vocabulary."""
    ranks(degree).run(run_added)


# The experts.

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 32, 96, 5, 2


class Block(torch.nn.Module):
    """Experts and the layers beside them, as the models have them."""

    def __init__(self, parallel: str, reduce_results: bool, shared: bool, prefix: str) -> None:
        super().__init__()
        sequence_parallel = parallel == "sequence"
        self.gate = made("layers.fused_moe.router.gate_linear.GateLinear", input_size=HIDDEN, output_size=EXPERTS)
        self.shared_experts = (
            made(
                "models.deepseek_v2.DeepseekV2MLP",
                hidden_size=HIDDEN,
                intermediate_size=INTERMEDIATE,
                hidden_act="silu",
                reduce_results=False,
                is_sequence_parallel=sequence_parallel,
                prefix=f"{prefix}.shared_experts",
            )
            if shared
            else None
        )
        self.experts = made(
            "layers.fused_moe.layer.FusedMoEFactory",
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            params_dtype=torch.float32,
            prefix=f"{prefix}.experts",
            reduce_results=reduce_results,
            is_sequence_parallel=sequence_parallel,
            gate=self.gate,
            shared_experts=self.shared_experts,
        )


class Weights(NamedTuple):
    """The full weights of a block of experts."""

    gate: Tensor  # [experts, hidden]
    w1: Tensor  # gate projections: [experts, intermediate, hidden]
    w3: Tensor  # up projections
    w2: Tensor  # down projections: [experts, hidden, intermediate]
    shared: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def drawn(cls) -> Weights:
        up, down = (EXPERTS, INTERMEDIATE, HIDDEN), (EXPERTS, HIDDEN, INTERMEDIATE)
        w1, w3, w2 = numbers(*up, seed=2) / 16, numbers(*up, seed=3) / 16, numbers(*down, seed=4) / 16
        return cls(numbers(EXPERTS, HIDDEN, seed=1) / 8, w1, w3, w2, (w1[0] / 2, w3[1], w2[2]))

    def load(self, block: Any) -> None:
        loaded(block.gate, [("weight", None, self.gate)])
        experts = block.experts.routed_experts
        for number in range(EXPERTS):
            for name, shard in (("w13_weight", "w1"), ("w13_weight", "w3"), ("w2_weight", "w2")):
                experts.weight_loader(
                    getattr(experts, name), getattr(self, shard)[number], name, shard, number, return_success=True
                )
        if block.shared_experts is not None:
            gate, up, down = self.shared
            loaded(block.shared_experts.gate_up_proj, [("weight", 0, gate), ("weight", 1, up)])
            loaded(block.shared_experts.down_proj, [("weight", None, down)])

    def routed(self, x: Tensor) -> Tensor:
        """What one process computes: each token's best experts, by their weights."""
        scores, chosen = F.linear(x, self.gate).softmax(-1).topk(TOP_K)
        scores = scores / scores.sum(-1, keepdim=True)
        rows = [
            sum(score * self.expert(row, number) for score, number in zip(*choice, strict=True))
            for row, choice in zip(x, zip(scores, chosen.tolist(), strict=True), strict=True)
        ]
        return torch.stack(rows)  # type: ignore[arg-type]

    def expert(self, row: Tensor, number: int) -> Tensor:
        return feed_forward(row, self.w1[number], self.w3[number], self.w2[number])


def feed_forward(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def own_experts(experts: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **_: Any) -> Tensor:
    """What a kernel does that knows which experts are this rank's; the CPU's does not, and reads past its weights."""
    place = experts.expert_map
    output = torch.zeros_like(x)
    for token, (scores, chosen) in enumerate(zip(topk_weights, topk_ids, strict=True)):
        for score, number in zip(scores, chosen, strict=True):
            if (local := int(place[number])) >= 0:
                w1, w3 = experts.w13_weight[local].chunk(2)
                output[token] += score * feed_forward(x[token], w1, w3, experts.w2_weight[local])
    return output


def rows_of_all(tensors: list[Tensor], dim: int, sizes: list[int]) -> list[Tensor]:
    """vLLM's all-gather of rows, which its CPU communicator lacks."""
    from vllm.distributed import tensor_model_parallel_all_gather

    assert len(set(sizes)) == 1
    return [tensor_model_parallel_all_gather(tensor, dim) for tensor in tensors]


def rows_of_sum(tensor: Tensor, dim: int, sizes: list[int]) -> Tensor:
    """vLLM's reduce-scatter of rows, which its CPU communicator lacks."""
    from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_reduce

    return tensor_model_parallel_all_reduce(tensor.clone()).split(sizes, dim)[get_tensor_model_parallel_rank()]


class Mixed(NamedTuple):
    """What one rank saw of a block of experts."""

    output: Tensor
    shared: Tensor | None
    sides: Sides | None
    containers: dict[str, Sides | None]


def run_experts(place: Place, parallel: str, weights: Weights, x: Tensor, reduce_results: bool, shared: bool) -> Mixed:
    from vllm.distributed import get_ep_group
    from vllm.distributed.device_communicators.all2all import AgRsAll2AllManager
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.models.utils import sequence_parallel_chunk

    place.config.parallel_config.enable_expert_parallel = parallel != "tensor"
    block = Block(parallel, reduce_results, shared, f"block{next(names)}")
    weights.load(block)
    experts = block.experts.routed_experts
    for layer in linears(block):
        ready(layer)
    if parallel == "tensor":
        ready(experts)
    else:
        experts.forward_modular = functools.partial(own_experts, experts)
    refuse_unknown(block)
    found = sides(block.experts, "experts")
    assert found is not None and found.input is None
    given, output, rows = x, found.output, None
    if parallel == "sequence":
        communicator: Any = get_ep_group().device_communicator
        communicator.all2all_manager = AgRsAll2AllManager(communicator.cpu_group)
        communicator.all_gatherv, communicator.reduce_scatterv = rows_of_all, rows_of_sum
        output = rows = sequence_rows(len(x), place.degree)
        given = sequence_parallel_chunk(x)
        assert same_bits(given, cut(x, output, place.group))
    inner = containers(block)
    with set_forward_context(None, place.config, num_tokens=len(x)):
        result = block.experts(given.clone(), given.clone())
    seen = None
    if block.shared_experts is not None:
        declared = inner.get("shared_experts") or Sides()
        layout = rows if declared.rows else declared.output
        seen = whole(place, block.shared_experts(given), layout)
    place.config.parallel_config.enable_expert_parallel = False
    # Rows that pad are computed like others: they are no part of the whole, and `cut` has zeros there.
    made_whole = whole(place, result, output) if rows is None else assemble(result, rows, place.group)
    return Mixed(made_whole, seen, found, inner)


@degrees
@flags("parallel", ["tensor", "expert", "sequence"])
@flags("reduce_results", [True, False])
@flags("shared", [False, True])
def test_experts_are_whole(ranks: Callable, degree: int, parallel: str, reduce_results: bool, shared: bool) -> None:
    """Tensor-parallel experts run vLLM's kernel, expert-parallel ones a plain one in its place."""
    weights, x = Weights.drawn(), numbers(7, HIDDEN) / 4
    expected = weights.routed(x)
    alone = feed_forward(x, *weights.shared)
    deferred = not reduce_results and parallel != "sequence"
    for one in ranks(degree).run(run_experts, parallel, weights, x, reduce_results, shared):
        torch.testing.assert_close(one.output, expected + alone if shared else expected, rtol=1e-5, atol=1e-5)
        if shared:
            torch.testing.assert_close(one.shared, alone, rtol=1e-5, atol=1e-5)
        if parallel == "sequence":
            assert one.sides == Sides(rows=True)
            assert set(one.containers.values()) == {Sides(rows=True)} and "gate" in one.containers
        else:
            assert one.sides == Sides(output=Partial() if deferred else None)
            terms: dict[str, Sides | None] = {"": None} if deferred else {}
            assert one.containers == terms | ({"shared_experts": Sides(output=Partial())} if shared else {})


def run_chunk(place: Place, x: Tensor) -> Tensor:
    from vllm.model_executor.models.utils import sequence_parallel_chunk

    return whole(place, sequence_parallel_chunk(x), sequence_rows(len(x), place.degree))


@degrees
@few
@given(tokens=st.integers(0, 12))
def test_sequence_parallel_rows_are_those_that_vllm_deals(ranks: Callable, degree: int, tokens: int) -> None:
    for one in ranks(degree).run(run_chunk, x := numbers(tokens, 3)):
        assert torch.equal(one, x)


# Mixers, and what is refused.


def settings_of(config: Any) -> Any:
    """As much of vLLM's model configuration as attention layers ask for."""
    return types.SimpleNamespace(
        dtype=torch.float32, hf_text_config=config, is_mm_prefix_lm=False, rswa_window=None, use_mla=False
    )


def delta_config(degree: int) -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        hidden_size=16,
        linear_num_key_heads=2 * degree,
        linear_num_value_heads=4 * degree,
        linear_key_head_dim=3,
        linear_value_head_dim=5,
    )


def mixer(place: Place, kind: str, groups: int = 1) -> Any:
    prefix = f"layers.{next(names)}.mixer"
    state_space = {
        "hidden_size": 6,
        "ssm_state_size": 2,
        "conv_kernel_size": 4,
        "intermediate_size": 24,
        "use_conv_bias": True,
        "use_bias": True,
        "prefix": prefix,
    }
    delta = {"config": delta_config(place.degree), "vllm_config": place.config, "prefix": prefix}
    with (
        mock.patch.object(place.config, "model_config", settings_of(delta["config"])),
        # The Triton that a CPU has lacks what this one sets up.
        mock.patch("vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn.set_triton_allocator"),
    ):
        match kind:
            case "MambaMixer":
                own = {"time_step_rank": 3, "use_rms_norm": False}
                return made("layers.mamba.mamba_mixer.MambaMixer", **state_space, **own)
            case "MambaMixer2":
                own = {"n_groups": groups, "num_heads": 12, "head_dim": 2}
                return made("layers.mamba.mamba_mixer2.MambaMixer2", **state_space, **own)
            case "ShortConv":
                config = types.SimpleNamespace(conv_L_cache=3, conv_bias=True)
                return made("layers.mamba.short_conv.ShortConv", config=config, dim=12, layer_idx=0, prefix=prefix)
            case "QwenGatedDeltaNetAttention interleaved":
                name = "layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention"
                return made(name, **delta, gqa_interleaved_layout=True)
            case "QwenGatedDeltaNetAttention":
                return made("layers.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention", **delta)
            case "OlmoHybridGatedDeltaNetAttention":
                return made("layers.mamba.gdn.olmo_gdn_linear_attn.OlmoHybridGatedDeltaNetAttention", **delta)
    raise AssertionError(kind)


def run_mixer(place: Place, kind: str, held: tuple[str, ...]) -> dict[str, str]:
    """What became of each parameter, by name."""
    module = mixer(place, kind, groups=12)
    refuse_unknown(module)
    assert containers(module) == {} and sides(module, "mixer") is None
    became: dict[str, str] = {}
    for path, child in module.named_modules():
        layer: Any = child
        if not hasattr(layer, "output_partition_sizes"):
            continue
        if layer.weight.dim() == 3:
            assert sides(layer, path) is None
            with pytest.raises(UnknownLayout, match="no longer the plain parameter"):
                weight(layer, "weight")
            became[f"{path}.weight"] = "refused"
            continue
        x, w, bias = numbers(3, layer.input_size), numbers(layer.output_size, layer.input_size, seed=1), None
        weights = [("weight", None, w)]
        if layer.bias is not None:
            weights.append(("bias", None, bias := numbers(layer.output_size, seed=2)))
        loaded(layer, weights)
        assert torch.equal(whole(place, layer.weight.data, weight(layer, "weight")), w)
        found = sides(layer, path) or Sides()
        ready(layer)
        output = whole(place, layer(x if found.input is None else cut(x, found.input, place.group))[0], found.output)
        assert torch.equal(output, F.linear(x, w, None if layer.skip_bias_add else bias))
        became[f"{path}.weight"] = "whole"
    for name in held:
        parameter = getattr(module, name)
        full = numbers(parameter.shape[0] * place.degree, *parameter.shape[1:], seed=3)
        parameter.weight_loader(parameter, full)
        # vLLM keeps `A` as the kernels use it.
        expected = -torch.exp(full) if name == "A" else full
        assert torch.equal(whole(place, parameter.data, weight(module, name)), expected)
    return became


@degrees
@flags(
    ("kind", "held", "convolution"),
    [
        ("MambaMixer", ("A", "D"), "conv1d"),
        ("MambaMixer2", ("A", "D", "dt_bias"), "conv1d"),
        ("ShortConv", (), "conv"),
        ("QwenGatedDeltaNetAttention", ("A_log", "dt_bias"), "conv1d"),
        ("QwenGatedDeltaNetAttention interleaved", ("A_log", "dt_bias"), "conv1d"),
        ("OlmoHybridGatedDeltaNetAttention", ("A_log", "dt_bias"), "conv1d"),
    ],
)
def test_a_mixer_s_linears_are_whole_and_its_convolution_is_refused(
    ranks: Callable, degree: int, kind: str, held: tuple[str, ...], convolution: str
) -> None:
    """Mixers keep convolution weights in linears that they never call, loaded in an order of their own."""
    for became in ranks(degree).run(run_mixer, kind, held):
        assert [name for name, what in became.items() if what == "refused"] == [f"{convolution}.weight"]
        assert len(became) > 2


def run_one_group(place: Place) -> None:
    module = mixer(place, "MambaMixer2", groups=1)
    with pytest.raises(Unshardable, match=r"`model.mixer` copies its one group"):
        sides(module, "model.mixer")
    with pytest.raises(Unshardable, match="copies its one group"):
        refuse_unknown(torch.nn.Sequential(module))
    full = numbers(24 + 24 + 2 + 2 + 12, 6)
    loaded(module.in_proj, [("weight", None, full)])
    with pytest.raises(UnknownLayout, match="in an order that its layer's class does not tell"):
        weight(module.in_proj, "weight")
    # What is refused would indeed be wrong: not even the size is right.
    misread = assemble(module.in_proj.weight.data, Shard(0), place.group)
    assert misread.shape != full.shape


@degrees
def test_a_mixer_that_copies_its_group_to_every_rank_is_refused(ranks: Callable, degree: int) -> None:
    ranks(degree).run(run_one_group)


def run_heads_norm(place: Place, groups: int, w: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    norm = made("layers.mamba.mamba_mixer2.Mixer2RMSNormGated", full_hidden_size=len(w), full_n_groups=groups, eps=1e-6)
    norm.weight.weight_loader(norm.weight, w)
    refuse_unknown(norm)
    found = sides(norm, "norm")
    assert found is not None and found.input is not None
    pieces = (cut(value, found.input, place.group) for value in (x, gate))
    return whole(place, norm(*pieces), found.output)


@degrees
@flags("groups", [1, 2, 3, 4])
def test_a_norm_over_split_channels_is_whole(ranks: Callable, degree: int, groups: int) -> None:
    w, x, gate = numbers(24), numbers(5, 24, seed=1), numbers(5, 24, seed=2)
    gated = x * F.silu(gate)
    grouped = gated.unflatten(-1, (groups, -1))
    expected = (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + 1e-6)).flatten(-2) * w
    for output in ranks(degree).run(run_heads_norm, groups, w, x, gate):
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def run_sinks(place: Place, full: Tensor) -> Tensor:
    from transformers import GptOssConfig

    config = GptOssConfig(hidden_size=64, head_dim=32, num_attention_heads=12, num_key_value_heads=12)
    with mock.patch.object(place.config, "model_config", settings_of(config)):
        attention = made("models.gpt_oss.OAIAttention", config=config, prefix=f"layers.{next(names)}.attn")
    refuse_unknown(attention)
    share = attention.sinks.shape[0]
    attention.sinks.data.copy_(full.narrow(0, place.rank * share, share))  # as gpt-oss's `load_weights` does
    with pytest.raises(UnknownLayout, match="is no parameter whose layout is known"):
        weight(attention, "bias")
    return whole(place, attention.sinks.data, weight(attention, "sinks"))


@degrees
def test_attention_sinks_are_split_by_heads(ranks: Callable, degree: int) -> None:
    for sinks in ranks(degree).run(run_sinks, full := numbers(12)):
        assert torch.equal(sinks, full)


class Queries(torch.nn.Module):
    """An attention in which every token sees itself alone, and a token's value is its query."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query


def run_falcon(place: Place, x: Tensor) -> list[Tensor]:
    from transformers import FalconConfig
    from vllm.forward_context import set_forward_context

    config = FalconConfig(hidden_size=384, num_attention_heads=12, new_decoder_architecture=True, num_kv_heads=12)
    with mock.patch.object(place.config, "model_config", settings_of(config)):
        layer = made("models.falcon.FalconDecoderLayer", config=config, prefix=f"layers.{next(names)}")
    refuse_unknown(layer)
    assert containers(torch.nn.Sequential(layer)) == {"0.self_attention": None, "0.mlp": None}
    qkv, dense, up, down = (numbers(*shape) / 64 for shape in ((1152, 384), (384, 384), (1536, 384), (384, 1536)))
    loaded(layer.self_attention.query_key_value, [("weight", None, qkv)])
    loaded(layer.self_attention.dense, [("weight", None, dense)])
    loaded(layer.mlp.dense_h_to_4h, [("weight", None, up)])
    loaded(layer.mlp.dense_4h_to_h, [("weight", None, down)])
    for linear in linears(layer):
        ready(linear)
    layer.self_attention.attn = Queries()
    # At position 0 the rotary embedding turns nothing.
    positions = torch.zeros(len(x), dtype=torch.long)
    with set_forward_context(None, place.config, num_tokens=len(x)):
        output = layer(positions, x.clone())
        pieces = [layer.self_attention(positions, x.clone())[0], layer.mlp(x.clone())[0]]
    normed = F.layer_norm(x, (384,))
    attention = F.linear(F.linear(normed, qkv[:384]), dense)
    expected = x + attention + F.linear(F.gelu(F.linear(normed, up)), down)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    return pieces


@degrees
def test_modules_around_an_unfinished_sum_are_unknown(ranks: Callable, degree: int) -> None:
    """Falcon sums attention and feed-forward once, in the layer: its parts' outputs are terms, the layer's is whole."""
    first, *others = ranks(degree).run(run_falcon, numbers(3, 384) / 4)
    for pieces in others:
        assert not any(torch.allclose(a, b) for a, b in zip(pieces, first, strict=True))


def run_unknown(place: Place) -> None:
    from vllm.lora.layers import ColumnParallelLinearWithLoRA
    from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, UnquantizedLinearMethod

    class Permuted(ColumnParallelLinear):
        pass

    class Quantized(UnquantizedLinearMethod):
        pass

    size = 4 * place.degree
    column = ColumnParallelLinear(6, size, bias=False, prefix="q_proj")
    others = {
        "Permuted": Permuted(6, size),
        "ColumnParallelLinearWithLoRA": ColumnParallelLinearWithLoRA(column),
        "Elsewhere": type("Elsewhere", (ReplicatedLinear,), {})(6, size),
    }
    norms = {
        "MiniMaxText01RMSNormTP": made("layers.minimax_rms_norm.rms_norm_tp.MiniMaxText01RMSNormTP", hidden_size=size),
        "BailingGroupRMSNormGate": made(
            "layers.mamba.linear.bailing_linear_attn.BailingGroupRMSNormGate", hidden_size=4
        ),
    }
    for name, module in (others | norms).items():
        model = torch.nn.ModuleDict({"known": column, "odd": module})
        if place.degree == 1:
            refuse_unknown(model)
            continue
        with pytest.raises(Unshardable, match=rf"`odd` is a .*{name}"):
            refuse_unknown(model)
        if name in others:
            with pytest.raises(Unshardable, match=rf"`a\.b` is a .*{name}"):
                sides(module, "a.b")
    column.quant_method = Quantized()
    with pytest.raises(UnknownLayout, match="under Quantized"):
        weight(column, "weight")
    with pytest.raises(UnknownLayout, match="`q_proj` has no `bias`"):
        weight(column, "bias")
    with pytest.raises(UnknownLayout, match="is no parameter whose layout is known"):
        weight(torch.nn.Linear(2, 2), "weight")
    refuse_unknown(torch.nn.ModuleList([column, torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)]))
    assert sides(torch.nn.Linear(2, 2), "x") is None and parts(column) == {} and parts(torch.nn.Linear(2, 2)) == {}


@flags("degree", [1, *DEGREES])
def test_layers_that_are_not_known_are_refused_by_name(ranks: Callable, degree: int) -> None:
    ranks(degree).run(run_unknown)


def run_settings(place: Place) -> None:
    from vllm.distributed import get_tp_group

    embedding = made(
        "layers.vocab_parallel_embedding.VocabParallelEmbedding",
        num_embeddings=12,
        embedding_dim=4,
        padding_size=place.degree,
        parallel_group=get_tp_group(),
    )
    with pytest.raises(Unshardable, match=r"`embed` is split over a group of its own"):
        sides(embedding, "embed")
    block = Block("tensor", True, False, f"block{next(names)}")
    block.experts.moe_config.moe_parallel_config.dp_size = 2
    with pytest.raises(Unshardable, match="several data- or context-parallel ranks"):
        refuse_unknown(block)
    place.config.parallel_config.enable_expert_parallel = True
    rows = Block("sequence", True, True, f"block{next(names)}")
    place.config.parallel_config.enable_expert_parallel = False
    refuse_unknown(torch.nn.ModuleDict({"mlp": rows}))
    term = made(f"{LINEAR}RowParallelLinear", input_size=12, output_size=4, bias=False, reduce_results=False)
    with pytest.raises(Unshardable, match="sequence-parallel experts"):
        refuse_unknown(torch.nn.ModuleDict({"mlp": rows, "o_proj": term}))


@degrees
def test_settings_that_are_not_understood_are_refused(ranks: Callable, degree: int) -> None:
    ranks(degree).run(run_settings)
