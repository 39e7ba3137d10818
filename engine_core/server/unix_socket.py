"""A Unix socket that only this user can reach: its folder, its lock, its permissions."""

import contextlib
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from engine_core.errors import AddressInUse, ConfigurationError
from protocol import private_files

logger = logging.getLogger(__name__)

_MAX_UNIX_PATH_BYTES = 107
_CHOOSE = "choose an address with --bind"


def make_private_folder(folder: Path, else_do: str = _CHOOSE) -> None:
    """A folder that only this user can enter.
    Raises ConfigurationError: see `protocol.private_files`."""
    try:
        private_files.make_private_folder(folder)
    except OSError as error:
        raise ConfigurationError(
            f"cannot use the folder {folder}: {error.strerror}; remove it, or {else_do}"
        ) from None


@contextlib.contextmanager
def owned_socket_path(path: Path) -> Iterator[None]:
    """Hold a lock beside the socket for as long as it is bound.

    ZMQ replaces an existing Unix socket without asking, so a second engine would take the first
    one's clients. The kernel drops the lock with the process, however it dies."""
    if len(os.fsencode(path)) > _MAX_UNIX_PATH_BYTES:
        raise ConfigurationError(
            f"the socket path {path} has {len(os.fsencode(path))} bytes, the system's limit is "
            f"{_MAX_UNIX_PATH_BYTES}; choose a shorter one with --bind"
        )
    if not path.parent.is_dir():
        raise ConfigurationError(
            f"cannot listen on ipc://{path}: {path.parent} is not a folder; make it, or choose "
            "another address with --bind"
        )
    _check_folder(path.parent)
    lock_path = path.with_name(path.name + ".lock")
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(lock_path, flags, 0o600)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on ipc://{path}: {error.strerror}; choose another address with --bind"
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AddressInUse(
                f"ipc://{path} is in use by another engine; stop it or choose another address "
                "with --bind"
            ) from None
        yield
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def private_umask() -> Iterator[None]:
    """What this process makes meanwhile is for its user alone, from the first moment on."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def _check_folder(folder: Path) -> None:
    """Raises ConfigurationError: others may put another socket in place of this one."""
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.getuid(), 0) or (mode & 0o002 and not mode & stat.S_ISVTX):
        raise ConfigurationError(
            f"other users may replace files in {folder} (mode {mode:o}, owner {status.st_uid}), so "
            f"also the engine's socket; chmod 700 {folder}, or choose another folder with --bind"
        )
    if mode & 0o022:
        logger.warning(
            "OTHER USERS MAY WRITE IN %s: they cannot enter this engine's socket, but may put one "
            "of theirs at its address while no engine runs; better use a folder of your own",
            folder,
        )
