"""What clients are to be told at the next update, grouped by client. Decides nothing."""

import msgspec

from engine_core.scheduler.request import Request
from protocol.outputs import EngineCoreOutput, EngineCoreOutputs, Logprobs

_BYTES_AN_ENTRY = 4


class OutputCollector:
    """Keeps outputs in order until they are handed out. A request's terminal output is its last:
    until it is handed out, the id is not free for another request."""

    def __init__(self) -> None:
        self._outputs: dict[int, list[EngineCoreOutput]] = {}
        self._terminal_ids: dict[str, int] = {}

    @property
    def has_terminal(self) -> bool:
        """Whether terminal outputs wait to be handed out."""
        return bool(self._terminal_ids)

    def is_terminal_pending(self, request_id: str) -> bool:
        return request_id in self._terminal_ids

    def add(
        self,
        request: Request,
        new_token_ids: list[int],
        logprobs: Logprobs | None = None,
        detail: str | None = None,
    ) -> None:
        """One output; the terminal one if the request is finished."""
        client_index, status = request.client_index, request.status
        finish_reason = None
        if status.is_finished:
            finish_reason = status.finish_reason
            assert request.request_id not in self._terminal_ids
            self._terminal_ids[request.request_id] = client_index
        num_cached_tokens = None
        if not request.told_num_cached:
            request.told_num_cached = True
            num_cached_tokens = request.num_cached_tokens
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            finish_reason=finish_reason,
            stop_reason=request.stop_reason,
            logprobs=logprobs,
            num_cached_tokens=num_cached_tokens,
            detail=detail,
        )
        outputs = self._outputs.get(client_index)
        if outputs is None:
            self._outputs[client_index] = [output]
        else:
            outputs.append(output)

    def take(self, step_id: int) -> dict[int, EngineCoreOutputs]:
        """Everything since the last call, by client index."""
        finished: dict[int, list[str]] = {}
        for request_id, client_index in self._terminal_ids.items():
            finished.setdefault(client_index, []).append(request_id)
        per_client = {
            client_index: EngineCoreOutputs(
                outputs=outputs,
                finished_req_ids=finished.get(client_index, []),
                step_id=step_id,
            )
            for client_index, outputs in self._outputs.items()
        }
        self._outputs = {}
        self._terminal_ids = {}
        return per_client


def trim_logprobs(logprobs: Logprobs, num_positions: int) -> Logprobs:
    """The first `num_positions` positions."""
    if logprobs.num_positions <= num_positions:
        return logprobs
    num_bytes = num_positions * logprobs.width * _BYTES_AN_ENTRY
    return msgspec.structs.replace(
        logprobs,
        num_positions=num_positions,
        token_ids=logprobs.token_ids[:num_bytes],
        logprobs=logprobs.logprobs[:num_bytes],
        ranks=logprobs.ranks[:num_positions],
    )
