"""Why each request is where it is. A step notes one reason: why admission stopped, and at which
request; all behind it wait for it."""

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from engine_core.scheduler.part import SchedulerPart
from engine_core.scheduler.request import Request, RequestStatus
from engine_core.scheduler.request_pool import RequestPool
from protocol.calls import MAX_LISTED_REQUESTS, RequestInfos
from protocol.explanations import RequestInfo, WaitReason

_Reason = tuple[WaitReason, str]


_NUM_REMEMBERED = 1024
"""Finished requests whose answers are kept."""


class Explanations(SchedulerPart):
    """Notes of the step at hand, and answers from them."""

    def __init__(self, pool: RequestPool) -> None:
        self._pool = pool
        self._finished: OrderedDict[str, RequestInfo] = OrderedDict()
        self._stopped_at: str | None = None
        self._stop: _Reason | None = None
        self._skipped: dict[str, _Reason] = {}
        self._step_id = 0

    # ------------------------------------------------------------------ notes of a step

    def begin_step(self, step_id: int, now: float) -> None:
        """Drop what the last step noted."""
        self._step_id = step_id
        self._stopped_at = None
        self._stop = None
        if self._skipped:
            self._skipped = {}

    def stopped_at(self, request: Request | None, reason: WaitReason, why: str) -> None:
        """Admission stopped at this request, or did not begin."""
        self._stopped_at = None if request is None else request.request_id
        self._stop = (reason, why)

    def skipped(self, request: Request, reason: WaitReason, why: str) -> None:
        """Others may pass this request."""
        self._skipped[request.request_id] = (reason, why)

    def on_finish(self, request: Request, detail: str | None, now: float) -> None:
        self._finished.pop(request.request_id, None)
        if len(self._finished) >= _NUM_REMEMBERED:
            self._finished.popitem(last=False)
        reason = request.status.finish_reason.value
        self._finished[request.request_id] = _info(
            request, "finished", why=detail, finish_reason=reason
        )

    # ------------------------------------------------------------------ answers

    def explain(self, request_id: str) -> RequestInfo | None:
        """See `Scheduler.explain`."""
        request = self._pool.by_id.get(request_id)
        if request is None:
            return self._finished.get(request_id)
        num_ahead = None
        if request.status is not RequestStatus.RUNNING:
            waiting = enumerate(self._pool.waiting)
            num_ahead = next((count for count, other in waiting if other is request), 0)
        return self._of_unfinished(request, num_ahead)

    def explain_all(self, tenant: str | None) -> RequestInfos:
        """The first MAX_LISTED_REQUESTS of `tenant` and its users, or of all."""
        pool = self._pool
        num_asked = len(pool.by_id) if tenant is None else pool.num_by_tenant[tenant]
        waiting = itertools.chain(pool.waiting, pool.compiling.values())
        in_order: Iterator[tuple[Request, int | None]] = itertools.chain(
            ((request, None) for request in pool.running.values()),
            ((request, num_ahead) for num_ahead, request in enumerate(waiting)),
        )
        asked = (each for each in in_order if tenant in (None, each[0].tenant_name))
        infos = [
            self._of_unfinished(request, num_ahead)
            for request, num_ahead in itertools.islice(asked, min(num_asked, MAX_LISTED_REQUESTS))
        ]
        return RequestInfos(requests=infos, num_unfinished=num_asked)

    def why_first_waits(self) -> str | None:
        """Why the waiting queue's head is not admitted; None if nothing waits."""
        first = next(iter(self._pool.waiting), None)
        return None if first is None else self._of_unfinished(first, 0).why

    def _of_unfinished(self, request: Request, num_ahead: int | None) -> RequestInfo:
        """`num_ahead`: requests before it in the waiting queue; None if it runs."""
        status = request.status.name.lower()
        age_s = max(0.0, self._pool.now - request.arrival_time)
        if num_ahead is not None:
            reason, why = self._why(request, num_ahead)
        elif self._stop is not None and self._stop[0] is WaitReason.PAUSED:
            reason, why = self._stop
        elif request.request_id in self._skipped:
            reason, why = self._skipped[request.request_id]
        else:
            return _info(request, status, age_s=age_s)
        return _info(
            request, status, age_s=age_s, waits_for=reason, why=why, num_requests_ahead=num_ahead
        )

    def _why(self, request: Request, num_ahead: int) -> _Reason:
        if request.grammar is not None and not request.grammar.is_ready:
            return WaitReason.GRAMMAR, "its structured output is being compiled"
        if request.request_id in self._skipped:
            return self._skipped[request.request_id]
        if request.first_step_id > self._step_id or self._stop is None:
            return WaitReason.NOT_CONSIDERED, "no step has been planned since it came"
        if self._stopped_at == request.request_id or not num_ahead:
            return self._stop
        ahead = "1 request is" if num_ahead == 1 else f"{num_ahead} requests are"
        ahead += " in front of it"
        if self._stopped_at is None:
            return WaitReason.QUEUE, f"{ahead}; no request is admitted: {self._stop[1]}"
        return WaitReason.QUEUE, (
            f"{ahead}; {self._stopped_at!r} waits for {self._stop[0].value}: {self._stop[1]}"
        )


def _info(request: Request, status: str, **details: Any) -> RequestInfo:
    account = request.account
    return RequestInfo(
        request_id=request.request_id,
        status=status,
        priority=request.message.priority,
        tenant=request.message.tenant,
        num_sequences=request.num_sequences,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=sum(sequence.num_output_tokens for sequence in request.sequences),
        max_tokens=request.sampling_params.max_tokens,
        num_computed_tokens=request.num_computed_tokens,
        cache_lookup=account.cache_lookup,
        preemptions=list(account.preemptions),
        num_draft_tokens=account.num_draft_tokens,
        num_accepted_tokens=account.num_accepted_tokens,
        num_embedded_tokens=sum(rows.stop - rows.start for rows in request.content.embeds),
        **details,
    )
