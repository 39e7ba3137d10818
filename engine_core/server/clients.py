"""Connected clients and the unfinished requests of each."""

import dataclasses
import secrets
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Rights:
    """Of a connection. `key_name` is None where there are no keys; `is_admin` allows the calls of
    operators, and to read about the requests of others."""

    key_name: str | None = None
    is_admin: bool = True


@dataclasses.dataclass(slots=True, eq=False)
class Client:
    """A connected client. The scheduler refers to it by `index`, which is never used again."""

    index: int
    identity: bytes
    name: str
    rights: Rights = Rights()
    nonce: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))
    """Known to no other client, and to none of a later engine."""
    request_ids: set[str] = dataclasses.field(default_factory=set)
    last_sent_s: float = 0.0
    frames: Sequence[bytes | memoryview] = ()
    """Binary ones, behind its message that is being handled."""

    def __str__(self) -> str:
        key = "" if self.rights.key_name is None else f" with key {self.rights.key_name}"
        return f"client {self.index}" + (f" ({self.name})" if self.name else "") + key


class ClientRegistry:
    """Clients from HELLO until they leave."""

    def __init__(self) -> None:
        self._by_identity: dict[bytes, Client] = {}
        self._by_index: dict[int, Client] = {}
        self._departed: list[Client] = []
        self._next_index = 0

    def __len__(self) -> int:
        return len(self._by_index)

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._by_index.values()))

    def add(self, identity: bytes, name: str, rights: Rights) -> Client:
        """A client said HELLO. Saying it again changes nothing but the name."""
        known = self._by_identity.get(identity)
        if known is not None:
            known.name = name
            return known
        client = Client(self._next_index, identity, name, rights)
        self._next_index += 1
        self._by_identity[identity] = self._by_index[client.index] = client
        return client

    def find(self, identity: bytes) -> Client | None:
        return self._by_identity.get(identity)

    def by_index(self, index: int) -> Client | None:
        return self._by_index.get(index)

    def remove(self, client: Client) -> None:
        """It left, or was found dead. Its requests await `take_departed`."""
        if self._by_index.pop(client.index, None) is not None:
            del self._by_identity[client.identity]
            self._departed.append(client)

    def take_departed(self) -> list[Client]:
        """Clients that left since the last call."""
        departed, self._departed = self._departed, []
        return departed
