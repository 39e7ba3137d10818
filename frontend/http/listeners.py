"""The sockets that a server listens on."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from frontend.errors import EngineClientError
from frontend.http.settings import ServerSettings

_BACKLOG = 2048


class AddressUnavailable(EngineClientError):
    """The server cannot listen where it was told to."""


@contextlib.contextmanager
def listening(settings: ServerSettings) -> Iterator[tuple[str, list[socket.socket]]]:
    """The server's URL and its sockets: one for each address of the host.

    Raises:
        AddressUnavailable: something else listens there, or the system refuses.
    """
    with contextlib.ExitStack() as resources:
        if settings.uds is not None:
            sockets = [resources.enter_context(_unix_socket(settings.uds))]
            yield f"unix://{settings.uds.absolute()}", sockets
            return
        sockets, port = [], settings.port
        for address in settings.ip_addresses():
            sockets.append(resources.enter_context(_tcp_socket(address, port)))
            port = sockets[-1].getsockname()[1]  # one port for all
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        scheme = "http" if settings.ssl_certfile is None else "https"
        yield f"{scheme}://{host}:{port}", sockets


def _tcp_socket(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise AddressUnavailable(
            f"cannot listen at {address} port {port}: {error.strerror}; choose another with --port"
            " (0 picks one), or stop what listens there"
        ) from None


@contextlib.contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    """Made with mode 0600. What a dead server left at `path` is replaced."""
    try:
        if stat.S_ISSOCK(path.lstat().st_mode) and not _answers(path):
            path.unlink()
    except FileNotFoundError:
        pass
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        except OSError as error:
            raise AddressUnavailable(
                f"cannot listen at {path}: {error.strerror or error}; choose another --uds"
            ) from None
        finally:
            os.umask(mask)
        listener.listen(_BACKLOG)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True
