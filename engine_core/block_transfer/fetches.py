"""What is fetched from other engines, without sockets and clocks: windows, deadlines, checks."""

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Sequence

from engine_core.block_transfer.messages import (
    TRANSFER_VERSION,
    BlocksFound,
    FetchBlocks,
    FetchRefused,
    answer_decoder,
    checksum,
)
from engine_core.kv_cache.host_pool import HashKey
from engine_core.kv_cache.transfers import Transfer
from protocol.codec import understood
from protocol.errors import MalformedMessage

_PART_BYTES = 1 << 20
_MAX_PARTS_IN_FLIGHT = 8
"""Asked of one engine and not answered: what either side holds for the other is bounded."""


class BrokenAnswer(Exception):
    """The other side does not keep to the protocol; the text says how."""


@dataclasses.dataclass(slots=True)
class _Part:
    transfer: Transfer
    keys: list[HashKey]


class Fetches:
    """Each transfer ends once: with the answer to its last part, or when its time is over, its
    engine is lost or says what it must not. Blocks that came until then stay.

    Args:
        key: of this engine's weights, code, dtypes and layout.
        group_bytes: of a block of each group.
        timeout_s: for all blocks of a transfer together.
    """

    def __init__(self, *, key: bytes, group_bytes: Sequence[int], timeout_s: float) -> None:
        self._key = key
        self._group_bytes = group_bytes
        self._timeout_s = timeout_s
        self._part_blocks = max(1, _PART_BYTES // max(group_bytes))
        self._numbers = itertools.count()
        self._queues: dict[str, deque[_Part]] = {}
        self._in_flight: dict[str, dict[int, _Part]] = {}
        self._num_parts_left: dict[Transfer, int] = {}
        self._begun_s: dict[Transfer, float] = {}
        """Transfers with the time of their begin, in order of their deadlines."""
        self._ended: list[Transfer] = []
        self.num_blocks = self.num_bytes = 0
        """Received."""
        self.receive_s = 0.0
        """Seconds from the begin to the end of each transfer, all together."""
        self.failures: Counter[str] = Counter()
        """Blocks that did not come, by reason."""

    def is_waiting_for(self, source: str) -> bool:
        """Whether this engine owes an answer."""
        return bool(self._in_flight.get(source))

    @property
    def next_deadline_s(self) -> float | None:
        begun_s = next(iter(self._begun_s.values()), None)
        return None if begun_s is None else begun_s + self._timeout_s

    def begin(self, transfer: Transfer, now_s: float) -> None:
        size, keys = self._part_blocks, transfer.keys
        parts = [keys[start : start + size] for start in range(0, len(keys), size)]
        self._num_parts_left[transfer] = len(parts)
        self._begun_s[transfer] = now_s
        self._in_flight.setdefault(transfer.source, {})
        queue = self._queues.setdefault(transfer.source, deque())
        queue.extend(_Part(transfer, part) for part in parts)

    def give_up(self, transfer: Transfer, why: str) -> None:
        """One that was not begun."""
        self.failures[why] += len(transfer.keys)
        self._ended.append(transfer)

    def take_to_send(self, source: str) -> list[FetchBlocks]:
        """The messages that the window has room for."""
        queue, in_flight = self._queues.get(source), self._in_flight.get(source, {})
        messages = []
        while queue and len(in_flight) < _MAX_PARTS_IN_FLIGHT:
            part, number = queue.popleft(), next(self._numbers)
            in_flight[number] = part
            messages.append(FetchBlocks(TRANSFER_VERSION, number, self._key, part.keys))
        return messages

    def on_answer(
        self, source: str, frames: Sequence[bytes | memoryview], now_s: float
    ) -> list[tuple[HashKey, bytes]]:
        """Returns the blocks that came whole. Answers to what is not in flight are dropped.
        Raises BrokenAnswer."""
        if not frames:
            raise BrokenAnswer("an answer without frames")
        try:
            answer = understood(answer_decoder.decode, frames[0], "an answer")
        except MalformedMessage as error:
            raise BrokenAnswer(str(error)) from None
        part = self._in_flight.get(source, {}).pop(answer.number, None)
        if part is None:
            return []
        blocks: list[tuple[HashKey, bytes]] = []
        if isinstance(answer, FetchRefused):
            self.failures["refused"] += len(part.keys)
        else:
            blocks = self._read(part, answer, frames[1:])
        self.num_blocks += len(blocks)
        self.num_bytes += sum(len(contents) for _, contents in blocks)
        self._end_part(part, now_s)
        return blocks

    def _read(
        self, part: _Part, answer: BlocksFound, frames: Sequence[bytes | memoryview]
    ) -> list[tuple[HashKey, bytes]]:
        blocks, contents = [], iter(frames)
        for index, key in enumerate(part.keys):
            wanted = answer.checksums[index] if index < len(answer.checksums) else b""
            found = next(contents, b"") if wanted else b""
            has_length = len(found) == self._group_bytes[key[0]]
            if not wanted:
                self.failures["absent"] += 1
            elif not has_length or checksum(self._key, key, found) != wanted:
                self.failures["corrupt"] += 1
            else:
                blocks.append((key, bytes(found)))
        return blocks

    def on_lost(self, source: str, why: str, now_s: float) -> None:
        """Nothing that was asked of this engine comes any more."""
        parts = [*self._in_flight.pop(source, {}).values(), *self._queues.pop(source, ())]
        for part in parts:
            self.failures[why] += len(part.keys)
            self._end_part(part, now_s)

    def expire(self, now_s: float) -> list[str]:
        """Give up what is late. Returns the engines that it was asked of: what they still send is
        of no use, and in the way of other blocks."""
        late = []
        for transfer, begun_s in self._begun_s.items():
            if begun_s + self._timeout_s > now_s:
                break
            late.append(transfer.source)
        return list(dict.fromkeys(late))

    def take_ended(self) -> list[Transfer]:
        ended, self._ended = self._ended, []
        return ended

    def _end_part(self, part: _Part, now_s: float) -> None:
        transfer = part.transfer
        self._num_parts_left[transfer] -= 1
        if not self._num_parts_left[transfer]:
            del self._num_parts_left[transfer]
            self.receive_s += now_s - self._begun_s.pop(transfer)
            self._ended.append(transfer)

    def check(self) -> None:
        """Assert that each part is in one place, and the windows are kept."""
        parts = [part for queue in self._queues.values() for part in queue]
        for in_flight in self._in_flight.values():
            assert len(in_flight) <= _MAX_PARTS_IN_FLIGHT
            parts += in_flight.values()
        assert Counter(part.transfer for part in parts) == Counter(self._num_parts_left)
        assert self._begun_s.keys() == self._num_parts_left.keys()
