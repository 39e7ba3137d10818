"""What a trace keeps of log-probabilities: those of beams, by which the scheduler chooses."""

import msgspec
import numpy as np

from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.request import request_of
from engine_core.scheduler.runner_output import ModelRunnerOutput
from protocol.outputs import Logprobs
from protocol.requests import EngineRequest


class TraceLogprobs(msgspec.Struct, frozen=True):
    width: int
    token_ids: list[int]
    logprobs: bytes
    """float32, little-endian; base64 in the file."""
    ranks: list[int]

    @classmethod
    def of(cls, columns: Logprobs) -> "TraceLogprobs":
        return cls(
            width=columns.width,
            token_ids=np.frombuffer(columns.token_ids, "<i4").tolist(),
            logprobs=columns.logprobs,
            ranks=columns.ranks,
        )

    def columns(self) -> Logprobs:
        """The log-probabilities as the model runner gave them."""
        return Logprobs(
            num_positions=len(self.ranks),
            width=self.width,
            token_ids=np.array(self.token_ids, "<i4").tobytes(),
            logprobs=self.logprobs,
            ranks=self.ranks,
        )


class TracedBeams:
    """Names of the beams that live, by request: they change as a search goes on; a search is over
    when none is left."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}

    def on_arrival(self, message: EngineRequest) -> None:
        if message.beam_search is not None:
            self._names[message.request_id] = {message.request_id}

    def logprobs_of(
        self, plan: SchedulerOutput, output: ModelRunnerOutput
    ) -> dict[str, TraceLogprobs]:
        """Those of a step's beams, once each step."""
        if not self._names:
            return {}
        ended = {request_of(name) for name in plan.finished_req_ids} & self._names.keys()
        for request_id in ended:
            self._names[request_id].difference_update(plan.finished_req_ids)
        for new in plan.scheduled_new_reqs:
            if (names := self._names.get(request_of(new.req_id))) is not None:
                names.add(new.req_id)
        for request_id in ended:
            if not self._names[request_id]:
                del self._names[request_id]
        return {
            req_id: TraceLogprobs.of(columns)
            for req_id, columns in (output.logprobs or {}).items()
            if req_id in self._names.get(request_of(req_id), ())
        }
