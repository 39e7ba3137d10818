"""Where rank 0 and its workers meet: who they are, and at which addresses they may."""

import ipaddress
import os
import platform
import shutil
import signal
import tempfile
from importlib.metadata import version
from pathlib import Path

from engine_core.errors import ConfigurationError
from engine_core.server.transport import is_loopback
from engine_core.server.unix_socket import make_private_folder
from protocol.addresses import check_address, default_socket_folder
from protocol.base import WIRE_VERSION
from protocol.errors import InvalidParameter

PLAN = b"plan"
"""The first of a plan's three frames."""
HEARTBEAT_MS, SILENCE_MS = 2_000, 30_000
"""A machine that is silent for so long is lost."""


def code_version() -> str:
    """Equal at all ranks."""
    return f"{version('engine-core')}, wire {WIRE_VERSION}"


def machine_id() -> str:
    """Equal for all processes of one machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def host_to_join(address: str, *, has_keys: bool) -> str:
    """Of `--workers-bind`. Raises ConfigurationError: it cannot be joined, or by anybody."""
    try:
        check_address(address)
    except InvalidParameter as error:
        raise ConfigurationError(f"--workers-bind: {error}") from None
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if not address.startswith("tcp://") or _is_any(host):
        raise ConfigurationError(
            f"--workers-bind {address} names no address that other machines reach; give "
            "tcp://HOST:PORT with this machine's address in their network"
        )
    if not has_keys and not is_loopback(host):
        raise ConfigurationError(
            f"--workers-bind {address} is open to the network, and there are no keys: whoever "
            "reaches the port could read every request. Make keys with `engine-core keys` and "
            "give --keys FOLDER; the joining command needs the key of an admin"
        )
    return host


def make_folder() -> Path:
    """A private folder of this engine's start. Raises ConfigurationError."""
    parent = default_socket_folder()
    make_private_folder(parent, "set XDG_RUNTIME_DIR to another")
    _remove_left_folders(parent)
    return Path(tempfile.mkdtemp(prefix=f"workers-{os.getpid()}-", dir=parent))


def how_it_ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"


def _remove_left_folders(folder: Path) -> None:
    """Remove the folders of engines that were killed while they started."""
    for left in folder.glob("workers-*"):
        pid = left.name.split("-")[1]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)
