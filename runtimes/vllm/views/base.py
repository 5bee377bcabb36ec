"""One view over both worlds: HuggingFace's module, acted out over vLLM's.

vLLM computes what HuggingFace's model computes, with other modules: no batch axis, pairs of a stream and a part of
it, fused linears. A view stands around one vLLM module's forward. It visits HuggingFace's locations in HuggingFace's
order, with values of HuggingFace's shape, and carries what blocks did there into vLLM's own tensors. Where nobody
waits it only counts.

A value that a block wrote into goes back into the very tensor that vLLM holds, so that whoever shares the tensor
sees it, as in HuggingFace's model; a replacement goes on as a new tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import MoERunnerInterface

from interleave import nnsight_port as port
from interleave.errors import InterleaveError, ShapeChanged, Unserved
from interleave.fragments import Missing, Placed, Refused, Tree, missing
from interleave.layout import other_bits, same_bits

from ..fragments import COPY, EngineFragments
from ..interleaver import EngineInterleaver, mark_edited
from ..rows import Skipped

if TYPE_CHECKING:
    from .linear import FusedLinearView, LinearView

Native = Callable[..., Any]

#: What HuggingFace calls the tensor that a module computes on, in vLLM's signatures.
MAIN = ("hidden_states", "x", "hidden_state", "input_", "input_ids", "inputs", "query")


#: Why a block cannot call what computes with all that the engine knows of a step.
OF_A_STEP = "in a serving engine it computes with the requests of a step"


class Keywords(dict):
    """Keyword arguments of HuggingFace's, of which vLLM's module has the main one only."""

    def __init__(self, path: str, known: dict[str, Any] | None = None) -> None:
        super().__init__(known or {})
        self.path = path

    def __missing__(self, name: str) -> Any:
        raise Unserved(missing(f"{self.path}.inputs[1][{name!r}]", "vLLM's module takes no such argument"))

    def __copy__(self) -> Keywords:
        return Keywords(self.path, self)

    copy = __copy__

    def __reduce__(self) -> tuple:
        return Keywords, (self.path, dict(self))


class View:
    """What HuggingFace's module at `path` shows, and what `module`, vLLM's, computes.

    Args:
        path: Where the module is in the envoy tree.
        module: vLLM's module there.
        interleaver: Serves the visits.
    """

    #: Why a block cannot skip the module; None if it can.
    unskippable: str | None = None
    #: Why a block cannot call the module; None if it can.
    uncallable: str | None = None

    def __init__(self, path: str, module: torch.nn.Module, interleaver: EngineInterleaver) -> None:
        self.path = path
        self.module = module
        self.interleaver = interleaver
        #: Whether a block changed the value in the visit that was last, and the tensor with what was written into it.
        self.changed = False
        self.shared: torch.Tensor | None = None
        #: Whether HuggingFace's other modules are done with this one's input, and vLLM's may not be.
        self.private = False
        #: vLLM's own forward.
        self.native: Native | None = None
        self._locations = {side: f"{path}.{side}" for side in ("input", "skip", "output")}

    @property
    def fragments(self) -> EngineFragments:
        return self.interleaver.fragments

    def forward(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        """vLLM's forward with HuggingFace's visits in it. `native` runs the module itself."""
        raise NotImplementedError

    def call(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        """HuggingFace's module, called from a block: wholes in, wholes out. Every rank calls."""
        raise NotImplementedError

    @cached_property
    def needs_step(self) -> bool:
        """Whether the module computes with what vLLM keeps about the step that runs."""
        return any(isinstance(module, MoERunnerInterface) for module in self.module.modules())

    # -- visits ----------------------------------------------------------------------------------------------

    def location(self, side: str) -> str:
        return self._locations[side]

    def wanted(self, side: str) -> bool:
        return self.interleaver.wanted(self._locations[side])

    def pass_by(self, side: str) -> None:
        self.interleaver.pass_by(self._locations[side])

    def visit(self, side: str, value: Any) -> Any:
        """Serve `value`, of HuggingFace's structure; the very object if nobody changed it."""
        self.changed = False
        return self.interleaver.handle(self._locations[side], value)

    def gate(self) -> Skipped | None:
        """What requests put in place of this module's output, if any does."""
        if not self.wanted("skip"):
            self.pass_by("skip")
            return None
        left = self.visit("skip", port.NO_SKIP)
        return left if isinstance(left, Skipped) else None

    def place(self, side: str, tree: Tree) -> None:
        """Say how the value at one of this view's locations is spread."""
        self.fragments.tree[self._locations[side]] = tree

    def refuse(self, side: str, reason: str) -> None:
        """Say why the engine has no value of HuggingFace's there."""
        self.place(side, Missing(reason))

    def withdraw(self, reason: str, side: str | None = None, part: int | None = None) -> None:
        """Serve this view's values no more: all, those of one side, or one part of one side's value."""
        for each in ("input", "output") if side is None else (side,):
            tree = self.fragments.tree.get(self._locations[each])
            if part is not None and isinstance(tree, tuple) and not isinstance(tree, Placed):
                self.place(each, (*tree[:part], Missing(reason), *tree[part + 1 :]))
            else:
                self.refuse(each, reason)
        if side in (None, "output") and part is None:
            self.unskippable = reason

    def redressed(self, side: str, own: Any, replacement: Any) -> Any:
        """A replacement of the value on one side, in HuggingFace's structure, as this view gives that (`own`)."""
        return replacement

    def check_skip(self, replacement: Any, rows: int) -> None:
        """Raise, at the line of the `.skip`, unless the engine can put `replacement` there, for a request of `rows`.

        Raises:
            InterleaveError: It has another structure or shape than the module's output.
        """

    # -- in a CUDA graph -------------------------------------------------------------------------------------

    def recorded(
        self, locations: list[str], visit: Callable[..., torch.Tensor], tensor: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        """Leave `visit` to the replays of the CUDA graph that is being recorded, if a tap is among `locations`.

        Returns:
            What the rest of the graph computes with: a tensor that holds what `visit` gives in each replay. A tensor of
            its own, since others may hold `tensor`, and a replacement is not for them.
        """
        if self.interleaver.taps.isdisjoint(locations):
            return tensor
        left = tensor.clone()
        self.interleaver.record(locations, lambda left, *tensors: left.copy_(visit(*tensors)), left, tensor, *others)
        return left

    # -- what blocks did -------------------------------------------------------------------------------------

    def settle(self, tensor: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """Carry `left`, what blocks made of `tensor`, into the model: into `tensor` itself, and where a request
        replaced it, into a new tensor. Both hold the rows of the step; `tensor` may have padding behind them."""
        left = self.checked(tensor, left.to(tensor.dtype))
        swapped = self.interleaver.swapped
        self.changed = bool(swapped)
        shared = tensor
        for mediator, span in self.interleaver.spans():
            rows = span.rows
            if span not in swapped and not same_bits(tensor[rows].contiguous(), left[rows].contiguous()):
                mark_edited(mediator)
                self.changed = True
                if self.private and shared is tensor:
                    shared = tensor.clone()
                shared[rows].copy_(left[rows])
        self.shared = shared
        if not swapped:
            return shared
        new = shared.clone()
        for span in swapped:
            new[span.rows].copy_(left[span.rows])
        return new

    def checked(self, tensor: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
        """`left`, without token ids that the model does not have: those are the errors of their requests."""
        if tensor.is_floating_point():
            return left
        for mediator, span in self.interleaver.spans():
            rows = span.rows
            try:
                self.interleaver.check_integers(self.location("input"), tensor[rows], left[rows], ids=True)
            except InterleaveError as error:
                self.interleaver.fail(mediator, error)
                left = left.clone()
                left[rows] = tensor[rows]
        return left

    def settle_stream(
        self, stream: torch.Tensor, left: torch.Tensor, part: torch.Tensor, residual: torch.Tensor
    ) -> None:
        """The same for the residual stream, of which vLLM holds two parts: a changed row is all in `part`; other rows
        keep their bits."""
        left = left.to(part.dtype)
        for mediator, span in self.interleaver.spans():
            rows = span.rows
            changed = other_bits(stream[rows], left[rows]).any(-1)
            if changed.any():
                mark_edited(mediator)
                part[rows][changed] = left[rows][changed]
                residual[rows][changed] = 0


class TensorView(View):
    """A module that takes one tensor of rows and gives one, in vLLM as in HuggingFace's model.

    Attributes:
        input, output: How the two are spread over the ranks.
        width: How wide the whole output is; None if that is not known.
    """

    #: Whether HuggingFace's module takes its tensor as a keyword of this name.
    keyword: str | None = None

    def __init__(
        self,
        path: str,
        module: torch.nn.Module,
        interleaver: EngineInterleaver,
        *,
        input: Placed | Refused = COPY,
        output: Placed | Refused = COPY,
        width: int | None = None,
    ) -> None:
        super().__init__(path, module, interleaver)
        self.input, self.output, self.width = input, output, width
        self.place("input", input if isinstance(input, Refused) else self.dressed_input(input))
        self.place("output", output if isinstance(output, Refused) else self.dressed(output))
        if isinstance(output, Refused):
            self.unskippable = output.reason
        #: The fused linear whose next part HuggingFace runs after this module.
        self.followed_by: FusedLinearView | None = None
        #: The linear that takes this module's output, and that HuggingFace runs next.
        self.taken_by: LinearView | None = None

    def redressed(self, side: str, own: Any, replacement: Any) -> Any:
        if isinstance(own, torch.Tensor) or isinstance(replacement, torch.Tensor):
            return replacement
        undress, dress = (
            (self.undressed_input, self.dressed_input) if side == "input" else (self.undressed, self.dressed)
        )
        try:
            tensor = undress(replacement)
        except (TypeError, IndexError, KeyError, AttributeError, ValueError, StopIteration):
            return replacement
        return dress(tensor) if isinstance(tensor, torch.Tensor) else replacement

    # -- between vLLM's values and HuggingFace's ---------------------------------------------------------------

    def dressed_input(self, tensor: Any) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) of HuggingFace's module."""
        if self.keyword is None:
            return (tensor,), Keywords(self.path)
        return (), Keywords(self.path, {self.keyword: tensor})

    def undressed_input(self, value: tuple[tuple, dict[str, Any]]) -> torch.Tensor:
        args, kwargs = value
        return args[0] if args else next(iter(kwargs.values()))

    def dressed(self, tensor: Any) -> Any:
        """The output of HuggingFace's module."""
        return tensor

    def undressed(self, value: Any) -> torch.Tensor:
        return value

    def batched(self, tensor: torch.Tensor) -> torch.Tensor:
        """The step's rows, with HuggingFace's batch axis; without the padding that the engine may add."""
        total = self.interleaver.batcher.total
        return (tensor if tensor.shape[0] == total else tensor[:total])[None]

    def unbatched(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[0]

    def picked(self, output: Any) -> torch.Tensor:
        """HuggingFace's output out of vLLM's."""
        return output

    def packed(self, output: Any, tensor: torch.Tensor) -> Any:
        """vLLM's output with another tensor in it."""
        return tensor

    @cached_property
    def main(self) -> str:
        """The name of vLLM's parameter that takes the tensor."""
        parameters = list(inspect.signature(type(self.module).forward).parameters)[1:]
        return next((name for name in MAIN if name in parameters), parameters[0])

    @cached_property
    def _place_of_main(self) -> int:
        return list(inspect.signature(type(self.module).forward).parameters)[1:].index(self.main)

    def taken(self, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        return kwargs[self.main] if self.main in kwargs else args[self._place_of_main]

    def put(self, args: tuple, kwargs: dict[str, Any], tensor: torch.Tensor) -> tuple[tuple, dict[str, Any]]:
        if self.main in kwargs:
            return args, {**kwargs, self.main: tensor}
        place = self._place_of_main
        return (*args[:place], tensor, *args[place + 1 :]), kwargs

    # -- in a step -------------------------------------------------------------------------------------------

    def forward(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensor = self.taken(args, kwargs)
        left = self.enter(tensor)
        if left is not tensor:
            args, kwargs = self.put(args, kwargs, left)
        skipped = self.gate()
        with self.interleaver.skipping(self.path, skipped):
            output = native(*args, **kwargs)
        before = self.picked(output)
        after = self.leave(before if skipped is None else self.over(before, skipped))
        self.done(after)
        return output if after is before else self.packed(output, after)

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The visit of the input."""
        self.changed = False
        if self.interleaver.recording:
            return self.recorded([self.location("input")], self.enter, tensor)
        if not self.wanted("input"):
            self.pass_by("input")
            return tensor
        value = self.dressed_input(self.batched(tensor))
        left = self.visit("input", value)
        return tensor if left is value else self.settle(tensor, self.unbatched(self.undressed_input(left)))

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """The visit of the output."""
        if self.interleaver.recording:
            return self.recorded([self.location("output")], self.leave, tensor)
        if not self.wanted("output"):
            self.pass_by("output")
            return tensor
        value = self.dressed(self.batched(tensor))
        left = self.visit("output", value)
        return tensor if left is value else self.settle(tensor, self.unbatched(self.undressed(left)))

    def done(self, output: torch.Tensor) -> None:
        """All of this module has been visited: what HuggingFace runs next, and vLLM ran before or runs later, is
        visited now."""
        if self.taken_by is not None:
            self.taken_by.run_ahead(output)
        if self.followed_by is not None:
            self.followed_by.resume(self.path.rpartition(".")[2])

    def over(self, tensor: torch.Tensor, skipped: Skipped) -> torch.Tensor:
        """`tensor` with the rows of requests that skip this module replaced."""
        tensor = tensor.clone()
        for span, replacement in skipped.parts:
            piece = self.fragments.split(self._locations["output"], replacement)
            tensor[span.rows].copy_(self.unbatched(self.undressed(piece)))
        return tensor

    def skip_shape(self, rows: int) -> tuple[int, ...] | None:
        """The shape of HuggingFace's whole output for one request."""
        return None if self.width is None else (1, rows, self.width)

    def check_skip(self, replacement: Any, rows: int) -> None:
        try:
            tensor = self.undressed(replacement)
        except (TypeError, IndexError, KeyError, AttributeError):
            tensor = None
        if not isinstance(tensor, torch.Tensor):
            raise InterleaveError(
                f"`{self.path}.skip` takes what the module returns, {self.described_output}, and got a "
                f"{type(replacement).__name__}"
            )
        shape = self.skip_shape(rows)
        if shape is not None and tuple(tensor.shape) != shape:
            raise ShapeChanged(
                f"`{self.path}.skip` takes the place of an output of shape {shape}, and got one of shape "
                f"{tuple(tensor.shape)}"
            )

    #: For an error: what HuggingFace's module returns.
    described_output = "a tensor"

    # -- from a block ----------------------------------------------------------------------------------------

    def call(self, native: Native, args: tuple, kwargs: dict[str, Any]) -> Any:
        whole = self.undressed_input((args, kwargs))
        key = self.interleaver.call_key(self.path)
        value = self.fragments.split(self._locations["input"], self.dressed_input(whole), f"{key}/in")
        tensor = self.undressed_input(value)
        flat = tensor.reshape(-1, tensor.shape[-1])
        result = self.picked(native(flat) if self._place_of_main == 0 else native(**{self.main: flat}))
        output = self.dressed(result.reshape(*tensor.shape[:-1], *result.shape[1:]))
        return self.fragments.whole(self._locations["output"], output, key)[0]
