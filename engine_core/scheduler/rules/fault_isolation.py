"""A step failed: which of its requests is it? They run again in halves, each apart from all other
requests, until each has passed the point of the fault or has failed alone."""

from collections.abc import Iterator

from engine_core.scheduler.aborts import Aborts
from engine_core.scheduler.errors import DeviceFault
from engine_core.scheduler.in_flight import InFlightStep, InFlightSteps
from engine_core.scheduler.outputs import NO_CLIENT
from engine_core.scheduler.part import SchedulerPart
from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.policies.base import WaitingQueue
from engine_core.scheduler.policies.fcfs import FirstComeFirstServedQueue
from engine_core.scheduler.preemption import Preemptor
from engine_core.scheduler.report.explanations import Explanations
from engine_core.scheduler.request import Request, RequestStatus, Sequence
from engine_core.scheduler.request_pool import RequestPool
from protocol.explanations import PreemptionCause, WaitReason
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

_MAX_PROBES = 2


class _GroupQueue:
    """Only the group's requests can be admitted; all others wait behind them. False if none of the
    group waits."""

    def __init__(self, others: WaitingQueue, group: list[Request]) -> None:
        self._others = others
        self._group = frozenset(group)
        self._waiting = FirstComeFirstServedQueue()
        for request in group:
            others.remove_request(request)
            self._waiting.add_request(request)

    def __bool__(self) -> bool:
        return len(self._waiting) > 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._others)

    def __iter__(self) -> Iterator[Request]:
        yield from self._waiting
        yield from self._others

    def add_request(self, request: Request) -> None:
        self._others.add_request(request)

    def prepend_request(self, request: Request) -> None:
        self._waiting.prepend_request(request)

    def peek_request(self) -> Request:
        return self._waiting.peek_request()

    def pop_request(self) -> Request:
        return self._waiting.pop_request()

    def remove_request(self, request: Request) -> None:
        (self._waiting if request in self._group else self._others).remove_request(request)

    def dissolve(self) -> None:
        """The group's requests wait among the others again."""
        for request in reversed(list(self._waiting)):
            self._others.prepend_request(request)


class FaultIsolation(SchedulerPart):
    """
        a b c d: fails    [a b]: passes    [c d]: fails    [c]: passes    [d]: fails, so it is d

    A group has passed when each of its requests has computed in good steps what the failed step
    was to compute. A request that fails alone may still be innocent, if the device is broken: a
    probe, a request of one token of our own, tells. If it passes, the request ends with the
    fault's text; if it fails, there is no point in going on. A fault that does not come again
    ends no request. A bisection takes at most 2 * log2(n) + 3 groups for each culprit among n."""

    def __init__(
        self,
        pool: RequestPool,
        preemptor: Preemptor,
        in_flight: InFlightSteps,
        aborts: Aborts,
        explanations: Explanations,
    ) -> None:
        self._pool = pool
        self._preemptor = preemptor
        self._in_flight = in_flight
        self._aborts = aborts
        self._explanations = explanations
        self._groups: list[list[Request]] = []
        """Groups of requests that are yet to pass; the last one is next, or runs."""
        self._queue: _GroupQueue | None = None
        """The waiting queue while a group runs; else None."""
        self._suspects: set[Request] = set()
        """Requests that were in a failed step since the bisection began."""
        self._marks: dict[Sequence, int] = {}
        """By sequence, how many tokens were to be computed by the end of the failed steps."""
        self._failed_alone: tuple[Request, str] | None = None
        self._probe: Request | None = None
        self._num_probes_failed = 0

    @property
    def is_active(self) -> bool:
        return bool(self._groups)

    def on_discard(self, steps: list[InFlightStep], detail: str) -> None:
        """The first of these steps, all that are in flight, failed: none has a result, and all that
        run wait again.
        Raises DeviceFault: it held no request but our own, and so did the one before it."""
        pool = self._pool
        self._begin(steps[0].plan, detail)
        # Blocks may be wrong that no step was to compute: which copies were made is not known, and
        # blocks that the first step was to fill may have been freed, found and copied by others.
        is_unclear = len(steps) > 1 or not steps[0].plan.copies.is_empty
        requests: dict[str, Request] = {}
        for step in steps:
            step.is_discarded = True
            pool.tell_again(step.plan)
            # those that the step computes or that came back with it
            for name in (
                *step.plan.batch.req_ids,
                *(each.req_id for each in step.plan.resumed_reqs),
            ):
                sequence = pool.find_sequence(name)
                if sequence is not None and sequence.row is not None:
                    requests[sequence.request.request_id] = sequence.request
        for request in requests.values():
            self._aborts.drop_uncomputed(request, everything=is_unclear)
        self._close_group()
        self._preemptor.recompute_running(steps[0].plan.step_id, detail)
        if is_unclear:
            pool.kv_cache.evict_cached()

    def holds_up(self, plan: PlanBuilder) -> bool:
        """Whether a failed step's requests run in groups, and one of these is in flight: one step
        at a time, so that it is clear which of them fails."""
        is_in_flight = bool(self._in_flight.steps)
        if self.is_active and not is_in_flight:
            self._advance(plan)
        if not self.is_active:
            return False
        why = "a step failed; its requests run in groups until the one that makes it fail is found"
        self._explanations.stopped_at(None, WaitReason.ALONE, why)
        return is_in_flight

    # ------------------------------------------------------------------ groups

    def _begin(self, plan: SchedulerOutput, detail: str) -> None:
        """The step of this plan failed; nothing has been dropped for it yet."""
        group = self._groups.pop() if self._groups else []
        members = self._note_marks(plan)
        # one that was aborted meanwhile may have been the culprit
        has_others = any(self._pool.find_sequence(name) is None for name in plan.batch.req_ids)
        rest = [
            request
            for request in group
            if request not in members and request is not self._probe and self._is_pending(request)
        ]
        if rest:
            self._groups.append(rest)
        if not members or members == [self._probe]:
            self._num_probes_failed += self._probe is not None
            if self._num_probes_failed >= _MAX_PROBES:
                raise DeviceFault(f"steps fail whatever they hold; the last one: {detail}")
            self._groups.append([self._probe or self._make_probe()])
        elif len(members) == 1 and members[0] in self._suspects and not has_others:
            self._failed_alone = members[0], detail
            self._groups.append([self._make_probe()])
        else:
            self._suspects.update(members)
            half = (len(members) + 1) // 2
            self._groups += [part for part in (members[half:], members[:half]) if part]

    def _close_group(self) -> None:
        """All wait together; none that is waiting is swapped."""
        if self._queue is not None:
            self._queue.dissolve()
            self._queue = None
            self._pool.waiting = self._pool.policy.waiting
        self._preemptor.recompute_swapped()

    def _advance(self, plan: PlanBuilder) -> None:
        """Go on to the next group between two steps, if the one that runs has passed."""
        if self._queue is not None:
            if any(map(self._is_pending, self._groups[-1])):
                return
            self._groups.pop()
            self._end_culprit()
            self._drop_ended()
            self._close_group()
            why = "it passed, and others of a step that failed are tried without it"
            if self._groups:
                self._preemptor.recompute_all(plan, PreemptionCause.FAULT, why)
        self._drop_ended()
        if self._groups:
            self._queue = _GroupQueue(self._pool.policy.waiting, self._groups[-1])
            self._pool.waiting = self._queue
        else:
            self._suspects.clear()
            self._marks.clear()

    # ------------------------------------------------------------------ its parts

    def _note_marks(self, plan: SchedulerOutput) -> list[Request]:
        """The requests of the step, also those that have given way since."""
        batch = plan.batch
        members: dict[Request, None] = {}
        ends = (batch.num_computed_tokens + batch.num_scheduled_tokens).tolist()
        for name, end in zip(batch.req_ids, ends, strict=True):
            sequence = self._pool.find_sequence(name)
            if sequence is not None:
                end -= len(plan.scheduled_spec_decode_tokens.get(name, ()))
                self._marks[sequence] = max(end, self._marks.get(sequence, 0))
                members[sequence.request] = None
        return list(members)

    def _is_pending(self, request: Request) -> bool:
        return not request.is_finished and any(
            sequence.num_computed_tokens < self._marks.get(sequence, 1)
            for sequence in request.unfinished
        )

    def _end_culprit(self) -> None:
        """Once the probe is over, end the request that failed alone, with the fault's text."""
        if self._probe is None or not self._probe.is_finished:
            return
        self._probe, self._num_probes_failed = None, 0
        if self._failed_alone is not None:
            (request, detail), self._failed_alone = self._failed_alone, None
            if not request.is_finished:
                self._pool.finish_request(request, RequestStatus.FINISHED_ERROR, detail)

    def _drop_ended(self) -> None:
        """Requests that were aborted or timed out meanwhile."""
        groups = [[each for each in group if not each.is_finished] for group in self._groups]
        self._groups = [group for group in groups if group]

    def _make_probe(self) -> Request:
        name = "probe"
        while self._pool.is_taken(name):
            name += "'"
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        probe = EngineRequest(request_id=name, prompt_token_ids=[0], sampling_params=params)
        self._probe = Request(probe, client_index=NO_CLIENT)
        self._pool.add_waiting(self._probe)
        return self._probe
