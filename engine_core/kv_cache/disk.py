"""Blocks on disk as the scheduler knows them: which there are, which are read or written."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Set

from engine_core.kv_cache.block_pool import BlockPool
from engine_core.kv_cache.host_pool import HashKey

MIN_TOKENS_ON_DISK = 64
"""Shorter prompts are soon computed."""
_KEPT_PLANS = 16
"""A block that was read and that no request has asked for in so many plans is dropped."""
_MAX_TO_SAVE = 64
"""Blocks that wait to be saved, for each that may wait to be written."""


@dataclasses.dataclass(frozen=True, slots=True)
class DiskMoves:
    """Blocks that a plan moves between device and disk. Saved contents are those from before the
    step; loaded ones are there before its other copies."""

    load: list[tuple[HashKey, int]]
    """(key, device block): of blocks that were read."""
    save: list[tuple[HashKey, int, int]]
    """(key, logical block, device block)."""


class DiskTier:
    """A block on disk comes back in two steps: a plan goes without it and has it read (`stage`);
    when it is there and found whole (`on_read`), a later plan copies it to the device. Numbers
    beside a key are logical blocks: of one prompt the last block is evicted first.

        known --stage--> reading --on_read--> staged --load--> on the device
        computed --use--> to be saved --save--> saving --on_written--> known

    Args:
        max_staged_blocks: most blocks that one request may have from the disk.
        max_saves: blocks that may wait to be written; the others stay where they are, and are lost
            if they are evicted before.
        min_tokens: shorter prompts are not written.
    """

    def __init__(
        self, *, max_staged_blocks: int, max_saves: int, min_tokens: int = MIN_TOKENS_ON_DISK
    ) -> None:
        self.min_tokens = min_tokens
        self.max_staged_blocks = max_staged_blocks
        self.num_free_saves = max_saves
        """How many blocks the next plan may save; set by who writes them."""
        self._max_to_save = _MAX_TO_SAVE * max_saves
        self.staged: dict[HashKey, bytes] = {}
        """Verified contents."""
        self.loading: dict[HashKey, bytes] = {}
        """Those that the plan at hand loads; taken out by who carries it out."""
        self.known: set[HashKey] = set()
        self.reading: set[HashKey] = set()
        self.saving: set[HashKey] = set()
        self.to_save: dict[HashKey, int] = {}
        self.to_read: list[HashKey] = []
        self.to_touch: list[tuple[HashKey, int]] = []
        """Used now."""
        self.to_delete: list[HashKey] = []
        """These three are emptied by who does it, whatever becomes of the plan."""
        self._num_plans_unused = 0

    def __contains__(self, key: HashKey) -> bool:
        return key in self.known

    @property
    def num_blocks(self) -> int:
        """Blocks on disk that are of this model and cache."""
        return len(self.known)

    @property
    def may_save(self) -> bool:
        """Whether blocks wait to be saved, and may be."""
        return bool(self.to_save) and self.num_free_saves > 0

    # ------------------------------------------------------------------ for the cache

    def stage(self, keys: Collection[HashKey]) -> int:
        """Have these known blocks read. Returns how many are still to come."""
        self._num_plans_unused = 0
        missing = [key for key in keys if key not in self.staged]
        new = [key for key in missing if key not in self.reading]
        if len(self.staged) + len(self.reading) + len(new) > 2 * self.max_staged_blocks:
            self.staged = {key: self.staged[key] for key in keys if key in self.staged}
            if self.reading:  # of requests that are gone; they come first
                return len(missing)
        self.to_read += new
        self.reading.update(new)
        return len(missing)

    def begin_load(self, keys: Iterable[HashKey]) -> None:
        """The plan at hand loads these, which are staged."""
        for key in keys:
            self.loading[key] = self.staged.pop(key)

    def use(self, keys: Iterable[tuple[HashKey, int]]) -> None:
        """A prompt uses these blocks, computed in this plan or before: keep them on disk.
        `keys`: with the logical block of each."""
        for key, index in keys:
            if key in self.known:
                self.to_touch.append((key, index))
            elif key not in self.saving and len(self.to_save) < self._max_to_save:
                self.to_save[key] = index

    def forget(self, keys: Iterable[HashKey]) -> None:
        """These contents may be wrong, or are not wanted any more."""
        for key in keys:
            if key in self.known or key in self.saving:
                self.to_delete.append(key)
            self.known.discard(key)
            self.saving.discard(key)
            self.reading.discard(key)
            self.to_save.pop(key, None)
            self.staged.pop(key, None)

    def clear(self) -> int:
        """Forget every block. Returns how many there were."""
        num_blocks = len(self.known)
        self.forget([*self.known, *self.saving, *self.to_save, *self.reading])
        return num_blocks

    def take(
        self, device: BlockPool, *, unfilled: Set[int], loads: Mapping[int, HashKey]
    ) -> DiskMoves | None:
        """Of the step that is planned now.

        Args:
            unfilled: device blocks that get their contents in this step.
            loads: device blocks, each with what is to be copied into it.
        """
        if self.loading:
            self.loading = {key: self.loading[key] for key in loads.values()}
        self._num_plans_unused += 1
        if self.staged and self._num_plans_unused > _KEPT_PLANS:
            self.staged.clear()
        save = self._take_saves(device, unfilled) if self.to_save else []
        if not loads and not save:
            return None
        return DiskMoves([(key, block_id) for block_id, key in loads.items()], save)

    def _take_saves(self, device: BlockPool, unfilled: Set[int]) -> list[tuple[HashKey, int, int]]:
        saves: list[tuple[HashKey, int, int]] = []
        gone = []
        for key, index in self.to_save.items():
            block_id = device.find(*key)
            if block_id is None:
                gone.append(key)
            elif block_id not in unfilled:
                if len(saves) == self.num_free_saves:
                    break
                saves.append((key, index, block_id))
        for key in (*gone, *(key for key, _, _ in saves)):
            del self.to_save[key]
        self.saving.update(key for key, _, _ in saves)
        return saves

    # ------------------------------------------------------------------ for who reads and writes

    def on_found(self, keys: Iterable[HashKey]) -> None:
        """These are on disk."""
        self.known.update(keys)

    def on_written(self, key: HashKey, *, is_there: bool) -> None:
        """A block was saved, or could not be."""
        if key in self.saving:
            self.saving.discard(key)
            if is_there:
                self.known.add(key)

    def on_read(self, key: HashKey, contents: bytes | None) -> None:
        """A block was read; None: it cannot be used, and is computed instead."""
        if contents is None:
            self.known.discard(key)
        elif key in self.reading:
            self.staged[key] = contents
        self.reading.discard(key)

    def on_gone(self, keys: Iterable[HashKey]) -> None:
        """These were evicted from the disk."""
        self.known.difference_update(keys)

    def stop_saving(self) -> None:
        """Nothing more can be written."""
        self._max_to_save = 0
        self.to_save.clear()

    def give_up_reads(self) -> None:
        """The disk does not answer: what it was asked for is computed instead."""
        self.known -= self.reading
        self.reading.clear()

    def check(self) -> None:
        """Assert that each block is in one state."""
        assert not self.known & self.saving
        assert not self.known & self.to_save.keys()
        assert not self.saving & self.to_save.keys()
        assert not self.reading & self.staged.keys()
        assert self.num_free_saves >= 0
