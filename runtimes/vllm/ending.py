"""Requests that end because their block did.

vLLM ends a request by the tokens it sampled, or when a client gives it up, and then says nothing. So the runner tells
the scheduler, beside the tokens of a step, which requests' blocks have raised or stopped, and the scheduler - vLLM's
own, with this mixed over it - ends them as those that met a stop token, with their outputs.
"""

# vLLM's classes meet ours here at run time, and their declared types do not say so.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

#: On a step's output: the requests that are to end.
ENDED = "interleave_ended"
#: In what the client wants of the workers: the scheduler class that it was told to use, by its name.
SCHEDULER = "scheduler"


def ending(output: Any, ended: list[str]) -> Any:
    """A step's output, with the requests that are to end."""
    if ended and isinstance(output, AsyncModelRunnerOutput):
        return Later(output, ended)
    if ended and isinstance(output, ModelRunnerOutput):
        setattr(output, ENDED, ended)
    return output


class Later(AsyncModelRunnerOutput):
    """The same for an output that has yet to come from the device."""

    def __init__(self, output: AsyncModelRunnerOutput, ended: list[str]) -> None:
        self.output, self.ended = output, ended

    def get_output(self) -> ModelRunnerOutput:
        return ending(self.output.get_output(), self.ended)


class Ending:
    """Mixed over a scheduler class by `scheduler`."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.end(getattr(model_runner_output, ENDED, ()), outputs)
        return outputs

    def end(self, ended: Iterable[str], outputs: dict[int, EngineCoreOutputs]) -> None:
        """End requests, those that have not ended by themselves, and say so in their outputs of this step."""
        for request in self.finish_requests(ended, RequestStatus.FINISHED_STOPPED):
            told = outputs.setdefault(request.client_index, EngineCoreOutputs(outputs=[]))
            output = next((one for one in told.outputs if one.request_id == request.request_id), None)
            if output is None:  # it has no token yet
                output = EngineCoreOutput(request.request_id, [])
                told.outputs.append(output)
            output.finish_reason = request.get_finished_reason()


def scheduler(*, vllm_config: Any, **arguments: Any) -> Any:
    """What vLLM is told to make its scheduler with: its own class, or the user's, that also ends requests."""
    wanted = vllm_config.additional_config["interleave"].get(SCHEDULER)
    if wanted is not None:
        own = resolve_obj_by_qualname(wanted)
    else:
        own = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type(f"Interleaving{own.__name__}", (Ending, own), {})(vllm_config=vllm_config, **arguments)


def use(options: dict[str, Any]) -> None:
    """Put the scheduler into an engine's arguments."""
    wanted = options.get("scheduler_cls")
    if isinstance(wanted, type):
        wanted = f"{wanted.__module__}.{wanted.__qualname__}"
    options["additional_config"]["interleave"][SCHEDULER] = wanted
    options["scheduler_cls"] = f"{__name__}.{scheduler.__name__}"


__all__ = ["ENDED", "ending", "scheduler", "use"]
