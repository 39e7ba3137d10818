"""The default address of the engine, for both sides."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from protocol.errors import InvalidParameter

SOCKET_NAME = "engine.sock"
NO_ENGINE_ON_WINDOWS = (
    "no engine runs on Windows itself; start one in WSL or on a Linux machine, and name its "
    "address: tcp://HOST:PORT, with its key"
)
_MAX_PORT = 65_535


def default_socket_folder() -> Path:
    """A folder of this user's own: in `$XDG_RUNTIME_DIR` if that is its own, else in the temporary
    folder that carries the user's id. The daemon makes it with mode 0700."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    with contextlib.suppress(OSError, ValueError):  # under sudo it may be another user's
        if runtime and Path(runtime).is_dir() and Path(runtime).stat().st_uid == os.getuid():
            return Path(runtime) / "engine-core"
    return Path(tempfile.gettempdir()) / f"engine-core-{os.getuid()}"


def default_address() -> str:
    """The ZMQ address `ipc://<default_socket_folder()>/engine.sock`.
    Raises InvalidParameter: on Windows, which has no daemon of its own."""
    if sys.platform == "win32":
        raise InvalidParameter(NO_ENGINE_ON_WINDOWS)
    return f"ipc://{default_socket_folder() / SOCKET_NAME}"


def check_address(address: str) -> None:
    """What libzmq would not notice: it takes port 99999 for 34463 and 80x for 80.
    Raises InvalidParameter: an abstract socket, or neither ipc://PATH nor tcp://HOST:PORT."""
    if address.startswith(("ipc://@", "ipc://*")):
        raise InvalidParameter(
            f"address {address!r} is not a path: an abstract socket has no permissions, any user "
            "of the machine could enter it; use ipc://PATH in a folder of your own"
        )
    if address.startswith("ipc://"):
        return
    if not address.startswith("tcp://"):
        raise InvalidParameter(
            f"address {address!r} has no known scheme; use ipc://PATH or tcp://HOST:PORT"
        )
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= len(str(_MAX_PORT))
    if not host or not (port == "*" or (is_number and int(port) <= _MAX_PORT)):
        raise InvalidParameter(
            f"the port of {address!r} is {port!r}, it must be a number up to {_MAX_PORT}; use "
            "ipc://PATH or tcp://HOST:PORT"
        )
