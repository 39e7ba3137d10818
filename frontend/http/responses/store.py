"""Responses that were asked to be kept, in bounded memory."""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """
    Args:
        owner: the caller who may read it; None: everybody.
        response: the JSON document.
        messages: JSON of the whole conversation, without instructions.
    """

    owner: str | None
    response: bytes
    messages: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """Beyond its bounds it drops what was not used for longest."""

    def __init__(self, max_responses: int = 1024, max_bytes: int = 64 * 1024**2) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """One that is larger than all of the memory is not kept."""
        if stored.num_bytes > self._max_bytes:
            return
        self._responses[response_id] = stored
        self._num_bytes += stored.num_bytes
        while len(self._responses) > self._max_responses or self._num_bytes > self._max_bytes:
            _, dropped = self._responses.popitem(last=False)
            self._num_bytes -= dropped.num_bytes

    def get(self, response_id: str, owner: str | None) -> StoredResponse | None:
        """None: it is not there, or belongs to another one."""
        stored = self._responses.get(response_id)
        if stored is None or stored.owner != owner:
            return None
        self._responses.move_to_end(response_id)
        return stored
