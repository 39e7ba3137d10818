"""What happened to a request when, for whoever wants to see it. Notes only."""

from collections.abc import Mapping

from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.request import Request


def note_arrival(request: Request) -> None:
    """QUEUED, at its arrival."""
    request.events.append(("QUEUED", request.arrival_time))


def note_plan(requests: Mapping[str, Request], plan: SchedulerOutput, now: float) -> None:
    """SCHEDULED for each admission, PREEMPTED for each preemption; `now` in seconds."""
    events = [("PREEMPTED", name) for name in plan.preempted_req_ids]
    events += [("SCHEDULED", data.req_id) for data in plan.scheduled_new_reqs]
    events += [("SCHEDULED", data.req_id) for data in plan.resumed_reqs]
    for event, name in events:
        if name in requests:
            requests[name].events.append((event, now))
