"""The live requests of a client, by the id that its user knows them by."""

import itertools

from frontend.errors import InvalidInput
from frontend.live_request import LiveRequest

_MAX_REQUEST_ID_CHARS = 200


class RequestRegistry:
    """An id is taken while its request is live, and free again when that has ended."""

    def __init__(self) -> None:
        self._live: dict[str, LiveRequest] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: str) -> LiveRequest | None:
        return self._live.get(request_id)

    def add(self, request: LiveRequest) -> None:
        """
        Raises:
            InvalidInput: its id is taken.
        """
        self.free_id(request.request_id)
        self._live[request.request_id] = request

    def remove(self, request: LiveRequest) -> None:
        """Nothing happens if another request, or none, has its id."""
        if self._live.get(request.request_id) is request:
            del self._live[request.request_id]

    def free_id(self, request_id: str | None = None) -> str:
        """The id itself if it is free; None gives a number not given before.

        Raises:
            InvalidInput: it is taken, or no id.
        """
        if request_id is None:
            return next(number for number in map(str, self._numbers) if number not in self._live)
        if not isinstance(request_id, str) or not 0 < len(request_id) <= _MAX_REQUEST_ID_CHARS:
            raise InvalidInput(
                f"request_id is {request_id!r}, it must be a string of 1 to "
                f"{_MAX_REQUEST_ID_CHARS} characters"
            )
        if request_id in self._live:
            raise InvalidInput(
                f"request_id {request_id!r} is that of a live request; wait for its end, abort "
                "it, or use another one"
            )
        return request_id
