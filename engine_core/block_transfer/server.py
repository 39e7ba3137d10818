"""Gives blocks to the engines that ask for them, on a thread beside the loop."""

import dataclasses
import hmac
import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence

from engine_core.block_transfer.memory import BlockMemory
from engine_core.block_transfer.messages import (
    TRANSFER_VERSION,
    BlocksFound,
    FetchBlocks,
    FetchRefused,
    checksum,
    encoder,
    fetch_decoder,
)
from engine_core.server.limited_log import LimitedLog
from engine_core.server.transport import ClientGone, Frame, SlowConsumer, ZmqTransport
from protocol.base import Message
from protocol.codec import understood
from protocol.errors import MalformedMessage

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.25
_SOON_S = 0.002
_LAG_S = 0.25
"""A prompt's last blocks are kept by the step after the one that computed them: they may be asked
for before."""
_MAX_WAITING = 256
MAX_BLOCKS = 4096
"""Asked for at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    identity: bytes
    fetch: FetchBlocks
    deadline_s: float


class BlockServer:
    """
    Args:
        transport: of its own, which it closes. Over TCP with keys it serves admins' keys only.
        key: what blocks must agree in beside their hash.
    """

    def __init__(self, transport: ZmqTransport, memory: BlockMemory, *, key: bytes) -> None:
        self.address = transport.address
        self._transport = transport
        self._memory = memory
        self._key = key
        self._waiting: list[_Waiting] = []
        self._log = LimitedLog(logger, logging.WARNING, time.monotonic)
        self._is_closing = False
        self.num_blocks = self.num_bytes = 0
        """Sent."""
        self.failures: Counter[str] = Counter()
        """Blocks that were asked for and not sent, by reason."""
        self._thread = threading.Thread(target=self._run, name="block-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing = True
        self._thread.join(4 * _IDLE_WAIT_S)

    def _run(self) -> None:
        with self._transport as transport:
            while not self._is_closing:
                transport.wait(_SOON_S if self._waiting else _IDLE_WAIT_S)
                for identity, frames in transport.receive_all():
                    self._on_message(identity, frames)
                waiting, self._waiting = self._waiting, []
                for each in waiting:
                    self._answer(each)

    def _on_message(self, identity: bytes, frames: Sequence[Frame]) -> None:
        try:
            fetch = understood(fetch_decoder.decode, frames[0] if frames else b"", "a fetch")
        except MalformedMessage as error:
            self._log.log("broken", f"a message of another engine: {error}")
            return
        why_not = self._why_not(identity, fetch)
        if why_not is not None:
            self._log.log("refused", f"another engine's fetch of blocks is refused: {why_not}")
            self.failures["refused"] += len(fetch.blocks)
            self._send(identity, FetchRefused(fetch.number, why_not))
            return
        is_crowded = len(self._waiting) >= _MAX_WAITING
        lag_s = 0.0 if is_crowded else _LAG_S
        self._waiting.append(_Waiting(identity, fetch, time.monotonic() + lag_s))

    def _why_not(self, identity: bytes, fetch: FetchBlocks) -> str | None:
        rights = self._transport.rights(identity)
        if fetch.version != TRANSFER_VERSION:
            return f"it speaks version {fetch.version}, this engine {TRANSFER_VERSION}"
        if rights.key_name is not None and not rights.is_admin:
            return f"the key {rights.key_name!r} is no admin's; make one with --admin"
        if not hmac.compare_digest(fetch.key, self._key):
            return "its weights, dtypes, block size, --max-model-len or instruction set differ"
        if len(fetch.blocks) > MAX_BLOCKS:
            return f"it asks for {len(fetch.blocks)} blocks at once, the limit is {MAX_BLOCKS}"
        return None

    def _answer(self, waiting: _Waiting) -> None:
        """Now, or later if it may still become complete."""
        fetch = waiting.fetch
        contents = [self._memory.get(block) for block in fetch.blocks]
        if None in contents and time.monotonic() < waiting.deadline_s:
            self._waiting.append(waiting)
            return
        found = [each for each in contents if each is not None]
        checksums = [
            b"" if each is None else checksum(self._key, block, each)
            for block, each in zip(fetch.blocks, contents, strict=True)
        ]
        self.failures["absent"] += len(contents) - len(found)
        if self._send(waiting.identity, BlocksFound(fetch.number, checksums), found):
            self.num_blocks += len(found)
            self.num_bytes += sum(map(len, found))
        else:
            self.failures["lost"] += len(found)

    def _send(self, identity: bytes, message: Message, frames: Sequence[bytes] = ()) -> bool:
        try:
            self._transport.send(identity, [encoder.encode(message), *frames])
        except (ClientGone, SlowConsumer) as error:
            self._log.log("gone", f"blocks for another engine are dropped: {error}")
            return False
        return True
