"""Every unfinished request, in exactly one of two queues; rows; and the one way out."""

from collections import Counter
from collections.abc import Callable, Iterable

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler.batch_state import BatchState
from engine_core.scheduler.counters import Counters
from engine_core.scheduler.outputs import OutputCollector
from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.policies.base import SchedulingPolicy, WaitingQueue
from engine_core.scheduler.request import Request, RequestStatus, Sequence
from engine_core.scheduler.stop import StopTokens, stop_token_ids
from protocol.outputs import Logprobs


class RequestPool:
    """`running` is in order of admission; a dict, so that one in the middle leaves in O(1).
    `on_finish`: called with each request that is over, the detail, and `now`."""

    def __init__(
        self,
        kv_cache: KVCacheManager,
        policy: SchedulingPolicy,
        batch: BatchState,
        *,
        max_model_len: int,
        on_finish: Iterable[Callable[[Request, str | None, float], None]] = (),
    ) -> None:
        self.kv_cache = kv_cache
        self.policy = policy
        self._max_model_len = max_model_len
        self._on_finish = on_finish
        self.batch = batch
        self.sequences: list[Sequence | None] = [None] * batch.max_num_rows
        """Sequences by row; None: the row is free."""
        self.by_id: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.waiting: WaitingQueue = policy.waiting
        self.compiling: dict[str, Request] = {}
        """Requests that wait for their grammars: outside of the queue, in nobody's way."""
        self.outputs = OutputCollector(batch)
        self.counters = Counters()
        self.stop_tokens = StopTokens()
        self.num_reserved_rows = 0
        """Rows that the running requests have or will have."""
        self.num_queued_tokens = 0
        """Prompt and output tokens of the waiting requests."""
        self.num_queued_by_adapter: Counter[str] = Counter()
        """The waiting requests, by fingerprint."""
        self.num_by_tenant: Counter[str] = Counter()
        """Unfinished requests, by `Request.tenant_name`."""
        self.num_swapped = 0
        self.now = 0.0
        """Seconds, at the last call of the scheduler that says it."""
        self._served: Counter[int] = Counter()
        self._forked: dict[str, Sequence] = {}
        self._finished_req_ids: list[str] = []
        self.preempted_req_ids: list[str] = []
        """Sequences that lost their rows for a fault; the next plan tells the runner."""

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests, preempted ones included."""
        return len(self.waiting) + len(self.compiling)

    def find_sequence(self, sequence_id: str) -> Sequence | None:
        request = self.by_id.get(sequence_id)
        sequence = self._forked.get(sequence_id) if request is None else request.sequences[0]
        return None if sequence is None or sequence.status.is_finished else sequence

    def sequence_in(self, row: int) -> Sequence:
        """The sequence in a row that is in use."""
        sequence = self.sequences[row]
        assert sequence is not None
        return sequence

    def new_sequence(self, request: Request, index: int) -> Sequence:
        """One more sequence of a request, under an id that is free."""
        serial = 1
        while self.is_taken(f"{request.request_id}#{serial}"):
            serial += 1
        sequence = Sequence(request, index, serial)
        self._forked[sequence.sequence_id] = sequence
        return sequence

    def is_taken(self, name: str) -> bool:
        """Whether an unfinished request or sequence has this id, or one whose terminal output has
        not been handed out."""
        return name in self.by_id or name in self._forked or self.outputs.is_terminal_pending(name)

    # ------------------------------------------------------------------ in and out of the queue

    def add_waiting(self, request: Request) -> None:
        """Put the request at the tail of the waiting queue, at once or by `enter_queue`."""
        self.by_id[request.request_id] = request
        self.num_by_tenant[request.tenant_name] += 1
        request.tenant_number = self.policy.on_arrival(request)
        if request.grammar is None or request.grammar.is_ready:
            self.waiting.add_request(request)
        else:
            self.compiling[request.request_id] = request
        self._count_queued(request)

    def enter_queue(self, request: Request) -> None:
        """The request's grammar is there: it joins the waiting queue."""
        del self.compiling[request.request_id]
        self.waiting.add_request(request)

    @property
    def waits_in_groups(self) -> bool:
        """Whether a fault is being isolated: one group of its requests may start, no others."""
        return self.waiting is not self.policy.waiting

    def admit_head(self) -> Request:
        """The head of the waiting queue runs, as the newest. Its sequences get no rows by this."""
        request = self.waiting.pop_request()
        self._uncount_queued(request)
        self.running[request.request_id] = request
        self.num_reserved_rows += request.num_running_sequences
        request.status = RequestStatus.RUNNING
        self.policy.on_running(request)
        return request

    def requeue(self, request: Request, status: RequestStatus) -> None:
        """A running request waits again; its sequences have left their rows."""
        del self.running[request.request_id]
        self.num_reserved_rows -= request.num_running_sequences
        request.status = status
        self.waiting.prepend_request(request)
        self._count_queued(request)

    def _count_queued(self, request: Request) -> None:
        request.num_queued_tokens = sum(sequence.num_tokens for sequence in request.unfinished)
        self.num_queued_tokens += request.num_queued_tokens
        self.num_swapped += request.status is RequestStatus.SWAPPED
        if request.adapter is not None:
            self.num_queued_by_adapter[request.adapter] += 1

    def _uncount_queued(self, request: Request) -> None:
        self.num_queued_tokens -= request.num_queued_tokens
        self.num_swapped -= request.status is RequestStatus.SWAPPED
        if request.adapter is not None:
            self.num_queued_by_adapter[request.adapter] -= 1

    # ------------------------------------------------------------------ rows

    def assign_row(self, sequence: Sequence, row: int | None = None) -> None:
        """A free row, the last in order; or this one, whose sequence has just left it."""
        request, batch = sequence.request, self.batch
        if row is None:
            row = batch.allocate_row()
        else:
            batch.change_owner(row)
        self.sequences[row] = sequence
        sequence.enter_row(batch, row)
        batch.max_len[row] = min(request.max_len, self._max_model_len)
        batch.client_index[row] = request.client_index
        batch.tenant_number[row] = request.tenant_number
        batch.arrival_s[row] = request.arrival_time
        batch.fast_path[row] = False
        batch.is_constrained[row] = (
            request.grammar is not None or request.sampling_params.has_token_rules
        )
        batch.may_schedule_async[row] = request.num_sequences == 1 and request.beam_search is None
        params = request.sampling_params
        batch.may_run_ahead[row] = not (
            params.has_stop_strings or params.reports_logprobs or batch.is_constrained[row]
        )
        self.stop_tokens.add(stop_token_ids(request))

    def leave_row(self, sequence: Sequence) -> int:
        """Take a sequence out of its row. Returns the row, to be freed or assigned again."""
        row = sequence.leave_row()
        self.stop_tokens.remove(stop_token_ids(sequence.request))
        return row

    def free_row(self, sequence: Sequence) -> None:
        row = self.leave_row(sequence)
        self.sequences[row] = None
        self.batch.free_row(row)

    def allow_async(self, request: Request) -> None:
        """All of the request's samples exist, so each can be scheduled asynchronously."""
        if request.beam_search is None and not request.has_pending_forks:
            for sequence in request.unfinished:
                self.batch.may_schedule_async[sequence.row] = True

    def restore_order(self) -> None:
        """Each request's rows stand together, in order of admission."""
        self.batch.set_order(
            [
                sequence.row
                for request in self.running.values()
                for sequence in request.unfinished
                if sequence.row is not None
            ]
        )

    def drop_out_of_windows(self) -> None:
        """Free the blocks of running sequences that are out of their sliding windows."""
        batch, order = self.batch, self.batch.order
        for row in order[batch.num_computed_tokens[order] >= batch.next_drop[order]].tolist():
            batch.next_drop[row] = self.kv_cache.drop_out_of_windows(self.sequence_in(row))

    # ------------------------------------------------------------------ the way out

    def emit_output(
        self,
        sequence: Sequence,
        token_ids: list[int],
        logprobs: Logprobs | None = None,
    ) -> None:
        """Output for the client; if the sequence's status is final, it ends with this output, and
        its request with its last sequence."""
        self.counters.num_generated_tokens += len(token_ids)
        request = sequence.request
        self._served[request.tenant_number] += len(token_ids)
        if not sequence.status.is_finished:
            self.outputs.add(sequence, token_ids, logprobs)
            return
        is_over = request.num_running_sequences == 1
        self.outputs.add(sequence, token_ids, logprobs, is_over=is_over)
        self.end_sequence(sequence)

    def end_sequence(self, sequence: Sequence) -> None:
        """End a sequence whose status is final and whose terminal output has been added."""
        request = sequence.request
        is_over = request.num_running_sequences == 1
        if is_over:
            self._leave_queues(request)
            request.status = sequence.status
        elif request.request_id in self.running:
            self.num_reserved_rows -= 1
        else:
            self._uncount_queued(request)
            self._count_queued(request)
        sequence.drop_placeholders()
        self.drop_sequence(sequence)
        request.num_finished_sequences += 1
        if is_over:
            self._drop_request(request, None)

    def finish_request(
        self, request: Request, status: RequestStatus, detail: str | None = None
    ) -> None:
        """Out of everything at once, with an empty terminal output for each sequence that has not
        had one."""
        self._leave_queues(request)
        ending = request.unfinished
        num_missing = request.num_running_sequences - len(ending)
        indexes = set(range(request.num_sequences)) - {seq.index for seq in request.sequences}
        ending += [Sequence(request, index) for index in sorted(indexes)[:num_missing]]
        request.status = status
        for count, sequence in enumerate(ending, start=1):
            sequence.status = status
            self.outputs.add(sequence, [], detail=detail, is_over=count == len(ending))
        for sequence in request.sequences:
            if sequence in ending:
                self.drop_sequence(sequence)
        self._drop_request(request, detail)

    def finish_beams(self, request: Request, status: RequestStatus) -> None:
        """A beam search is over and its results are in the outputs: the request leaves."""
        self._leave_queues(request)
        self._served[request.tenant_number] += request.sequences[0].num_output_tokens
        beams = request.unfinished
        request.status = status
        for sequence in beams:
            self.drop_sequence(sequence)
        self._drop_request(request, None)

    def drop_sequence(self, sequence: Sequence) -> None:
        """Free the sequence's blocks and row."""
        self.kv_cache.free(sequence)
        if sequence.row is not None:
            self.free_row(sequence)
        self.drop_id(sequence)

    def drop_id(self, sequence: Sequence) -> None:
        """Drop the id of a sequence without blocks and row; the next plan tells the runner."""
        self._forked.pop(sequence.sequence_id, None)
        self._finished_req_ids.append(sequence.sequence_id)

    def _leave_queues(self, request: Request) -> None:
        if self.running.pop(request.request_id, None) is not None:
            self.num_reserved_rows -= request.num_running_sequences
        else:
            if request.request_id in self.compiling:
                self.enter_queue(request)  # a policy counts whom it has seen
            self.waiting.remove_request(request)
            self._uncount_queued(request)

    def _drop_request(self, request: Request, detail: str | None) -> None:
        del self.by_id[request.request_id]
        self.num_by_tenant[request.tenant_name] -= 1
        if not self.num_by_tenant[request.tenant_name]:
            del self.num_by_tenant[request.tenant_name]
        self.counters.num_finished[request.status.finish_reason.value] += 1
        self.policy.on_finish(request)
        for on_finish in self._on_finish:
            on_finish(request, detail, self.now)

    def drain_served(self) -> dict[int, int]:
        """Tokens emitted one by one since the last call, by tenant number."""
        served = self._served
        if served:
            self._served = Counter()
        return served

    def tell_again(self, plan: SchedulerOutput) -> None:
        """The plan failed: the runner may not know what it said of sequences that came and went."""
        self._finished_req_ids += plan.finished_req_ids
        self.preempted_req_ids += plan.preempted_req_ids
        for new in plan.scheduled_new_reqs:
            self._finished_req_ids.append(new.req_id)
            sequence = self.find_sequence(new.req_id)
            if sequence is not None:
                sequence.is_known_to_runner = False

    def drain_finished_req_ids(self) -> list[str]:
        """Sequences that left since the last call."""
        finished, self._finished_req_ids = self._finished_req_ids, []
        return finished

    def drain_preempted_req_ids(self) -> list[str]:
        """Sequences that lost their rows for a fault since the last call."""
        preempted, self.preempted_req_ids = self.preempted_req_ids, []
        return preempted
