"""Each request's stages, as seconds since its arrival. Owns the clock that the scheduler lacks."""

import dataclasses
import time
from collections.abc import Iterable

import msgspec

from engine_core.scheduler import SchedulerOutput
from protocol.outputs import EngineCoreOutput, EngineCoreOutputs, RequestTimings


@dataclasses.dataclass(slots=True)
class _Stages:
    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    num_preemptions: int = 0


class RequestClock:
    """Follows requests from arrival to their terminal output."""

    def __init__(self) -> None:
        self._stages: dict[str, _Stages] = {}

    def arrived(self, request_id: str, arrival_s: float) -> None:
        """A request was accepted; `arrival_s` in seconds of the monotonic clock."""
        self._stages[request_id] = _Stages(arrival_s)

    def planned(self, plan: SchedulerOutput) -> None:
        """Note who runs for the first time, and who was preempted."""
        if not (plan.scheduled_new_reqs or plan.preempted_req_ids):
            return
        now_s = time.monotonic()
        for new in plan.scheduled_new_reqs:
            stages = self._stages.get(new.req_id)
            if stages is not None and stages.first_scheduled_s is None:
                stages.first_scheduled_s = now_s - stages.arrival_s
        for request_id in plan.preempted_req_ids:
            if request_id in self._stages:
                self._stages[request_id].num_preemptions += 1

    def stamp(self, per_client: Iterable[EngineCoreOutputs]) -> None:
        """Put the timings into terminal outputs, in place of the outputs in each list."""
        now_s = time.monotonic()
        for outputs in per_client:
            for position, output in enumerate(outputs.outputs):
                stages = self._stages.get(output.request_id)
                if stages is None:
                    continue
                if output.new_token_ids and stages.first_token_s is None:
                    stages.first_token_s = now_s - stages.arrival_s
                if output.finished:
                    outputs.outputs[position] = self._stamped(output, stages, now_s)

    def _stamped(self, output: EngineCoreOutput, stages: _Stages, now_s: float) -> EngineCoreOutput:
        del self._stages[output.request_id]
        timings = RequestTimings(
            first_scheduled_s=stages.first_scheduled_s,
            first_token_s=stages.first_token_s,
            finished_s=now_s - stages.arrival_s,
            num_preemptions=stages.num_preemptions,
        )
        return msgspec.structs.replace(output, timings=timings)
