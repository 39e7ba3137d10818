"""Every unfinished request, in exactly one of two queues, and the one way out.

Owns membership, rows, and that each request leaves with its blocks given back and one terminal
event. Must not know budgets, or why a request moves.
"""

from collections import Counter
from collections.abc import Callable

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler.batch_state import BatchState
from engine_core.scheduler.outputs import OutputCollector
from engine_core.scheduler.policies.base import SchedulingPolicy
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_status import RequestStatus
from engine_core.scheduler.sequence import Sequence
from engine_core.scheduler.statistics import Counters
from engine_core.scheduler.stop import stop_token_ids
from engine_core.scheduler.stop_tokens import StopTokens
from protocol.outputs import Logprobs


class RequestPool:
    """`running` is in order of admission; a dict, so that one in the middle leaves in O(1).

    Args:
        on_leave: told of each request that is over, before it is forgotten.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        policy: SchedulingPolicy,
        rows: BatchState,
        *,
        max_model_len: int,
        on_leave: Callable[[Request, str | None], None],
    ) -> None:
        self._kv_cache = kv_cache
        self._policy = policy
        self._max_model_len = max_model_len
        self._on_leave = on_leave
        self.rows = rows
        self.by_id: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.waiting = policy.waiting
        self.outputs = OutputCollector(rows)
        self.counters = Counters()
        self.stop_tokens = StopTokens()
        self.num_reserved_rows = 0
        """Rows that the running requests have or will have."""
        self.num_queued_tokens = 0
        """Prompt and output tokens of the waiting requests."""
        self.num_swapped = 0
        self._served: Counter[int] = Counter()
        self._branches: dict[str, Sequence] = {}
        self._finished_req_ids: list[str] = []

    def find_sequence(self, name: str) -> Sequence | None:
        request = self.by_id.get(name)
        sequence = self._branches.get(name) if request is None else request.sequences[0]
        return None if sequence is None or sequence.status.is_finished else sequence

    def new_branch(self, request: Request, index: int) -> Sequence:
        """One more sequence of a live request, under a name that nobody has."""
        serial = 1
        while self.is_taken(f"{request.request_id}#{serial}"):
            serial += 1
        branch = Sequence(request, index, serial)
        self._branches[branch.sequence_id] = branch
        return branch

    def is_taken(self, name: str) -> bool:
        """Whether a live request or sequence has this name, or one that clients have not been told
        the end of."""
        return (
            name in self.by_id or name in self._branches or self.outputs.is_terminal_pending(name)
        )

    # ------------------------------------------------------------------ in and out of the queue

    def add(self, request: Request) -> None:
        """To the tail of the waiting queue."""
        self.by_id[request.request_id] = request
        request.tenant_number = self._policy.joined(request)
        self.waiting.add_request(request)
        self._joined_queue(request)

    def admit_head(self) -> Request:
        """The head of the waiting queue runs, as the newest. Its sequences get no rows by this."""
        request = self.waiting.pop_request()
        self._left_queue(request)
        self.running[request.request_id] = request
        self.num_reserved_rows += request.get_max_num_running_seqs()
        request.status = RequestStatus.RUNNING
        return request

    def back_to_queue(self, request: Request, status: RequestStatus) -> None:
        """A running request waits again; its sequences have left their rows."""
        del self.running[request.request_id]
        self.num_reserved_rows -= request.get_max_num_running_seqs()
        request.status = status
        self.waiting.prepend_request(request)
        self._joined_queue(request)

    def _joined_queue(self, request: Request) -> None:
        request.num_queued_tokens = sum(sequence.num_tokens for sequence in request.unfinished)
        self.num_queued_tokens += request.num_queued_tokens
        self.num_swapped += request.status is RequestStatus.SWAPPED

    def _left_queue(self, request: Request) -> None:
        self.num_queued_tokens -= request.num_queued_tokens
        self.num_swapped -= request.status is RequestStatus.SWAPPED

    # ------------------------------------------------------------------ rows

    def place(self, sequence: Sequence) -> None:
        """Give a sequence a row, the last in order."""
        self._enter(sequence, self.rows.take(sequence))

    def place_instead(self, sequence: Sequence, row: int) -> None:
        """The row of a sequence that has just left it goes to another of the same request."""
        self.rows.replace(row, sequence)
        self._enter(sequence, row)

    def _enter(self, sequence: Sequence, row: int) -> None:
        request, rows = sequence.request, self.rows
        sequence.enter_row(rows, row)
        limit = request.num_prompt_tokens + request.max_tokens
        rows.stop_length[row] = min(limit, self._max_model_len)
        rows.client[row] = request.client_index
        rows.tenant[row] = request.tenant_number
        rows.arrival_s[row] = request.arrival_time
        rows.first_token_s[row] = sequence.first_token_s
        rows.is_plain[row] = False
        rows.may_schedule_async[row] = request.num_sequences == 1 and request.beam_search is None
        self.stop_tokens.add(stop_token_ids(request))

    def allow_async(self, request: Request) -> None:
        """All of the request's sequences are there: samples need nobody's result but their own."""
        if request.beam_search is None and not request.has_branches_due:
            for sequence in request.unfinished:
                self.rows.may_schedule_async[sequence.row] = True

    def unplace(self, sequence: Sequence) -> int:
        """Take a sequence out of its row. Returns the row, which is to be given back or handed
        on."""
        sequence.first_token_s = float(self.rows.first_token_s[sequence.row])
        row = sequence.leave_row()
        self.stop_tokens.remove(stop_token_ids(sequence.request))
        return row

    def restore_order(self) -> None:
        """Each request's rows stand together, in order of admission."""
        self.rows.set_order(
            [
                sequence.row
                for request in self.running.values()
                for sequence in request.unfinished
                if sequence.row is not None
            ]
        )

    # ------------------------------------------------------------------ the way out

    def tell(
        self, sequence: Sequence, token_ids: list[int], logprobs: Logprobs | None = None
    ) -> None:
        """Output for the client; if the sequence's status is final, it ends with this output, and
        its request with its last sequence."""
        self.counters.num_generated_tokens += len(token_ids)
        request = sequence.request
        self._served[request.tenant_number] += len(token_ids)
        if not sequence.status.is_finished:
            self.outputs.add(sequence, token_ids, logprobs)
            return
        is_over = request.get_max_num_running_seqs() == 1
        if is_over:
            self._leave_queues(request)
            request.status = sequence.status
        else:
            self.num_reserved_rows -= 1
        self.outputs.add(sequence, token_ids, logprobs, is_over=is_over)
        sequence.drop_tokens_in_flight()
        self.drop_sequence(sequence)
        request.num_finished_sequences += 1
        if is_over:
            self._forget(request, None)

    def end(self, request: Request, status: RequestStatus, detail: str | None = None) -> None:
        """Out of everything at once, with an empty terminal output for each sequence that has not
        had one."""
        self._leave_queues(request)
        ending = request.unfinished
        num_missing = request.get_max_num_running_seqs() - len(ending)
        indexes = set(range(request.num_sequences)) - {seq.index for seq in request.sequences}
        ending += [Sequence(request, index) for index in sorted(indexes)[:num_missing]]
        request.status = status
        for count, sequence in enumerate(ending, start=1):
            sequence.status = status
            self.outputs.add(sequence, [], detail=detail, is_over=count == len(ending))
        for sequence in request.sequences:
            if sequence in ending:
                self.drop_sequence(sequence)
        self._forget(request, detail)

    def finish_beams(self, request: Request, status: RequestStatus) -> None:
        """A beam search is over and its results are told: the request leaves."""
        self._leave_queues(request)
        self._served[request.tenant_number] += request.sequences[0].num_output_tokens
        beams = request.unfinished
        request.status = status
        for sequence in beams:
            self.drop_sequence(sequence)
        self._forget(request, None)

    def drop_sequence(self, sequence: Sequence) -> None:
        """Blocks and row go back."""
        self._kv_cache.free(sequence)
        if sequence.row is not None:
            self.rows.give_back(self.unplace(sequence))
        self.forget_sequence(sequence)

    def forget_sequence(self, sequence: Sequence) -> None:
        """A sequence whose blocks and row are no longer its own."""
        self._branches.pop(sequence.sequence_id, None)
        self._finished_req_ids.append(sequence.sequence_id)

    def _leave_queues(self, request: Request) -> None:
        if self.running.pop(request.request_id, None) is not None:
            self.num_reserved_rows -= request.get_max_num_running_seqs()
        else:
            self.waiting.remove_request(request)
            self._left_queue(request)

    def _forget(self, request: Request, detail: str | None) -> None:
        del self.by_id[request.request_id]
        self.counters.num_finished[request.status.finish_reason] += 1
        self._policy.left(request)
        self._on_leave(request, detail)

    def take_served(self) -> dict[int, int]:
        """Tokens told one by one since the last call, by tenant number."""
        served, self._served = self._served, Counter()
        return served

    def take_finished_req_ids(self) -> list[str]:
        """Sequences that left since the last call."""
        finished, self._finished_req_ids = self._finished_req_ids, []
        return finished
