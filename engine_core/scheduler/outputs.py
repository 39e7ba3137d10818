"""Outputs for clients, collected until the next update hands them out, grouped by client."""

import numpy as np

from engine_core.scheduler.batch_state import BatchState, IdsOfRows, Int32Array, Int64Array
from engine_core.scheduler.records.beam_search import BeamHypothesis
from engine_core.scheduler.request import Request, Sequence
from protocol.outputs import DecodedTokens, EngineCoreOutput, EngineCoreOutputs, Logprobs
from protocol.pooling import Pooled

_WIRE_TOKEN = np.dtype("<i4")
NO_CLIENT = -1
"""The client index of requests of the scheduler's own; their outputs go to nobody."""


class OutputCollector:
    """An output that is one token and nothing else goes into columns; first tokens,
    log-probabilities and terminal outputs are objects of their own. A request's id is not free for
    another one until its last output is handed out."""

    def __init__(self, batch: BatchState) -> None:
        self._batch = batch
        self.weights_version = 0
        self._request_ids: dict[int, IdsOfRows] = {}
        """Lists of the ids of rows' requests, by client."""
        self._outputs: dict[int, list[EngineCoreOutput]] = {}
        self._decoded: dict[int, DecodedTokens] = {}
        self._over: dict[str, int] = {}
        """The client of each request whose last output is in `_outputs`."""

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
        pooled: Pooled | None = None,
    ) -> None:
        """One output; the sequence's terminal one if it is finished, its request's if `is_over`."""
        request, status = sequence.request, sequence.status
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            finish_reason=status.finish_reason if status.is_finished else None,
            stop_reason=sequence.stop_reason,
            index=sequence.index,
            logprobs=logprobs,
            num_cached_tokens=request.account.take_num_cached_tokens(),
            detail=detail,
            num_draft_tokens=request.account.num_draft_tokens if is_over else 0,
            num_accepted_tokens=request.account.num_accepted_tokens if is_over else 0,
            pooled=pooled,
        )
        self._append(request, output, is_over)

    def add_beam(
        self, request: Request, index: int, found: BeamHypothesis, *, is_over: bool
    ) -> None:
        """A finished beam, whole."""
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=found.token_ids,
            finish_reason=found.finish_reason,
            stop_reason=found.stop_reason,
            index=index,
            num_cached_tokens=request.account.take_num_cached_tokens(),
            cumulative_logprob=found.cumulative_logprob,
        )
        self._append(request, output, is_over)

    def add_prompt_logprobs(self, request: Request, columns: Logprobs) -> None:
        """Add an output with log-probabilities of the prompt's next tokens."""
        output = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            num_cached_tokens=request.account.take_num_cached_tokens(),
            prompt_logprobs=columns,
        )
        self._append(request, output, is_over=False)

    def _append(self, request: Request, output: EngineCoreOutput, is_over: bool) -> None:
        self._outputs.setdefault(request.client_index, []).append(output)
        if is_over:
            assert request.request_id not in self._over
            self._over[request.request_id] = request.client_index

    def add_tokens(self, rows: Int64Array, token_ids: Int32Array) -> None:
        """One token each for the sequences in these rows. Once between two calls of `drain`."""
        if not len(rows):
            return
        clients = self._batch.client_index[rows]
        first = int(clients[0])
        if np.count_nonzero(clients == first) == len(rows):
            self._decoded[first] = self._as_columns(first, rows, token_ids)
            return
        places = np.argsort(clients, kind="stable")
        ends = np.flatnonzero(np.diff(clients[places])) + 1
        for own in np.split(places, ends):
            client = int(clients[own[0]])
            self._decoded[client] = self._as_columns(client, rows[own], token_ids[own])

    def _as_columns(self, client: int, rows: Int64Array, token_ids: Int32Array) -> DecodedTokens:
        ids = self._request_ids.get(client)
        if ids is None:
            ids = self._request_ids[client] = IdsOfRows(self._batch, self._batch.request_ids)
        indexes = self._batch.sequence_index[rows]
        return DecodedTokens(
            request_ids=ids.of(rows),
            token_ids=token_ids.astype(_WIRE_TOKEN, copy=False).tobytes(),
            indexes=indexes.tolist() if np.count_nonzero(indexes) else None,
        )

    def drain(self, step_id: int) -> dict[int, EngineCoreOutputs]:
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
                weights_version=self.weights_version,
            )
            for client in self._outputs | self._decoded
        }
        for client in self._request_ids.keys() - per_client.keys():
            del self._request_ids[client]
        self._outputs, self._decoded, self._over = {}, {}, {}
        per_client.pop(NO_CLIENT, None)
        return per_client
