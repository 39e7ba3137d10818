"""Which sequences of which live request stand behind an id on the wire.

Owns the names, and the way of the engine's outputs to their sequences. Must not know sockets.

    generate(n=3)     "7-a1"    sequences [0, 3): one request, outputs told apart by their index
    after a loss      "7-0-b2"  sequence  [0, 1)
                      "7-2-c3"  sequence  [2, 3)   (the second had ended)
"""

import dataclasses
import logging
import secrets
import time

from frontend.live_request import LiveRequest
from protocol.outputs import DecodedTokens, EngineCoreOutput, EngineCoreOutputs
from protocol.requests import EngineRequest

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Route:
    """Sequences `[start, stop)` of a request; the engine counts them from 0."""

    request: LiveRequest
    start: int
    stop: int

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.request.sequences[self.start : self.stop])


class RouteTable:
    """What this client has running, by the ids that the engine knows."""

    def __init__(self) -> None:
        self._routes: dict[str, Route] = {}

    def __len__(self) -> int:
        return len(self._routes)

    def requests(self) -> list[LiveRequest]:
        """Each one once."""
        return list({id(route.request): route.request for route in self._routes.values()}.values())

    def open(self, request: LiveRequest) -> list[EngineRequest]:
        """What to send for a request, now: all of it while nothing of it has come, afterwards
        each sequence that goes on by itself. Beams depend on each other: they start again."""
        request.wire_ids.clear()
        if request.is_beam_search or not request.has_started:
            messages = [self._name(request, 0, len(request.sequences))]
        else:
            messages = [
                self._name(request, index, index + 1)
                for index, sequence in enumerate(request.sequences)
                if not sequence.finished
            ]
        request.metrics.engine_request_id = request.wire_ids[0] if request.wire_ids else None
        return messages

    def drop(self, request: LiveRequest) -> list[str]:
        """Forget a request. Returns the ids under which the engine still runs some of it."""
        return [wire_id for wire_id in request.wire_ids if self._routes.pop(wire_id, None)]

    def drop_all(self) -> list[LiveRequest]:
        """Forget all of them, and return them."""
        requests = self.requests()
        self._routes.clear()
        return requests

    def rejected(self, wire_id: str) -> LiveRequest | None:
        """The request that the engine refused under this id; None if it is forgotten."""
        route = self._routes.pop(wire_id, None)
        return None if route is None else route.request

    def deliver(self, outputs: EngineCoreOutputs) -> list[str]:
        """Give each output to its sequence. Returns the ids that the engine must be told to stop.

        Outputs that were on their way when a sequence was stopped find nobody.
        """
        now_s = time.monotonic()
        stopped: dict[str, None] = {}
        ends: dict[str, EngineCoreOutput] = {}
        if outputs.decoded is not None:
            self._deliver_columns(outputs.decoded, now_s, stopped)
        for output in outputs.other_outputs:
            route = self._routes.get(output.request_id)
            if route is None:
                continue
            if output.finished:
                ends[output.request_id] = output
            try:
                must_tell = route.request.append(route.start + output.index, output, now_s)
                if (must_tell or output.finished) and route.finished:
                    stopped[output.request_id] = None  # unless it is over for the engine too
            except Exception as error:
                self._fail(output.request_id, route, error, stopped)
        for wire_id in outputs.finished_req_ids:
            stopped.pop(wire_id, None)
            route = self._routes.pop(wire_id, None)
            if route is not None:
                route.request.end_sequences(route.start, route.stop, ends.get(wire_id))
        for wire_id in stopped:
            self._routes.pop(wire_id, None)
        return list(stopped)

    def _deliver_columns(
        self, columns: DecodedTokens, now_s: float, stopped: dict[str, None]
    ) -> None:
        """A token for each of many sequences: no object is made for any of them."""
        routes = self._routes
        token_ids = memoryview(columns.token_ids).cast("i")
        indexes = columns.indexes
        for position, wire_id in enumerate(columns.request_ids):
            route = routes.get(wire_id)
            if route is None:
                continue
            index = route.start if indexes is None else route.start + indexes[position]
            try:
                if route.request.append_token(index, token_ids[position], now_s) and route.finished:
                    stopped[wire_id] = None
            except Exception as error:
                self._fail(wire_id, route, error, stopped)

    def _fail(self, wire_id: str, route: Route, error: Exception, stopped: dict[str, None]) -> None:
        """A fault of this side ends one stream; the others go on."""
        if not route.request.finished:
            logger.exception("request %s cannot go on", route.request.request_id)
            route.request.fail(error)
        stopped[wire_id] = None

    def _name(self, request: LiveRequest, start: int, stop: int) -> EngineRequest:
        # A name never used before, so that neither other clients nor an engine that still holds
        # an earlier run of this request can mistake it.
        part = "" if stop - start == len(request.sequences) else f"-{start}"
        wire_id = f"{request.request_id}{part}-{secrets.token_hex(8)}"
        request.wire_ids.append(wire_id)
        self._routes[wire_id] = Route(request, start, stop)
        return request.wire_request(start, stop, wire_id)
