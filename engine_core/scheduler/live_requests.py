"""Every unfinished request, in exactly one of two queues, and the one way out.

Owns membership, and that each request leaves with its blocks given back and one terminal output.
Must not know budgets, or why a request moves.
"""

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler.output_collector import OutputCollector
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_queue import RequestQueue
from engine_core.scheduler.request_status import RequestStatus
from engine_core.scheduler.statistics import Counters
from protocol.outputs import Logprobs


class LiveRequests:
    """`running` is in order of admission; a dict, so that one in the middle leaves in O(1)."""

    def __init__(self, kv_cache: KVCacheManager) -> None:
        self._kv_cache = kv_cache
        self.by_id: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.waiting = RequestQueue()
        self.outputs = OutputCollector()
        self.counters = Counters()
        self._finished_req_ids: list[str] = []

    def add(self, request: Request) -> None:
        """To the tail of the waiting queue."""
        self.by_id[request.request_id] = request
        self.waiting.add_request(request)

    def admit_head(self) -> None:
        """The head of the waiting queue runs, as the newest."""
        request = self.waiting.pop_request()
        request.status = RequestStatus.RUNNING
        self.running[request.request_id] = request

    def preempt_newest(self) -> Request:
        """The newest running request loses its blocks and goes to the head of the waiting queue.
        Returns it."""
        victim = self.running.popitem()[1]
        self._kv_cache.free(victim)
        victim.reset_for_recompute()
        self.waiting.prepend_request(victim)
        self.counters.num_preemptions += 1
        return victim

    def tell(
        self, request: Request, token_ids: list[int], logprobs: Logprobs | None = None
    ) -> None:
        """Output for the client; if the request's status is final, it leaves with this output."""
        self.counters.num_generated_tokens += len(token_ids)
        self.outputs.add(request, token_ids, logprobs)
        if request.status >= RequestStatus.FINISHED_STOPPED:
            self._leave(request)

    def end(self, request: Request, status: RequestStatus, detail: str | None = None) -> None:
        """Out of everything at once, with an empty terminal output."""
        request.status = status
        self.outputs.add(request, [], detail=detail)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        del self.by_id[request.request_id]
        if self.running.pop(request.request_id, None) is None:
            self.waiting.remove_request(request)
        self._kv_cache.free(request)
        self._finished_req_ids.append(request.request_id)
        self.counters.num_finished[request.status.finish_reason] += 1

    def take_finished_req_ids(self) -> list[str]:
        """Ids that left since the last call."""
        finished, self._finished_req_ids = self._finished_req_ids, []
        return finished
