"""The default address of the engine, for both sides."""

import os
import tempfile
from pathlib import Path

SOCKET_NAME = "engine.sock"


def default_socket_folder() -> Path:
    """A folder of this user's own: `$XDG_RUNTIME_DIR/engine-core`, else one under the temporary
    folder that carries the user's id. The daemon makes it with mode 0700."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "engine-core"
    return Path(tempfile.gettempdir()) / f"engine-core-{os.getuid()}"


def default_address() -> str:
    """The ZMQ address `ipc://<default_socket_folder()>/engine.sock`."""
    return f"ipc://{default_socket_folder() / SOCKET_NAME}"
