"""Which clients may connect over TCP: libzmq asks for every CURVE key (ZAP, RFC 27). It is answered
between two steps, by the loop that reads messages: no thread takes the loop's time."""

import contextlib
import logging
import time

import zmq
from zmq.utils import z85

from engine_core.server.keys import KeyFolder
from engine_core.server.limited_log import LimitedLog

logger = logging.getLogger(__name__)

_MAX_ANSWERS = 16
"""Between two steps: who connects again and again does not stop the loop."""


class KeyCheck:
    """Makes a ROUTER take only authorised keys; to be made before it is bound.
    Raises ConfigurationError: the keys cannot be read."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        router: "zmq.Socket[bytes]",
        keys: KeyFolder,
    ) -> None:
        server = keys.server_key()
        if not keys.authorized():
            logger.warning("--keys: no client has a key yet; make one with `engine-core keys add`")
        self._keys = keys
        self._log = LimitedLog(logger, logging.WARNING, time.monotonic)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind("inproc://zeromq.zap.01")
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, server.secret_key.encode())
        router.setsockopt(zmq.ZAP_DOMAIN, b"engine-core")

    def answer_all(self) -> None:
        """Answer who asks, so many at a time."""
        with contextlib.suppress(zmq.Again):
            for _ in range(_MAX_ANSWERS):
                version, number, _, address, _, mechanism, *credentials = (
                    self.socket.recv_multipart(zmq.NOBLOCK)
                )
                name = self._name_of(credentials, mechanism, address)
                status = [b"400", b"no such key", b""] if name is None else [b"200", b"OK", name]
                self.socket.send_multipart([version, number, *status, b""])

    def _name_of(self, credentials: list[bytes], mechanism: bytes, address: bytes) -> bytes | None:
        if mechanism != b"CURVE" or len(credentials) != 1:
            return None
        public_key = z85.encode(credentials[0]).decode()
        for key in self._keys.authorized().values():
            if key.public_key == public_key:
                return key.name.encode()
        who = f"{public_key:.8}... of {address.decode()}"
        self._log.log("key", f"refused the key {who}: it is not one of --keys")
        return None
