"""Every name of nnsight's that this project leans on, in one place.

nnsight supplies the trace front end: it captures a `with` block, runs it as a greenlet in step with the model's
forward, and serves the values it asks for. We subclass four of its classes and use a few of its functions; an
upgrade of nnsight is reviewed here and in this module's contract test, nowhere else.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import nnsight
from greenlet import getcurrent
from nnsight import save
from nnsight.intervention import serialization, source
from nnsight.intervention.batching import Batcher, SkipParts
from nnsight.intervention.cache import Cache, CacheView, Entry
from nnsight.intervention.envoy import Envoy, traceable
from nnsight.intervention.eproperty import eproperty
from nnsight.intervention.fragments import Fragments
from nnsight.intervention.interleaver import (
    EarlyStopException,
    Event,
    Interleaver,
    Mediator,
    OutOfOrderError,
    Pending,
)
from nnsight.intervention.serialization import (
    CustomCloudPickler,
    CustomCloudUnpickler,
    reduce_block,
)
from nnsight.intervention.source import (
    BODY_FORWARD,
    NO_SKIP,
    STATE,
    Controller,
    Source,
    SourceEnvoy,
    SourceNotAvailable,
    install_controller,
    install_source,
    instrument,
    make_op,
)
from nnsight.intervention.tracer import InterleavingTracer
from nnsight.modeling.mixins.meta import Meta, MetaDevice
from nnsight.modeling.transformers import Generator, GeneratorEnvoy, TransformersModel
from nnsight.tracing.backend import Backend
from nnsight.tracing.globals import SOURCES
from nnsight.tracing.tracer import (
    Tracer,
    WithBlockNotFoundError,
    dec,
    inc,
    mark,
    push_result,
    skippable,
)
from nnsight.tracing.tracer import (
    _saves as saves,
)
from nnsight.tracing.util import SerializedFrame, clean_traceback, filter_traceback
from nnsight.util import apply
from torch._guards import detect_fake_mode

P = ParamSpec("P")
R = TypeVar("R")


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, while no other thread is in one of these. A thread that is inside may enter again."""

    @functools.wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> R:
        with _parsing:
            return function(*args, **kwargs)

    return entered


def _renew() -> None:
    global _parsing
    _parsing = threading.RLock()


_renew()
# A process that is forked has none of the threads that may be inside.
os.register_at_fork(after_in_child=_renew)

# CPython counts the depth of a syntax tree in one counter per interpreter, and may switch threads while it builds the
# tree (a collection runs a finalizer): of two threads that opened a trace, or called `backward`, at the same instant,
# one got `SystemError: AST constructor recursion depth mismatch`.
for owner, parser in (
    (Tracer, "parse"),
    (source, "source_tree"),
    (serialization, "_referenced_names"),
    (serialization, "_lambda_source"),
):
    setattr(owner, parser, one_at_a_time(getattr(owner, parser)))

__all__ = [
    "BODY_FORWARD",
    "NO_SKIP",
    "SOURCES",
    "STATE",
    "Backend",
    "Batcher",
    "Cache",
    "CacheView",
    "Controller",
    "CustomCloudPickler",
    "CustomCloudUnpickler",
    "EarlyStopException",
    "Entry",
    "Envoy",
    "Event",
    "Fragments",
    "Generator",
    "GeneratorEnvoy",
    "Interleaver",
    "InterleavingTracer",
    "Mediator",
    "Meta",
    "MetaDevice",
    "OutOfOrderError",
    "Pending",
    "SerializedFrame",
    "SkipParts",
    "Source",
    "SourceEnvoy",
    "SourceNotAvailable",
    "Tracer",
    "TransformersModel",
    "WithBlockNotFoundError",
    "apply",
    "clean_traceback",
    "dec",
    "detect_fake_mode",
    "eproperty",
    "filter_traceback",
    "getcurrent",
    "inc",
    "install_controller",
    "install_source",
    "instrument",
    "make_op",
    "mark",
    "nnsight",
    "push_result",
    "reduce_block",
    "save",
    "saves",
    "skippable",
    "traceable",
]
