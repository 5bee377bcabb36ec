"""Every name of nnsight's vLLM part that this package leans on. Importing it needs vLLM."""

from __future__ import annotations

from nnsight.intervention.errors import capture_exception
from nnsight.intervention.interleaver import dangling_unwind
from nnsight.modeling.vllm.async_backend import AsyncVLLMBackend
from nnsight.modeling.vllm.engines.engine import NNsightLLMEngine, acollect, attach
from nnsight.modeling.vllm.interleaver import VLLMInterleaver
from nnsight.modeling.vllm.interleaver import _capture as capture
from nnsight.modeling.vllm.interleaver import _weak as weak
from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner, Request, Requests
from nnsight.modeling.vllm.registration import RegisteringTracer, Registration
from nnsight.modeling.vllm.tracer import VLLMTracer
from nnsight.modeling.vllm.vllm import VLLM
from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker

__all__ = [
    "VLLM",
    "AsyncVLLMBackend",
    "NNsightGPUModelRunner",
    "NNsightGPUWorker",
    "NNsightLLMEngine",
    "RegisteringTracer",
    "Registration",
    "Request",
    "Requests",
    "VLLMInterleaver",
    "VLLMTracer",
    "acollect",
    "attach",
    "capture",
    "capture_exception",
    "dangling_unwind",
    "weak",
]
