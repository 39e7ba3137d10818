"""Responses that were asked to be kept, in bounded memory."""

from collections import Counter, OrderedDict
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
    """Beyond its bounds, which all owners share, it drops what was not used for longest by the
    owner who has the most."""

    def __init__(self, max_responses: int = 1024, max_bytes: int = 64 * 1024**2) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._by_owner: dict[str | None, OrderedDict[str, StoredResponse]] = {}
        self._num_bytes: Counter[str | None] = Counter()

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """One that is larger than all of the memory is not kept."""
        if stored.num_bytes > self._max_bytes:
            return
        self._by_owner.setdefault(stored.owner, OrderedDict())[response_id] = stored
        self._num_bytes[stored.owner] += stored.num_bytes
        while self._num_bytes.total() > self._max_bytes:
            self._drop_one(max(self._by_owner, key=self._num_bytes.__getitem__))
        while sum(map(len, self._by_owner.values())) > self._max_responses:
            self._drop_one(max(self._by_owner, key=lambda owner: len(self._by_owner[owner])))

    def get(self, response_id: str, owner: str | None) -> StoredResponse | None:
        """None: it is not there, or belongs to another one."""
        own = self._by_owner.get(owner, OrderedDict())
        if response_id in own:
            own.move_to_end(response_id)
        return own.get(response_id)

    def _drop_one(self, owner: str | None) -> None:
        _, dropped = self._by_owner[owner].popitem(last=False)
        self._num_bytes[owner] -= dropped.num_bytes
