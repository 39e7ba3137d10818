"""The folder of the engine's keys: its own, and those of the clients that may connect over TCP."""

import logging
import os
import re
import time
from pathlib import Path

import msgspec
import zmq

from engine_core.errors import ConfigurationError
from engine_core.server.limited_log import LimitedLog
from engine_core.server.unix_socket import make_private_folder
from protocol.errors import InvalidParameter
from protocol.keys import ClientKey, read_secret_file

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


class ServerKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    public_key: str
    secret_key: str

    def __repr__(self) -> str:
        return "ServerKey()"


class AuthorizedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    public_key: str
    is_admin: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r:.80} cannot be a key's name")


class KeyFolder:
    """`server.key`, `authorized/NAME.key` and `clients/NAME.key`; the last is for the client, and
    the engine does not read it. Secrets are written to these files only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._authorized: dict[str, AuthorizedKey] = {}
        self._read_at: int | None = None
        self._log = LimitedLog(logger, logging.WARNING, time.monotonic)

    def make(self) -> None:
        """Raises ConfigurationError: it exists, or cannot be written."""
        for folder in (self.folder, self.folder / "authorized", self.folder / "clients"):
            make_private_folder(folder, "choose another with --folder")
        public, secret = (key.decode() for key in zmq.curve_keypair())
        self._write("server.key", ServerKey(public, secret))

    def add(self, name: str, *, is_admin: bool) -> Path:
        """A new client's key. Returns the file to give to the client.
        Raises ConfigurationError: no such folder, a name that is taken, or none of a file."""
        server = self.server_key()
        if not _NAME.fullmatch(name):
            raise ConfigurationError(
                f"{name!r} cannot be a key's name; use up to 64 letters, digits and -_."
            )
        public, secret = (key.decode() for key in zmq.curve_keypair())
        file = self._write(
            f"clients/{name}.key", ClientKey(name, server.public_key, public, secret)
        )
        self._write(f"authorized/{name}.key", AuthorizedKey(name, public, is_admin))
        return file

    def server_key(self) -> ServerKey:
        """Raises ConfigurationError if there is none, or others may read it."""
        try:
            return read_secret_file(self.folder / "server.key", ServerKey)
        except InvalidParameter as error:
            raise ConfigurationError(str(error)) from None

    def authorized(self) -> dict[str, AuthorizedKey]:
        """By name. The folder is read again when a file was added or removed. A file that cannot be
        used is left out, with a line, and tried again."""
        folder = self.folder / "authorized"
        try:
            changed_at = folder.stat().st_mtime_ns
        except OSError as error:
            self._log.log("folder", f"--keys: no key is taken: {error}")
            return {}
        if changed_at != self._read_at:
            self._authorized, self._read_at = {}, changed_at
            for file in folder.glob("*.key"):
                try:
                    key = read_secret_file(file, AuthorizedKey)
                    self._authorized[key.name] = key
                except InvalidParameter as error:
                    self._log.log(file.name, f"--keys: this key is not taken: {error}")
                    self._read_at = None
        return self._authorized

    def _write(self, name: str, content: msgspec.Struct) -> Path:
        path = self.folder / name
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
        except FileExistsError:
            raise ConfigurationError(f"{path} exists already; remove it for a new one") from None
        except OSError as error:
            raise ConfigurationError(f"cannot write {path}: {error.strerror}") from None
        return path
