"""Each request's stages, as seconds since its arrival. Owns the clock that the scheduler lacks."""

import dataclasses
from collections.abc import Iterable

import msgspec

from engine_core.scheduler import SchedulerOutput
from protocol.outputs import EngineCoreOutputs, RequestTimings


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

    def planned(self, plan: SchedulerOutput, now_s: float) -> None:
        """Note who runs for the first time, and who was preempted."""
        if not (plan.scheduled_new_reqs or plan.preempted_req_ids):
            return
        for new in plan.scheduled_new_reqs:
            stages = self._stages.get(new.req_id)
            if stages is not None and stages.first_scheduled_s is None:
                stages.first_scheduled_s = now_s - stages.arrival_s
        # A request is preempted as a whole: its sequences count once.
        for request_id in {self._request_of(req_id) for req_id in plan.preempted_req_ids}:
            if request_id in self._stages:
                self._stages[request_id].num_preemptions += 1

    def stamp(self, per_client: Iterable[EngineCoreOutputs], now_s: float) -> None:
        """Note first tokens, and put the timings into each request's last output, in place. Reads
        what is rare only: the columns of `decoded` hold neither."""
        for outputs in per_client:
            last: dict[str, int] = {}
            for position, output in enumerate(outputs.other_outputs):
                stages = self._stages.get(output.request_id)
                if stages is None:
                    continue
                if output.new_token_ids and stages.first_token_s is None:
                    stages.first_token_s = now_s - stages.arrival_s
                if output.finished:
                    last[output.request_id] = position
            for request_id in outputs.finished_req_ids:
                stages = self._stages.pop(request_id, None)
                where = last.get(request_id)
                if stages is not None and where is not None:
                    outputs.other_outputs[where] = msgspec.structs.replace(
                        outputs.other_outputs[where], timings=_timings(stages, now_s)
                    )

    def _request_of(self, sequence_id: str) -> str:
        """ "ID" and "ID#1" are sequences of request "ID"."""
        if sequence_id in self._stages:
            return sequence_id
        return sequence_id.rpartition("#")[0]


def _timings(stages: _Stages, now_s: float) -> RequestTimings:
    return RequestTimings(
        first_scheduled_s=stages.first_scheduled_s,
        first_token_s=stages.first_token_s,
        finished_s=now_s - stages.arrival_s,
        num_preemptions=stages.num_preemptions,
    )
