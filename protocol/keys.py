"""A client's key file for an engine that listens on TCP: CURVE keys in Z85, 40 characters each."""

import os
import stat
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from protocol.codec import understood
from protocol.errors import InvalidParameter, MalformedMessage

T = TypeVar("T", bound=msgspec.Struct)


class ClientKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a client needs to reach an engine; `engine-core keys add` writes it."""

    name: str
    server_public_key: str
    public_key: str
    secret_key: str

    def __repr__(self) -> str:
        return f"ClientKey({self.name!r})"  # it may be logged


def read_client_key(path: Path, address: str) -> ClientKey:
    """The key to use at this address.
    Raises InvalidParameter: see `read_secret_file`; or the address has no use for a key."""
    if not address.startswith("tcp://"):
        raise InvalidParameter(
            f"keys has no effect at {address}, where the socket's permissions say who may connect; "
            "omit it, or give the engine's tcp:// address"
        )
    return read_secret_file(path, ClientKey)


def read_secret_file(path: Path, kind: type[T]) -> T:
    """A JSON file that only its owner may read.
    Raises InvalidParameter: it cannot be read, others may read it, or it is not of this kind."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            mode = stat.S_IMODE(status.st_mode)
            if sys.platform == "win32":
                pass  # its permissions are none of these; a user's folders are private there
            elif status.st_uid not in (os.getuid(), 0):
                raise InvalidParameter(
                    f"{path} belongs to another user ({status.st_uid}), who may change it; make a "
                    "key of your own with `engine-core keys`"
                )
            elif mode & 0o077:
                raise InvalidParameter(
                    f"{path} is for its owner alone, and others may read it (mode {mode:o}); "
                    f"chmod 600 {path}"
                )
            decode = msgspec.json.Decoder(kind).decode
            key = understood(decode, file.read(10_000), f"a {kind.__name__}")
    except OSError as error:
        raise InvalidParameter(
            f"cannot read the key {path}: {error.strerror}; make one with `engine-core keys`"
        ) from None
    except MalformedMessage as error:
        raise InvalidParameter(f"{path} is {error}; make one with `engine-core keys`") from None
    for field in msgspec.structs.fields(kind):
        if field.name.endswith("_key") and len(getattr(key, field.name)) != 40:
            raise InvalidParameter(
                f"{path}: {field.name} does not have 40 characters; make one with "
                "`engine-core keys`"
            )
    return key
