"""Which engines hold which KV blocks: as they say (CacheEvents), and as what was sent to them makes
likely. An entry that is wrong costs only time: the prompt is computed where it was thought cached.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class PrefixIndex:
    """Blocks by their keys (`protocol.block_hashes`), and for each a set of engines, by number.

    Args:
        max_blocks: beyond them those are forgotten that were stored or looked up longest ago; of a
            prompt its end first. 150 bytes each.
    """

    def __init__(self, *, max_blocks: int = 200_000) -> None:
        self._max_blocks = max_blocks
        self._engines: OrderedDict[int, int] = OrderedDict()
        """Bit e: engine e has it."""
        self.num_blocks: Counter[int] = Counter()
        """Blocks that each engine holds."""

    def __len__(self) -> int:
        return len(self._engines)

    def match(self, keys: Sequence[int], engines: Iterable[int]) -> dict[int, int]:
        """By engine, how many of a prompt's first blocks it has, if it has any."""
        left = sum(1 << engine for engine in engines)
        lengths: dict[int, int] = {}
        for length, key in enumerate(keys):
            held = left & self._engines.get(key, 0)
            if held != left:
                if length:
                    lengths.update(dict.fromkeys(_numbers(left & ~held), length))
                left = held
                if not left:
                    return lengths
        if keys:
            lengths.update(dict.fromkeys(_numbers(left), len(keys)))
        return lengths

    def use(self, engine: int, keys: Sequence[int]) -> None:
        """A prompt is sent there: it will have these blocks, unless they are evicted again."""
        self._add(engine, keys)
        for key in reversed(keys):
            self._engines.move_to_end(key)
        self._forget_oldest()

    def update(self, engine: int, stored: bytes, removed: bytes, *, is_whole: bool) -> None:
        """What an engine says. Keys are as on the wire; `is_whole`: it holds nothing else."""
        if is_whole:
            self.clear(engine)
        self.remove(engine, memoryview(removed).cast("Q"))
        self.store(engine, memoryview(stored).cast("Q"))

    def store(self, engine: int, keys: Iterable[int]) -> None:
        self._add(engine, keys)
        self._forget_oldest()

    def _add(self, engine: int, keys: Iterable[int]) -> None:
        known, bit, num_new = self._engines, 1 << engine, 0
        for key in keys:
            held = known.get(key, 0)
            if not held & bit:
                known[key] = held | bit
                num_new += 1
        self.num_blocks[engine] += num_new

    def _forget_oldest(self) -> None:
        while len(self._engines) > self._max_blocks:
            _, held = self._engines.popitem(last=False)
            for each in _numbers(held):
                self.num_blocks[each] -= 1

    def remove(self, engine: int, keys: Iterable[int]) -> None:
        known, bit = self._engines, 1 << engine
        for key in keys:
            held = known.get(key, 0)
            if held & bit:
                self.num_blocks[engine] -= 1
                if held == bit:
                    del known[key]
                else:
                    known[key] = held ^ bit

    def clear(self, engine: int) -> None:
        """O(blocks): after a restart, or a loss of events."""
        if self.num_blocks[engine]:
            bit = 1 << engine
            self.remove(engine, [key for key, held in self._engines.items() if held & bit])


def _numbers(bits: int) -> Iterable[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
