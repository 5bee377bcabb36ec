"""What vLLM's parallel layers hold on each rank, read off the layer objects.

One row per class, by its full name: vLLM's layers are subclassed to change what a rank holds, so a subclass is trusted
only if it has a row of its own, and nothing of vLLM is imported to recognise them. A row reads what the layer declares
(its sizes and flags as they are now, since models change them after construction); a class without a row is refused.

========================  =====================================================================================
column-parallel           output features are split; a fused linear's parts each on their own (`[q0|k0|v0]`)
row-parallel              input features are split; the output is summed by the layer, or a term of a sum
vocabulary-parallel       rows of the table are split, padded; lookups are summed by the layer, or terms of a sum
experts                   summed by the layer, a term of a sum, or token rows (sequence parallel)
========================  =====================================================================================

What flows between two such layers (activations, heads, norms over them) is not told here. Nor are the modules around
one that hands on a term of a sum or token rows: `containers` finds those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from interleave.errors import UnknownLayout, Unshardable
from interleave.layout import Block, Layout, Partial, Rows, Shard

ShardId = str | int


class Part(NamedTuple):
    """One linear of the checkpoint inside a fused one."""

    layout: Shard | None  # how the ranks' pieces of this part make the part whole; None: every rank has it whole
    start: int  # where the part begins in this rank's piece of the fused output, in columns
    width: int  # how wide this rank's piece of the part is


class Sides(NamedTuple):
    """The layouts of what goes into a layer (of every tensor) and of what it computes. None: whole on every rank.

    A bias that a linear returns beside its output (`skip_bias_add`) is split as `weight(layer, "bias")` says.
    """

    input: Layout | None = None
    output: Layout | None = None
    axis: str = "tp"
    rows: bool = False  # on both sides each rank has token rows of its own: `sequence_rows` of the step's tokens


def sides(module: torch.nn.Module, path: str) -> Sides | None:
    """What each rank has on the two sides of a parallel layer. None: no parallel layer, or on one rank.

    Args:
        module: Any module.
        path: Names it in the refusal.

    Raises:
        Unshardable: A parallel layer of a class, or with settings, that this package does not understand.
    """
    rule, parent = _known(type(module))
    if rule is not None:
        return rule(module, path)
    if parent is not None and _degree(module) > 1:
        raise Unshardable(
            f"`{path}` is a {_name(type(module))}, a {parent.rpartition('.')[2]} that this package does not know, so "
            f"its values cannot be made whole. Run the model on one rank."
        )
    return None


def parts(module: torch.nn.Module) -> dict[ShardId, Part]:
    """The checkpoint's linears in a fused one, by the ids under which vLLM loads them; none in any other module.

    Raises:
        Unshardable: The layer gathers its output, part mixed with part.
    """
    blocks = BLOCKS.get(_name(type(module)), lambda _: {})(module)
    _check_gathered(module, getattr(module, "prefix", ""))
    found: dict[ShardId, Part] = {}
    start = 0
    for shard, block in blocks.items():
        if shard is None:
            return {}
        split = block.degree > 1 and not getattr(module, "gather_output", False)
        width = block.widths[0] if split else block.size
        found[shard] = Part(_shard([block], -1) if split else None, start, width)
        start += width
    return found


def weight(module: torch.nn.Module, name: str) -> Layout | None:
    """How the parameter `name` of a parallel layer is split. None: whole on every rank.

    The whole of a fused linear has its parts one after another; that of an embedding or a head has no padded rows (on
    one rank too, whose padded table is more than the whole).

    Raises:
        UnknownLayout: Not a parameter that is understood here, or one that the engine has packed or quantized.
    """
    kind = _name(type(module))
    if name in HELD.get(kind, ()):
        return Shard(0)
    if kind not in RULES or name not in ("weight", "bias") or not hasattr(module, "output_partition_sizes"):
        raise UnknownLayout(f"`{name}` of a {kind} is no parameter whose layout is known")
    _check_plain(module, name)
    layer: Any = module
    if kind in BLOCKS:
        blocks = BLOCKS[kind](layer)
        return _shard(list(blocks.values()), 0) if layer.tp_size > 1 else None
    if kind in TABLES:
        return _vocabulary(layer, 0)
    if kind == _ROW and name == "weight" and layer.tp_size > 1:
        return _features(layer, 1)
    return None


def is_parallel(module: torch.nn.Module) -> bool:
    """Whether the module is a parallel layer, or holds parameters of which a rank has a part."""
    kind = _name(type(module))
    return kind in RULES or kind in HELD


def sequence_rows(tokens: int, degree: int) -> Rows:
    """The rows of a step's `tokens` that each rank's experts get when they are sequence parallel.

    vLLM pads the rows to a multiple of the degree and deals them in runs (`sequence_parallel_chunk`).
    """
    count = -(-tokens // degree)
    return Rows(0, (count,) * degree, tuple(_live(tokens, count, rank) for rank in range(degree)))


def refuse_unknown(model: torch.nn.Module) -> None:
    """Look at every module, and refuse a model with a parallel layer that is not understood.

    Raises:
        Unshardable: Naming the path and the class.
    """
    containers(model)
    if _degree(model) == 1:
        return
    for path, module in model.named_modules():
        kind = _name(type(module))
        own = list(module.parameters(recurse=False))
        if not own or kind in RULES or not kind.startswith("vllm.") or next(module.children(), None) is not None:
            continue
        # The attention layers' own parameters are scales; what they compute on lies between two linears.
        if _ATTENTION in _ancestors(type(module)):
            continue
        # vLLM attaches a loader to a parameter of which a rank takes a part.
        if _degree(module) > 1 or any(hasattr(parameter, "weight_loader") for parameter in own):
            raise Unshardable(
                f"`{path}` is a {kind}, which may hold one rank's part of its parameters, and this package does not "
                f"know how. Run the model on one rank."
            )


def containers(model: torch.nn.Module) -> dict[str, Sides | None]:
    """The modules that are no parallel layer and yet hand on, or work on, what is not whole, by path.

    Shared experts return a term of the sum that the experts around them finish. A module with a layer in it that
    hands on a term may finish the sum or not: None, its output is unknown. What stands beside and inside
    sequence-parallel experts works on token rows.

    Raises:
        Unshardable: A parallel layer that is not understood, or a mixture of the two.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    known = {path: sides(module, path) for path, module in modules.items()}
    runners = [module for module in modules.values() if _name(type(module)) in EXPERTS]
    shared = {id(runner.shared_experts._layer) for runner in runners if runner.shared_experts is not None}
    terms: dict[str, Sides | None] = {}
    rows: dict[str, Sides | None] = {}
    for path, found in known.items():
        if found is not None and isinstance(found.output, Partial):
            for parent in _parents(path):
                if id(modules[parent]) in shared:
                    terms[parent] = Sides(output=Partial())
                    break
                if _name(type(modules[parent])) in FINISHING:
                    break
                terms[parent] = None
        if found is not None and found.rows:
            block = path.rpartition(".")[0]
            inside = f"{block}." if block else ""
            for other in modules:
                if other not in ("", path) and other.startswith(inside):
                    rows[other] = Sides(rows=True)
    split = [path for path in rows if known[path] not in (None, Sides(rows=True))]
    if rows and (terms or split):
        raise Unshardable(
            f"sequence-parallel experts work on token rows, and `{[*terms, *split][0]}` in the same model is split "
            f"or summed in a way that does not fit this. Run the experts without sequence parallelism."
        )
    return terms | rows


# The layers: what each class makes of its two sides, and how it splits its features.


def _columns(layer: Any, path: str) -> Sides | None:
    if layer.tp_size == 1 or _is_convolution(layer):
        return None
    _check_gathered(layer, path)
    if layer.gather_output:
        return Sides()
    return Sides(output=_shard(list(BLOCKS[_name(type(layer))](layer).values()), -1))


def _rows(layer: Any, path: str) -> Sides | None:
    # A term has no addend: the first rank's has the bias in it, if the layer adds one at all.
    if layer.tp_size == 1:
        return None
    return Sides(
        input=_features(layer, -1) if layer.input_is_parallel else None,
        output=None if layer.reduce_results else Partial(),
    )


def _nothing(layer: Any, path: str) -> None:
    return None


def _lookup(layer: Any, path: str) -> Sides | None:
    if layer.tp_size == 1:
        return None
    if layer.parallel_group is not None:
        raise Unshardable(f"`{path}` is split over a group of its own, which this package does not know")
    return Sides(output=None if layer.reduce_results else Partial())


def _experts(runner: Any, path: str) -> Sides | None:
    config = runner.moe_config
    if config.is_sequence_parallel:
        return Sides(rows=True)
    if config.dp_size > 1 or config.pcp_size > 1:
        raise Unshardable(f"`{path}`: experts that several data- or context-parallel ranks share are not understood")
    if config.tp_size == 1 and config.ep_size == 1:
        return None
    return Sides(output=Partial() if config.skip_final_all_reduce else None)


def _heads_norm(layer: Any, path: str) -> Sides | None:
    return None if layer.tp_size == 1 else Sides(Shard(-1), Shard(-1))


def _mamba2(mixer: Any, path: str) -> None:
    # With one group of B and C every rank has it, in a linear whose class says that all its columns are split.
    if mixer.tp_size > 1 and _name(type(mixer.in_proj)) == _COLUMN:
        raise Unshardable(
            f"`{path}` copies its one group of B and C to each of {mixer.tp_size} ranks, a layout that its linears do "
            f"not show. Run the model on one rank."
        )


def _one(layer: Any) -> dict[ShardId | None, Block]:
    return {None: Block.split(layer.output_size, layer.tp_size)}


def _grouped(layer: Any) -> dict[ShardId | None, Block]:
    return {None: Block.split(layer.output_size, layer.tp_size * layer.group_size, layer.group_size)}


def _merged(layer: Any) -> dict[ShardId | None, Block]:
    return {shard: Block.split(size, layer.tp_size) for shard, size in enumerate(layer.output_sizes)}


def _qkv(layer: Any) -> dict[ShardId | None, Block]:
    copies = layer.num_kv_head_replicas
    distinct = layer.tp_size // copies
    return {
        "q": Block((layer.num_heads * layer.head_size,) * layer.tp_size),
        "k": Block((layer.num_kv_heads * layer.head_size,) * distinct, copies),
        "v": Block((layer.num_kv_heads * layer.v_head_size,) * distinct, copies),
    }


def _qkv_with_indexer(layer: Any) -> dict[ShardId | None, Block]:
    copies = layer.num_kv_head_replicas
    index = Block((layer.num_index_heads * layer.index_head_size,) * (layer.tp_size // copies), copies)
    return _qkv(layer) | {"index_q": index, "index_k": Block((layer.index_head_size,), layer.tp_size)}


def _latents_and_gate(layer: Any) -> dict[ShardId | None, Block]:
    # The two latents are on every rank; the layer declares each as wide as all copies together.
    degree = layer.tp_size
    query, key_value, gate = layer.output_sizes
    return {
        0: Block((query // degree,), degree),
        1: Block((key_value // degree,), degree),
        2: Block.split(gate, degree),
    }


def _shard(blocks: list[Block], dim: int) -> Shard:
    if len(blocks) == 1:
        return Shard(dim, widths=blocks[0].widths, replicas=blocks[0].replicas)
    return Shard(dim, blocks=tuple(blocks))


def _features(layer: Any, dim: int) -> Shard:
    return _shard([Block.split(layer.input_size, layer.tp_size)], dim)


def _vocabulary(layer: Any, dim: int) -> Rows | None:
    """The table's rows, or the logits' columns; the padding at the end of the last ranks' is no part of the whole."""
    if layer.num_embeddings != layer.org_vocab_size:
        raise UnknownLayout(f"`{layer.prefix}` has added tokens behind the padded rows of the vocabulary's own")
    size, degree, count = layer.num_embeddings, layer.tp_size, layer.num_embeddings_per_partition
    if degree == 1 and count == size:
        return None
    return Rows(dim, (count,) * degree, tuple(_live(size, count, rank) for rank in range(degree)))


def _live(total: int, count: int, rank: int) -> int:
    """How many of rank's `count` places are taken when `total` values are dealt in runs."""
    return max(0, min(count, total - rank * count))


_LAYERS = "vllm.model_executor.layers"
_MODELS = "vllm.model_executor.models"
_COLUMN = f"{_LAYERS}.linear.ColumnParallelLinear"
_ROW = f"{_LAYERS}.linear.RowParallelLinear"
_REPLICATED = f"{_LAYERS}.linear.ReplicatedLinear"
_EMBEDDING = f"{_LAYERS}.vocab_parallel_embedding.VocabParallelEmbedding"
_LM_HEAD = f"{_LAYERS}.vocab_parallel_embedding.ParallelLMHead"
_MAMBA = f"{_LAYERS}.mamba.mamba_mixer.MambaMixer"
_MAMBA2 = f"{_LAYERS}.mamba.mamba_mixer2.MambaMixer2"
_DELTA = f"{_LAYERS}.mamba.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention"
_OLMO_DELTA = f"{_LAYERS}.mamba.gdn.olmo_gdn_linear_attn.OlmoHybridGatedDeltaNetAttention"
_ATTENTION = f"{_LAYERS}.attention_layer_base.AttentionLayerBase"

#: Column-parallel class -> its parts, in the order of its columns. A linear that is not fused has one, without an id.
BLOCKS: dict[str, Callable[[Any], dict[ShardId | None, Block]]] = {
    _COLUMN: _one,
    f"{_LAYERS}.linear.DCPGroupColumnParallelLinear": _grouped,
    f"{_LAYERS}.linear.MergedColumnParallelLinear": _merged,
    f"{_LAYERS}.linear.QKVParallelLinear": _qkv,
    f"{_LAYERS}.linear.MinimaxM3QKVParallelLinearWithIndexer": _qkv_with_indexer,
    f"{_LAYERS}.linear.KimiK3MergedQKVGateLinear": _latents_and_gate,
    f"{_MODELS}.deepseek_v2.DeepSeekV2FusedQkvAProjLinear": _merged,
}

TABLES = (_EMBEDDING, _LM_HEAD)
EXPERTS = (f"{_LAYERS}.fused_moe.runner.moe_runner.MoERunner",)

#: Class -> what it makes of its two sides.
RULES: dict[str, Callable[[Any, str], Sides | None]] = {
    **dict.fromkeys(BLOCKS, _columns),
    _ROW: _rows,
    _REPLICATED: _nothing,
    f"{_LAYERS}.fused_moe.router.gate_linear.GateLinear": _nothing,
    _EMBEDDING: _lookup,
    **dict.fromkeys(EXPERTS, _experts),
    # Never called as modules: the logits processor and the experts around them use their weights.
    _LM_HEAD: _nothing,
    f"{_LAYERS}.fused_moe.routed_experts.RoutedExperts": _nothing,
    f"{_MODELS}.gpt_oss.GptOssRoutedExperts": _nothing,
    # Mixers: whole on both sides; the linears inside them are told by their own classes.
    _MAMBA: _nothing,
    _MAMBA2: _mamba2,
    f"{_LAYERS}.mamba.short_conv.ShortConv": _nothing,
    _DELTA: _nothing,
    _OLMO_DELTA: _nothing,
    f"{_LAYERS}.mamba.mamba_mixer2.Mixer2RMSNormGated": _heads_norm,
}

#: Whose subclasses are parallel layers too, besides those of the classes above.
BASES = (
    f"{_LAYERS}.linear.LinearBase",
    f"{_LAYERS}.fused_moe.runner.moe_runner_interface.MoERunnerInterface",
    f"{_LAYERS}.mamba.abstract.MambaBase",
    "vllm.lora.layers.base.BaseLayerWithLoRA",
)

#: Class -> parameters of its own that are split by heads (or channels) along their first dim.
HELD: dict[str, tuple[str, ...]] = {
    _MAMBA: ("A", "D"),
    _MAMBA2: ("A", "D", "dt_bias"),
    _DELTA: ("A_log", "dt_bias"),
    _OLMO_DELTA: ("A_log", "dt_bias"),
    f"{_MODELS}.gpt_oss.OAIAttention": ("sinks",),
}

#: Classes that finish the sums whose terms the layers in them hand on.
FINISHING = (f"{_MODELS}.falcon.FalconDecoderLayer",)

#: Methods under which a weight is what the checkpoint has, until it is packed.
PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


@lru_cache(maxsize=4096)
def _known(kind: type) -> tuple[Callable[[Any, str], Sides | None] | None, str | None]:
    """The rule for exactly this class, and the nearest class above it that is a parallel layer."""
    names = _ancestors(kind)
    return RULES.get(names[0]), next((name for name in names[1:] if name in RULES or name in BASES), None)


@lru_cache(maxsize=4096)
def _ancestors(kind: type) -> tuple[str, ...]:
    return tuple(map(_name, kind.__mro__))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _degree(module: torch.nn.Module) -> int:
    """The largest degree that a module, or one in it, says it is split over."""
    degrees = [1]
    for inner in module.modules():
        degrees += [getattr(inner, "tp_size", 1), getattr(inner, "tp_world", 1)]
        config = getattr(inner, "moe_config", None)
        if config is not None:
            degrees += [config.tp_size, config.ep_size]
    return max(degree for degree in degrees if isinstance(degree, int))


def _parents(path: str) -> Iterator[str]:
    """The paths around `path`, the nearest first."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _is_convolution(layer: Any) -> bool:
    """Whether a linear only holds a convolution's weight (`[channels, 1, width]`) and is never called."""
    weight = getattr(layer, "weight", None)
    return weight is not None and weight.dim() == 3


def _check_gathered(layer: Any, path: str) -> None:
    """vLLM gathers rank after rank: of several parts, or of copies, that makes no whole."""
    if not getattr(layer, "gather_output", False) or layer.tp_size == 1:
        return
    blocks = BLOCKS[_name(type(layer))](layer).values()
    if len(blocks) > 1 or any(block.replicas > 1 for block in blocks):
        raise Unshardable(f"`{path}` gathers its output rank by rank, which mixes its {len(blocks)} parts")


def _check_plain(layer: Any, name: str) -> None:
    """A parameter must be what its layer's class declares, loaded as that class loads it."""
    parameter = getattr(layer, name, None)
    if parameter is None:
        raise UnknownLayout(f"`{layer.prefix}` has no `{name}`")
    columns = sum(layer.output_partition_sizes)
    shape = (columns, getattr(layer, "input_size_per_partition", layer.input_size)) if name == "weight" else (columns,)
    method = type(layer.quant_method).__name__
    if tuple(parameter.shape) != shape or method not in PLAIN_METHODS:
        raise UnknownLayout(
            f"`{layer.prefix}.{name}` is no longer the plain parameter of shape {shape}: the engine holds it as "
            f"{tuple(parameter.shape)} under {method}"
        )
    # Some mixers load a linear's parameter with a function of their own, into another order than the class has.
    loader = getattr(parameter, "weight_loader", None)
    if loader is not None and _name(type(getattr(loader, "__self__", None))) not in RULES:
        raise UnknownLayout(f"`{layer.prefix}.{name}` was loaded in an order that its layer's class does not tell")
