"""Fetches blocks from other engines, on a thread beside the loop."""

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from zmq.utils.monitor import parse_monitor_message

from engine_core.block_transfer.fetches import BrokenAnswer, Fetches
from engine_core.block_transfer.messages import encoder
from engine_core.kv_cache.host_pool import HashKey
from engine_core.kv_cache.transfers import Transfer
from engine_core.server.limited_log import LimitedLog
from protocol.keys import ClientKey
from protocol.private_files import foreign_owner

logger = logging.getLogger(__name__)

_BACK_OFF_S = 1.0
"""Seconds after the loss of an engine in which its blocks are computed here."""
_SILENT_S = 5.0
"""Seconds without an answer that is due, after which an engine counts as lost."""
_HEARTBEAT_MS = 1_000
_HEADER_BYTES = 1 << 20
_NEVER_MS = 3_600_000
"""Until a socket would connect again by itself: it is closed before."""
_LOSS_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class _Link:
    """A connection to one engine; closed and made anew after each loss."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], source: str, key: ClientKey | None, most: int
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self.socket.setsockopt(zmq.MAXMSGSIZE, most)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4 * _HEARTBEAT_MS)
        if source.startswith("tcp://["):
            self.socket.setsockopt(zmq.IPV6, 1)
        if key is not None:
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, key.server_public_key.encode())
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public_key.encode())
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret_key.encode())
        self.monitor = self.socket.get_monitor_socket(_LOSS_EVENTS)
        try:
            self.socket.connect(source)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()

    def is_lost(self) -> bool:
        with contextlib.suppress(zmq.Again):
            parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            return True
        return False


class BlockFetcher:
    """
    Args:
        sources: addresses that may be fetched from: what comes from there is believed.
        key: for sources that listen on TCP with keys.
        most_message_bytes: of a block.
        on_blocks, on_end: called on the fetcher's thread.
    """

    def __init__(
        self,
        fetches: Fetches,
        *,
        sources: Sequence[str],
        key: ClientKey | None,
        block_bytes: int,
        on_block: Callable[[HashKey, bytes], None],
        on_end: Callable[[Transfer], None],
    ) -> None:
        self.fetches = fetches
        self._sources = frozenset(sources)
        self._key = key
        self._most_bytes = block_bytes + _HEADER_BYTES
        self._on_block = on_block
        self._on_end = on_end
        self._links: dict[str, _Link] = {}
        self._heard_s: dict[str, float] = {}
        """Of engines that owe an answer: when they last sent one, or were first asked."""
        self._back_at_s: dict[str, float] = {}
        self._log = LimitedLog(logger, logging.WARNING, time.monotonic)
        self._commands: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="block-fetcher", daemon=True)
        self._thread.start()

    def fetch(self, transfer: Transfer) -> None:
        """`on_end` is called once, whatever becomes of it."""
        self._commands.put(transfer)
        self._wake()

    def close(self) -> None:
        self._commands.put(None)
        self._wake()
        self._thread.join(_SILENT_S)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake
            self._waker.send(b"\0", socket.MSG_DONTWAIT)

    # ------------------------------------------------------------------ on its thread

    def _run(self) -> None:
        with zmq.Context() as context:
            while self._take_commands(context):
                for source in list(self._links):
                    self._serve(source)
                for source in self.fetches.expire(time.monotonic()):
                    self._lose(source, "late")
                for transfer in self.fetches.take_ended():
                    self._on_end(transfer)
                self._wait()
            for link in self._links.values():
                link.close()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        for link in self._links.values():
            poller.register(link.socket, zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
        due_s = [heard_s + _SILENT_S for heard_s in self._heard_s.values()]
        if (deadline_s := self.fetches.next_deadline_s) is not None:
            due_s.append(deadline_s)
        wait_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        poller.poll(None if wait_s is None else 1 + int(wait_s * 1000))
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)

    def _take_commands(self, context: zmq.Context[zmq.Socket[bytes]]) -> bool:
        while not self._commands.empty():
            transfer = self._commands.get()
            if transfer is None:
                return False
            source, now_s = transfer.source, time.monotonic()
            if source not in self._sources:
                self._log.log("unknown", f"{source!r:.100} is not of --kv-transfer-source")
                self.fetches.give_up(transfer, "unknown source")
            elif self._back_at_s.get(source, 0.0) > now_s:
                self.fetches.give_up(transfer, "lost")
            elif source in self._links or self._connect(context, source):
                self.fetches.begin(transfer, now_s)
            else:
                self.fetches.give_up(transfer, "lost")
        return True

    def _connect(self, context: zmq.Context[zmq.Socket[bytes]], source: str) -> bool:
        try:
            if source.startswith("ipc://") and foreign_owner(Path(source.removeprefix("ipc://"))):
                raise PermissionError("the socket belongs to another user")
            self._links[source] = _Link(context, source, self._key, self._most_bytes)
        except FileNotFoundError:
            return False
        except (zmq.ZMQError, OSError) as error:  # too many sockets, a name that is no host's
            self._log.log("connect", f"cannot connect to {source}: {error}")
            return False
        return True

    def _serve(self, source: str) -> None:
        link, fetches = self._links[source], self.fetches
        now_s = time.monotonic()
        try:
            while True:
                frames = [frame.buffer for frame in link.socket.recv_multipart(zmq.NOBLOCK, False)]
                now_s = self._heard_s[source] = time.monotonic()
                for key, contents in fetches.on_answer(source, frames, now_s):
                    self._on_block(key, contents)
        except zmq.Again:
            pass
        except BrokenAnswer as error:
            self._log.log("broken", f"{source}: {error}")
            self._lose(source, "corrupt")
            return
        if link.is_lost():
            self._lose(source, "lost")
            return
        for message in fetches.take_to_send(source):
            self._heard_s.setdefault(source, now_s)
            with contextlib.suppress(zmq.Again):  # then no answer comes
                link.socket.send(encoder.encode(message), zmq.NOBLOCK)
        if not fetches.is_waiting_for(source):
            self._heard_s.pop(source, None)
        elif now_s - self._heard_s[source] > _SILENT_S:
            self._lose(source, "lost")

    def _lose(self, source: str, why: str) -> None:
        now_s = time.monotonic()
        self._log.log(why, f"blocks of {source} are computed here for {_BACK_OFF_S:g} s: {why}")
        self._links.pop(source).close()
        self._heard_s.pop(source, None)
        self._back_at_s[source] = now_s + _BACK_OFF_S
        self.fetches.on_lost(source, why, now_s)
