"""A worker's side: messages and plans of rank 0. The process ends with the connection."""

import logging
import os
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from engine_core.errors import ExitCode, StartupError
from engine_core.model_runner.sampled_tokens import SampledTokens
from engine_core.scheduler import SchedulerOutput
from engine_core.workers.codec import decode_plan, decode_sampled
from engine_core.workers.meeting import HEARTBEAT_MS, PLAN, SILENCE_MS, code_version, machine_id
from engine_core.workers.messages import FromRank0, FromWorker, Joins, Stop, encode, to_worker
from protocol.codec import understood
from protocol.errors import MalformedMessage
from protocol.keys import ClientKey

logger = logging.getLogger(__name__)

SentPlan = tuple[SchedulerOutput, list[SampledTokens]]

_GRACE_S = 1.0
_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class Channel:
    """
    Args:
        address: what rank 0 has bound.
        key: for TCP with keys.
    """

    def __init__(self, address: str, key: ClientKey | None) -> None:
        self._address = address
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, round(_GRACE_S * 1e3))
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        if "[" in address:
            self._socket.setsockopt(zmq.IPV6, 1)
        if key is not None:
            self._socket.curve_serverkey = key.server_public_key.encode()
            self._socket.curve_publickey = key.public_key.encode()
            self._socket.curve_secretkey = key.secret_key.encode()
        self._is_over = threading.Event()
        monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_MONITOR_STOPPED
            | _REFUSED
        )
        self._thread = threading.Thread(target=self._end_with_it, args=(monitor,), daemon=True)
        self._thread.start()
        self._socket.connect(address)
        self.send(Joins(version=code_version(), host=machine_id(), pid=os.getpid()))

    def send(self, message: FromWorker) -> None:
        self._socket.send(encode(message))

    def receive(self, timeout_s: float | None = None) -> FromRank0 | SentPlan | None:
        """None: nothing came in time. Raises StartupError: this worker is not taken."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            if not self._socket.poll(None if left_s is None else round(left_s * 1e3)):
                return None
            try:
                message = understood(_message_of, self._socket.recv_multipart(), "a message")
            except MalformedMessage as error:
                raise StartupError(f"{self._address} is no engine's: {error}") from None
            if message is not None:  # else rank 0 looked whether we are there
                if isinstance(message, Stop):
                    self._is_over.set()
                    if message.why:
                        raise StartupError(f"{self._address} does not take us: {message.why}")
                return message

    def close(self) -> None:
        """Close it; what was said is sent."""
        self._is_over.set()
        self._socket.disable_monitor()
        self._socket.close()
        self._thread.join()
        self._context.term()

    def _end_with_it(self, monitor: "zmq.Socket[bytes]") -> None:
        """The thread: rank 0 says Stop, or is gone."""
        while True:
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.EVENT_MONITOR_STOPPED:
                monitor.close()
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                logger.info("joined %s", self._address)
            elif not self._is_over.wait(_GRACE_S):
                why = "is gone" if event == zmq.EVENT_DISCONNECTED else "refuses our key"
                logger.error("the engine at %s %s", self._address, why)
                os._exit(ExitCode.FAULT)


def _message_of(frames: list[bytes]) -> FromRank0 | SentPlan | None:
    first, *rest = frames
    if first == PLAN:
        return decode_plan(rest[0]), decode_sampled(rest[1])
    return to_worker.decode(first) if first else None
