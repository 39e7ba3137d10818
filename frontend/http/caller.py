"""Whose request it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from starlette.requests import Request


@dataclass(frozen=True, slots=True)
class Caller:
    """`name` is that of the API key, else the remote address: its share of the engine. A `user` of
    its requests divides that share."""

    name: str

    @classmethod
    def of(cls, request: Request) -> Self:
        key_name = request.scope.get("key_name")
        host = request.client.host if request.client is not None else "local"
        return cls(key_name or host)

    def tenant(self, user: str | None) -> str:
        return self.name if not user else f"{self.name}/{user:.64}"
