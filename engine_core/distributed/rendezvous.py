"""Where ranks meet before they are connected: a file on one machine, a port beyond."""

import socket
from datetime import timedelta

from torch._C._distributed_c10d import FileStore, Store, TCPStore

_FILE, _TCP = "file://", "tcp://"
_TIMEOUT = timedelta(minutes=10)
"""Ranks start at their own speed; one that ends is noticed by the group."""


def open_store(rendezvous: str, *, rank: int, world_size: int) -> Store:
    """`file://PATH`, or `tcp://HOST:PORT` where rank 0 listens, on that address alone.
    Waits for rank 0. Raises RuntimeError: it does not come."""
    if rendezvous.startswith(_FILE):
        return FileStore(rendezvous.removeprefix(_FILE), world_size)
    host, port = _host_and_port(rendezvous)
    if rank:
        return TCPStore(host, port, timeout=_TIMEOUT)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def free_port(host: str) -> int:
    """A port of this machine that is free."""
    with socket.create_server(
        (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    ) as server:
        return int(server.getsockname()[1])


def local_host(rendezvous: str) -> str:
    """This machine's address at which ranks elsewhere reach it; on one machine the loopback."""
    if rendezvous.startswith(_FILE):
        return "127.0.0.1"
    host, port = _host_and_port(rendezvous)
    with socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM
    ) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])


def _host_and_port(rendezvous: str) -> tuple[str, int]:
    host, _, port = rendezvous.removeprefix(_TCP).rpartition(":")
    return host.strip("[]"), int(port)
