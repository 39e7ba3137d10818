"""What clients are to be told at the next update, grouped by client. Decides nothing.

One token more for a sequence of which there is nothing else to say goes into columns; first tokens,
log-probabilities and terminal outputs are objects of their own.
"""

import msgspec
import numpy as np

from engine_core.scheduler.batch_state import BatchState, Int32Array
from engine_core.scheduler.request import Request
from engine_core.scheduler.sequence import Sequence
from engine_core.scheduler.sequence_names import SequenceNames
from protocol.outputs import (
    DecodedTokens,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
    Logprobs,
)

_BYTES_AN_ENTRY = 4
_WIRE_TOKEN = np.dtype("<i4")


class OutputCollector:
    """Keeps outputs in order until they are handed out. Until a request's last output is handed
    out, its id is not free for another request."""

    def __init__(self, rows: BatchState) -> None:
        self._rows = rows
        self._names: dict[int, SequenceNames] = {}
        self._outputs: dict[int, list[EngineCoreOutput]] = {}
        self._decoded: dict[int, DecodedTokens] = {}
        self._over: dict[str, int] = {}

    @property
    def has_terminal(self) -> bool:
        """Whether terminal outputs wait to be handed out."""
        return bool(self._over)

    def is_terminal_pending(self, request_id: str) -> bool:
        return request_id in self._over

    def add(
        self,
        sequence: Sequence,
        new_token_ids: list[int],
        logprobs: Logprobs | None = None,
        detail: str | None = None,
        *,
        is_over: bool = False,
    ) -> None:
        """One output; the sequence's terminal one if it is finished, its request's if `is_over`."""
        request, status = sequence.request, sequence.status
        self._put(
            request.client_index,
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=new_token_ids,
                finish_reason=status.finish_reason if status.is_finished else None,
                stop_reason=sequence.stop_reason,
                index=sequence.index,
                logprobs=logprobs,
                num_cached_tokens=None if request.first_output_sent else request.num_cached_tokens,
                detail=detail,
            ),
        )
        request.first_output_sent = True
        if is_over:
            self._close(request.request_id, request.client_index)

    def add_beam(
        self,
        request: Request,
        index: int,
        token_ids: list[int],
        cumulative_logprob: float,
        finish_reason: FinishReason,
        stop_reason: int | None,
        *,
        is_over: bool,
    ) -> None:
        """A finished beam, whole."""
        self._put(
            request.client_index,
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=token_ids,
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                index=index,
                num_cached_tokens=None if request.first_output_sent else request.num_cached_tokens,
                cumulative_logprob=cumulative_logprob,
            ),
        )
        request.first_output_sent = True
        if is_over:
            self._close(request.request_id, request.client_index)

    def _put(self, client_index: int, output: EngineCoreOutput) -> None:
        self._outputs.setdefault(client_index, []).append(output)

    def _close(self, request_id: str, client_index: int) -> None:
        assert request_id not in self._over
        self._over[request_id] = client_index

    def add_tokens(self, rows: Int32Array, token_ids: Int32Array) -> None:
        """One token each for the sequences in these rows. Once between two calls of `take`."""
        if not len(rows):
            return
        clients = self._rows.client[rows]
        first = int(clients[0])
        if np.count_nonzero(clients == first) == len(rows):
            self._decoded[first] = self._columns(first, rows, token_ids)
            return
        for client in sorted(set(clients.tolist())):
            is_own = clients == client
            self._decoded[client] = self._columns(client, rows[is_own], token_ids[is_own])

    def _columns(self, client: int, rows: Int32Array, token_ids: Int32Array) -> DecodedTokens:
        names = self._names.get(client)
        if names is None:
            names = self._names[client] = SequenceNames(self._rows, of_requests=True)
        indexes = self._rows.index[rows]
        return DecodedTokens(
            request_ids=names.of(rows),
            token_ids=token_ids.astype(_WIRE_TOKEN, copy=False).tobytes(),
            indexes=indexes.tolist() if np.count_nonzero(indexes) else None,
        )

    def take(self, step_id: int) -> dict[int, EngineCoreOutputs]:
        """Everything since the last call, by client index."""
        over: dict[int, list[str]] = {}
        for request_id, client_index in self._over.items():
            over.setdefault(client_index, []).append(request_id)
        per_client = {
            client: EngineCoreOutputs(
                other_outputs=self._outputs.get(client, []),
                finished_req_ids=over.get(client, []),
                step_id=step_id,
                decoded=self._decoded.get(client),
            )
            for client in self._outputs | self._decoded
        }
        for gone in self._names.keys() - per_client.keys():
            del self._names[gone]
        self._outputs = {}
        self._decoded = {}
        self._over = {}
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
