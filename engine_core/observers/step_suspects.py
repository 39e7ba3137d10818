"""Whose requests are in the steps in flight, for the supervisor, should the engine die."""

import hashlib
from array import array
from collections.abc import Mapping

import msgspec

from engine_core.errors import RequestRefused
from engine_core.observers.base import EnginePart, FinishedStep
from engine_core.process.suspects import Suspects
from engine_core.scheduler import Request, SchedulerOutput
from engine_core.scheduler.request import request_of
from protocol.errors import ErrorCode
from protocol.outputs import EngineCoreOutputs
from protocol.requests import EngineRequest


class StepSuspects(EnginePart):
    """Notes whose requests are in the steps in flight; one that may have killed the engine before
    runs alone."""

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects
        self._fingerprints: dict[str, int] = {}
        self._last: tuple[list[str], list[int]] = [], []
        """The sequences of a plan, and the fingerprints of their requests: mostly those of the next
        plan too, which has the same list then."""

    def on_arrival(self, message: EngineRequest, client_index: int, now_s: float) -> None:
        self._fingerprints[message.request_id] = fingerprint(message)

    def on_plan(self, plan: SchedulerOutput, now_s: float) -> None:
        names = plan.batch.req_ids
        if names is not self._last[0]:
            found = {self._fingerprints.get(request_of(name)) for name in names}
            self._last = names, [each for each in found if each is not None]
        self._suspects.begin_step(plan.step_id, self._last[1])

    def on_outputs(self, outputs: Mapping[int, EngineCoreOutputs], now_s: float) -> None:
        for per_client in outputs.values():
            for request_id in per_client.finished_req_ids:
                self._fingerprints.pop(request_id, None)

    def on_step(self, step: FinishedStep) -> None:
        self._suspects.end_step(step.plan.step_id)

    def admit(self, message: EngineRequest, request: Request) -> None:
        """Raises RequestRefused: it has killed the engine alone."""
        known_as = fingerprint(message)
        if known_as in self._suspects.refused:
            raise RequestRefused(
                ErrorCode.KILLED_ENGINE,
                "the engine died in each step that held this request, at last in one that held no "
                "other; change the request, and report its prompt and parameters with the engine's "
                "log",
            )
        request.runs_alone = self._suspects.is_suspect(known_as)


def fingerprint(message: EngineRequest) -> int:
    """Of what a request asks for; the same when it is resumed, or sent again with another seed."""
    params = msgspec.structs.replace(message.sampling_params, seed=None)
    digest = hashlib.blake2b(array("q", message.prompt_token_ids).tobytes(), digest_size=8)
    digest.update(msgspec.msgpack.encode((params, message.beam_search, message.adapter)))
    return int.from_bytes(digest.digest(), "little")
