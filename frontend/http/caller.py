"""Whose request it is."""

from dataclasses import dataclass
from typing import Self

from starlette.requests import Request

from frontend.http.api_errors import ApiError
from frontend.http.exchange import Exchange


@dataclass(frozen=True, slots=True)
class Caller:
    """`name` is that of the API key, else the remote address: its share of the engine. A `user` of
    its requests divides that share.

    Args:
        is_admin: whether it may see the requests of others: without keys everybody.
    """

    name: str
    exchange: Exchange
    is_admin: bool

    @classmethod
    def of(cls, request: Request) -> Self:
        exchange: Exchange = request.scope["exchange"]
        return cls(exchange.caller, exchange, exchange.key is None or exchange.key.is_admin)

    def tenant(self, user: str | None) -> str:
        return self.name if not user else f"{self.name}/{user:.64}"

    def owns(self, tenant: str | None) -> bool:
        return tenant is not None and tenant.partition("/")[0] == self.name

    def priority(self, asked: int | None) -> int:
        """
        Raises:
            ApiError: its key may not ask for one as urgent.
        """
        floor = None if self.exchange.key is None else self.exchange.key.min_priority
        if floor is None:
            return asked or 0
        if asked is not None and asked < floor:
            raise ApiError(
                403,
                f"priority is {asked}, key {self.name!r} may ask for {floor} and above",
                param="priority",
            )
        return max(floor, 0) if asked is None else asked

    def engine_request_id(self) -> str:
        """A new one, with the id that the client and the logs know."""
        return self.exchange.engine_request_id()
