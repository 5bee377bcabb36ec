"""What CUDA graphs serve: visits that are taken down while a graph is recorded, and made in every replay of it.

There is no GPU here, so a stand-in records what a CUDA graph would: the operations on tensors, which a replay runs
again with the same storage, and nothing of Python but what was handed to `add_eager`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphCapture
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm

from interleave import nnsight_port as port
from interleave.errors import InterleaveError
from runtimes.vllm.envoys import EngineEnvoy, instrument
from runtimes.vllm.fragments import EngineFragments
from runtimes.vllm.interleaver import EngineInterleaver
from runtimes.vllm.parallel import Part
from runtimes.vllm.rows import RowBatcher, Span
from runtimes.vllm.views.activation import ActivationView
from runtimes.vllm.views.layer import LayerView
from runtimes.vllm.views.linear import FusedLinearView, LinearView, PartView
from runtimes.vllm.views.norm import NormView

pytestmark = pytest.mark.vllm

WIDTH, INNER = 8, 6
#: The rows of the graph, and those that a step fills.
ROWS, TOTAL = 7, 5


class Recording(TorchDispatchMode):
    """In place of vLLM's capture: `segments` run in order are a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.segments: list[Callable[[], Any]] = []
        self._capturing = True

    def add_eager(self, function: Callable[[], Any]) -> Any:
        self._capturing = False
        result = function()
        self._capturing = True
        self.segments.append(function)
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._capturing:

            def again() -> None:
                for old, new in zip(tree_flatten(result)[0], tree_flatten(func(*args, **kwargs))[0], strict=True):
                    if isinstance(old, torch.Tensor) and old is not new:
                        old.copy_(new)

            self.segments.append(again)
        return result

    def replay(self) -> None:
        for segment in self.segments:
            segment()


class Linear(torch.nn.Linear):
    """A linear that gives what vLLM's give."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = Linear(WIDTH, 2 * INNER, bias=False)
        self.act_fn = SiluAndMul()
        self.down_proj = Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        x, _ = self.down_proj(self.act_fn(gate_up))
        return x


class Layer(torch.nn.Module):
    """A decoder layer with vLLM's interface, norm and activation; it has no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(WIDTH)
        self.mlp = Mlp()

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Stack(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(), Layer()])
        self.norm = RMSNorm(WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        residual = None
        for layer in self.layers:
            rows, residual = layer(rows, rows, residual)
        rows, _ = self.norm(rows, residual)
        return rows


class Tree:
    """The modules, with HuggingFace's views around them, on an engine with these taps."""

    def __init__(self, *taps: str) -> None:
        with set_current_vllm_config(VllmConfig()):
            self.stack = Stack()
        generator = torch.Generator().manual_seed(1)
        for parameter in self.stack.parameters():
            parameter.requires_grad_(False).copy_(torch.randn(parameter.shape, generator=generator))
        self.interleaver = EngineInterleaver([f"model.{tap}" for tap in taps], fragments=EngineFragments())
        self.interleaver.batcher = RowBatcher()
        self.model = EngineEnvoy(self.stack, interleaver=self.interleaver)
        for index, layer in enumerate(self.stack.layers):
            self._layer(f"model.layers.{index}", layer)
        self._view(NormView("model.norm", self.stack.norm, self.interleaver))
        for envoy in self.model.modules():
            instrument(envoy, self.interleaver)

    def _view(self, view: Any) -> Any:
        self.interleaver.views[view.path] = view
        if not isinstance(view, PartView):
            self.interleaver.around[view.path] = view
        return view

    def _layer(self, path: str, layer: Any) -> None:
        own, mlp = self.interleaver, layer.mlp
        self._view(LayerView(path, layer, own, WIDTH))
        self._view(NormView(f"{path}.input_layernorm", layer.input_layernorm, own))
        fused = self._view(FusedLinearView(f"{path}.mlp.gate_up_proj", mlp.gate_up_proj, own))
        parts = [
            self._view(PartView(f"{path}.mlp.{name}", mlp.gate_up_proj, own, fused, Part(None, start, INNER)))
            for name, start in (("gate_proj", 0), ("up_proj", INNER))
        ]
        act = self._view(ActivationView(f"{path}.mlp.act_fn", mlp.act_fn, own, parts[0].output, INNER))
        fused.arrange(parts, ["gate_proj", "act_fn", "up_proj", "down_proj"], {"act_fn": act})
        self._view(LinearView(f"{path}.mlp.down_proj", mlp.down_proj, own))

    def step(self, forward: Callable[[], Any], *blocks: tuple[Block, Span]) -> None:
        """One step of the engine, with these requests in it."""
        mediators = []
        for block, span in blocks:
            names = {"block": block, "model": self.model}
            mediator = port.Mediator(compile("block(model)", "<block>", "exec"), {}, names)
            mediator.batch_group = span  # type: ignore[assignment]
            mediators.append(mediator)
        self.interleaver.batcher.total = TOTAL
        self.interleaver.mediators = mediators
        with self.interleaver:
            forward()
        for mediator in mediators:
            if mediator.exception is not None:
                raise mediator.exception
            assert not mediator.alive, f"it waits for {mediator.pending}"


Block = Callable[[Any], None]
WHOLE = Span(0, TOTAL, TOTAL)


def rows(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def eagerly(seed: int, *blocks: tuple[Block, Span]) -> torch.Tensor:
    """What an eager engine computes, in a step of as many rows as there are requests' rows."""
    tree, output = Tree(), []
    tree.step(lambda: output.append(tree.stack(rows(seed)[:TOTAL])), *blocks)
    return output[0]


class Graph:
    """A recorded forward; `run` replays it for other rows."""

    def __init__(self, *taps: str) -> None:
        self.tree = Tree(*taps)
        self.input = rows(0)
        self.recording = Recording()
        interleaver = self.tree.interleaver
        with mock.patch.object(BreakableCUDAGraphCapture, "current", lambda: self.recording), interleaver:
            interleaver.busy = True
            with self.recording:
                self.output = self.tree.stack(self.input)
        self.breaks = sum(segment.__qualname__.endswith("replay") for segment in self.recording.segments)

    def run(self, seed: int, *blocks: tuple[Block, Span]) -> torch.Tensor:
        self.input.copy_(rows(seed))
        self.tree.step(self.recording.replay, *blocks)
        return self.output[:TOTAL].clone()


def read(location: str) -> torch.Tensor:
    """The tensor at the location, in a block."""
    value = port.Mediator.value(f"model.{location}")
    return value[0][0] if location.endswith("input") else value


LOCATIONS = [
    "layers.0.input",
    "layers.0.input_layernorm.input",
    "layers.0.input_layernorm.output",
    "layers.0.mlp.gate_proj.input",
    "layers.0.mlp.gate_proj.output",
    "layers.0.mlp.act_fn.input",
    "layers.0.mlp.act_fn.output",
    "layers.0.mlp.up_proj.input",
    "layers.0.mlp.up_proj.output",
    "layers.0.mlp.down_proj.input",
    "layers.0.mlp.down_proj.output",
    "layers.0.output",
    "layers.1.input",
    "layers.1.input_layernorm.input",
    "layers.1.output",
    "norm.input",
    "norm.output",
]


def test_the_stand_in_replays_what_it_recorded() -> None:
    graph = Graph()
    for seed in (1, 2):
        assert torch.equal(graph.run(seed), eagerly(seed))
    assert graph.breaks == 0


def test_a_recording_stops_where_a_tap_is_and_nowhere_else() -> None:
    assert Graph("layers.0.output").breaks == 1
    assert Graph("layers.0.output", "layers.1.mlp.down_proj.output").breaks == 2


@pytest.mark.parametrize("location", LOCATIONS)
def test_a_replay_serves_the_values_of_its_step(location: str) -> None:
    graph = Graph(location)
    seen: list[torch.Tensor] = []
    block = (lambda _: seen.append(read(location)), WHOLE)
    for seed in (1, 2):
        output = graph.run(seed, block)
        assert torch.equal(output, eagerly(seed, block))
        found, expected = seen[-2:]
        assert found.shape[:2] == (1, TOTAL)
        assert torch.equal(found, expected)
        kept = found.clone()
        graph.run(7)
        assert torch.equal(found, kept)


def write(location: str) -> Block:
    def block(_: Any) -> None:
        read(location)[..., :4] += 2.0

    return block


def replace(location: str) -> Block:
    def block(_: Any) -> None:
        value = port.Mediator.value(f"model.{location}")
        new = ((value[0][0] * -0.5,), value[1]) if location.endswith("input") else value * -0.5
        port.Mediator.swap(f"model.{location}", new)

    return block


@pytest.mark.parametrize("edit", [write, replace])
@pytest.mark.parametrize("location", LOCATIONS)
def test_an_edit_lands_in_what_the_graph_reads_next(location: str, edit: Callable[[str], Block]) -> None:
    graph = Graph(location)
    mine, other = Span(1, 2, TOTAL), Span(3, 2, TOTAL)
    seen: list[torch.Tensor] = []
    for seed in (1, 2):
        blocks = (edit(location), mine), (lambda _: seen.append(read(location)), other)
        output = graph.run(seed, *blocks)
        expected = eagerly(seed, *blocks)
        plain = eagerly(seed)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(output[mine.rows], plain[mine.rows], atol=1e-3)
        assert torch.equal(output[other.rows], plain[other.rows]) and torch.equal(output[:1], plain[:1])
        assert torch.equal(seen[-1], seen[-2])
        # The edit was the request's, and is gone with it.
        assert torch.equal(graph.run(seed), plain)


def test_the_stream_after_a_layer_is_what_the_next_one_takes() -> None:
    taps = ["layers.0.output", "layers.1.input", "layers.1.input_layernorm.input"]
    found: list[torch.Tensor] = []

    def block(model: Any) -> None:
        model.layers[0].output[:] += 3.0
        found.extend([model.layers[0].residual, model.layers[1].input, model.layers[1].input_layernorm.input])

    graph = Graph(*taps)
    graph.run(1, (block, WHOLE))
    plain: list[torch.Tensor] = []
    eagerly(1, (lambda model: plain.append(model.layers[0].output), WHOLE))
    assert len(found) == 3
    for one in found:
        torch.testing.assert_close(one, plain[0] + 3.0)


def test_what_is_no_tap_is_not_served() -> None:
    def block(model: Any) -> None:
        model.layers[1].output.sum()

    graph = Graph("layers.0.output")
    with pytest.raises(AssertionError, match=r"layers\.1\.output"):
        graph.run(1, (block, WHOLE))
    # Nor in a step that is too long for a graph.
    with pytest.raises(AssertionError, match=r"layers\.1\.output"):
        graph.tree.step(lambda: graph.tree.stack(rows(1)[:TOTAL]), (block, WHOLE))


def test_a_step_that_is_too_long_for_a_graph_serves_the_taps() -> None:
    tree = Tree("layers.0.output")
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    tree.step(lambda: tree.stack(rows(1)[:TOTAL]), (lambda model: found.append(model.layers[0].output), WHOLE))
    eagerly(1, (lambda model: expected.append(model.layers[0].output), WHOLE))
    assert torch.equal(found[0], expected[0])


def test_an_error_in_a_replay_is_the_blocks() -> None:
    def block(model: Any) -> None:
        model.layers[0].output = torch.zeros(1, 2, 3)

    graph = Graph("layers.0.output")
    plain = eagerly(1)
    with pytest.raises(InterleaveError, match="shape"):
        graph.run(1, (block, WHOLE))
    assert torch.equal(graph.run(1), plain)
