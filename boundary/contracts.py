"""What stages promise one another: producer contracts, resolved inputs and outputs, and the edges between
them.

A model declares how its compute behaves (`factories.StageDeclaration`). For a topology and a batch variant
that resolves to a :class:`StageDecl`: the rows and the sums of one :class:`StageInput` and one
:class:`StageOutput`. An :class:`EdgeDecl` puts a producer's output next to its consumer's input. From these,
construction binds the paths a forward pass takes; a batch merely selects among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .layout import Layout
from .parallel import BoundSum


class StageKind(Enum):
    """A mixer mixes tokens (attention, Mamba); an FFN acts on each row alone (dense, MoE)."""

    ATTN = "attention"
    FFN = "ffn"


class ProducerReduction(Enum):
    """How a stage's compute cooperates with the boundary's decision about its output sum.

    * `PARTIAL`: attention only. Compute never sums; it hands its term to `finish()`.
    * `SCOPED`: compute sums unless the flags of the open exit say that the boundary will.
    * `LOCAL_TAIL`: FFN only. Compute adds a replicated component after its own sum, so that sum is never left
      to a later stage. A reduce-scatter may still be permitted; compute that then skips its sum must see to
      it that the component is in exactly one rank's term.
    """

    PARTIAL = "partial"
    SCOPED = "scoped"
    LOCAL_TAIL = "local_tail"


class BatchVariant(Enum):
    """The kinds of batch for which a stage may have a path of its own; in the order of precedence."""

    SEQUENCE_PARALLEL = "sequence_parallel"
    INPUT_SCATTERED = "input_scattered"
    CP = "context_parallel"
    ORDINARY = "ordinary"


class Leaves(Enum):
    """Whether a producer leaves its attention-TP sum to the consumer: a fact both sides derive alike."""

    NEVER = "never"
    ALWAYS = "always"
    PER_BATCH = "per batch"


class Order(Enum):
    """In which order a consumer completes, updates, reads and gathers.

    * `PLAIN`: complete the sum on the read's rows, update and read there, move what was read to compute's
      rows.
    * `JOIN_THEN_GATHER`: attention-TP rank 0 adds the residual to its term; one sum-gather over full TP
      completes the sum and places the rows; the norm runs on the gathered rows. Saves attention TP's own
      all-reduce.
    * `JOIN_SLICES`: each rank adds its slice of a scattered residual to those rows of its term; the
      all-reduce that completes the sum gathers the residual too.

    The last two need a plain addition as the update and a read that leaves the residual as it is.
    """

    PLAIN = "plain"
    JOIN_THEN_GATHER = "residual joins the sum, then gather"
    JOIN_SLICES = "scattered residual joins the sum"


@dataclass(frozen=True)
class StageInput:
    """What a stage's compute needs.

    Attributes:
        rows: The rows compute runs on.
        read_rows: The rows on which the update and the read run, and on which the residual then lies.
        order: How the input is made.
        gathered_by_adapter: The attention-input adapter, not the boundary, moves the read's result to `rows`.
    """

    rows: Layout
    read_rows: Layout
    order: Order = Order.PLAIN
    gathered_by_adapter: bool = False


@dataclass(frozen=True)
class StageOutput:
    """What a stage's compute leaves, and what of it may be left to the next stage.

    Attributes:
        rows: The rows compute returns.
        sum: The group over which the result must be added, or None: it is complete.
        handoff_rows: The rows on which the completed contribution meets the next stage.
        residual_rows: The rows on which the residual lies when compute returns.
        leaves_sum: Whether attention's sum stays with the consumer.
        leaves_for_input: The FFN's all-reduce may be left to the next input.
        leaves_for_scatter: Its reduce-scatter, once selected, may be.
        leaves_for_finalize: A MoE may return a `HandoffOutput`.
        writes_residual: The exit applies the update itself and leaves a written stream.
    """

    rows: Layout
    sum: BoundSum | None
    handoff_rows: Layout
    residual_rows: Layout
    leaves_sum: Leaves = Leaves.NEVER
    leaves_for_input: bool = False
    leaves_for_scatter: bool = False
    leaves_for_finalize: bool = False
    writes_residual: bool = False

    @property
    def lands(self) -> Layout:
        """The rows on which completing the contribution leaves it."""
        return self.residual_rows if self.writes_residual else self.handoff_rows


@dataclass(frozen=True)
class StageDecl:
    """One stage under one topology and one batch variant."""

    kind: StageKind
    input: StageInput
    output: StageOutput


@dataclass(frozen=True)
class EdgeDecl:
    """A producer's output and its consumer's input.

    Attributes:
        output: The producer's; None where the stack starts.
        input: The consumer's.
        residual_from, residual_to: The rows the residual is on before and after the consumer's read.
        expects_sum: The attention-TP sum that the producer always leaves here, or None.
    """

    output: StageOutput | None
    input: StageInput
    residual_from: Layout
    residual_to: Layout
    expects_sum: BoundSum | None
