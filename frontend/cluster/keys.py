"""The keys of a deployment: its engines take only its own clients. They travel inside the Ray
cluster, which is one zone of trust."""

import tempfile
from pathlib import Path

from engine_core.server.keys import KeyFolder

_CLIENT = "clients/http.key"


def make_keys() -> dict[str, bytes]:
    """Contents by the name of the file."""
    with tempfile.TemporaryDirectory(prefix="engine-keys-") as name:
        folder = Path(name)
        keys = KeyFolder(folder)
        keys.make()
        keys.add("http", is_admin=True)  # it names the tenants that it serves
        return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*.key")}


class KeyFiles:
    """The keys as files that only this user can read, until `close`."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="engine-keys-")  # mode 0700
        self.folder = Path(self._folder.name)
        for name, content in contents.items():
            path = self.folder / name
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.touch(mode=0o600)
            path.write_bytes(content)
        self.of_client = self.folder / _CLIENT

    def close(self) -> None:
        self._folder.cleanup()
