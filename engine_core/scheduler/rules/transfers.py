"""Requests whose prompts' blocks come from another engine wait until they are here."""

from engine_core.kv_cache import Transfer, Transfers
from engine_core.scheduler.part import SchedulerPart, Why
from engine_core.scheduler.request import Request
from engine_core.scheduler.request_pool import RequestPool
from protocol.explanations import WaitReason


class TransferRule(SchedulerPart):
    """A transfer begins when its request is first looked at."""

    def __init__(self, pool: RequestPool, transfers: Transfers) -> None:
        self._pool = pool
        self._transfers = transfers
        self._of: dict[str, Transfer] = {}
        """Transfers that have begun, by request_id."""

    def why_wait(self, request: Request) -> Why | None:
        source = request.message.kv_source
        if source is None or request.computes_whole_prompt:
            return None
        transfer = self._of.get(request.request_id)
        if transfer is None:
            transfer = self._of[request.request_id] = Transfer(source)
            first, num_tokens = request.unfinished[0], request.num_prompt_tokens
            keys = self._pool.kv_cache.missing_blocks(first, num_tokens)
            self._transfers.begin(transfer, keys)
        why = self._transfers.why_wait(transfer)
        return None if why is None else (WaitReason.TRANSFER, why)

    def on_finish(self, request: Request, detail: str | None, now: float) -> None:
        self._of.pop(request.request_id, None)
