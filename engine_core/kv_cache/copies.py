"""What the runner copies between blocks before a forward pass: pairs of ids, no data."""

import dataclasses
from collections.abc import Set

from engine_core.kv_cache.disk import DiskMoves
from engine_core.kv_cache.host_pool import HashKey

BlockPair = tuple[int, int]
"""(source, destination)."""


@dataclasses.dataclass(frozen=True, slots=True)
class CacheCopies:
    """Carried out in this order, each list from its first pair to its last. Device blocks have the
    ids 1..num_blocks, host blocks num_blocks + 1 .. num_blocks + num_host_blocks. No device block
    is read by `swap_out` and written by `swap_in` of one step, and no host block the other way
    round, so that the two may also overlap."""

    swap_in: list[BlockPair] = dataclasses.field(default_factory=list)
    """(host block, device block)."""
    swap_out: list[BlockPair] = dataclasses.field(default_factory=list)
    """(device block, host block)."""
    copy: list[BlockPair] = dataclasses.field(default_factory=list)
    """(device block, device block): a shared block before its first write."""
    disk: DiskMoves | None = None
    """Carried out first. None: nothing."""

    @property
    def is_empty(self) -> bool:
        """Whether no block in memory changes or is kept."""
        loads = self.disk is not None and self.disk.load
        return not (self.swap_in or self.swap_out or self.copy or loads)


class PendingCopies:
    """Copies that the next plan will carry, and the blocks that must stay untouched until then.

    Keeps the lists of `CacheCopies` right in their order (swap in, swap out, copy) and safe to
    overlap. All copies run before the forward pass, so a block that is only computed into never
    conflicts:

    - a device block that swap_out or copy reads is never written by swap_in
    - a device block that was reallocated is not written for its earlier holder
    - swap_out saves contents from before the step: if a copy of this step writes the block, the
      source of that copy is saved instead
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._swap_in: dict[int, int] = {}  # device -> host
        self.loads: dict[int, HashKey] = {}
        """Device blocks that get their contents from disk."""
        self._swap_out: dict[int, int] = {}  # host -> device
        self._optional: dict[int, int] = {}  # device -> host: of swap_out, those to cancel freely
        self._copies: list[tuple[int, int]] = []
        self.written: set[int] = set()
        """Device blocks that get their contents from disk, swap_in or copy."""
        self.must_stay: set[int] = set()
        """Device blocks that a copy reads, or a swap_out that cannot be cancelled: swap_in must not
        write them."""
        self._overwritten: set[int] = set()  # read by one copy and written by a later one

    @property
    def being_saved(self) -> Set[int]:
        """Device blocks that swap_in may write only if their save is cancelled."""
        return self._optional.keys()

    def is_filled_now(self, host_block: int) -> bool:
        """Whether the host block gets its contents only in this step."""
        return host_block in self._swap_out

    # ------------------------------------------------------------------ adding

    def add_swap_in(self, host_block: int, block_id: int) -> None:
        self._swap_in[block_id] = host_block
        self.written.add(block_id)

    def add_load(self, key: HashKey, block_id: int) -> None:
        self.loads[block_id] = key
        self.written.add(block_id)

    def add_copy(self, source: int, block_id: int) -> None:
        if block_id in self.must_stay:
            self._overwritten.add(block_id)
        self._copies.append((source, block_id))
        self.written.add(block_id)
        self.must_stay.add(source)

    def add_swap_out(self, block_id: int, host_block: int, *, is_optional: bool) -> None:
        self.cancel_swap_out(host_block)
        self._swap_out[host_block] = block_id
        if is_optional:
            self._optional[block_id] = host_block
        else:
            self.must_stay.add(block_id)

    def require_swap_out(self, host_block: int) -> None:
        """If the host block is being filled, that may no longer be cancelled."""
        block_id = self._swap_out.get(host_block)
        if block_id is not None:
            self._optional.pop(block_id, None)
            self.must_stay.add(block_id)

    # ------------------------------------------------------------------ taking back

    def cancel_swap_out(self, host_block: int) -> None:
        """The host block is not filled after all, or is filled otherwise."""
        block_id = self._swap_out.pop(host_block, None)
        if block_id is not None and self._optional.get(block_id) == host_block:
            del self._optional[block_id]

    def cancel_save(self, block_id: int) -> int | None:
        """The device block is needed: returns the host block that will not be filled."""
        host_block = self._optional.pop(block_id, None)
        if host_block is not None:
            del self._swap_out[host_block]
        return host_block

    def on_reallocated(self, block_ids: list[int]) -> None:
        """Drop the copies into these device blocks that were meant for their earlier holder."""
        if not self.written:
            return
        for block_id in block_ids:
            if block_id in self.written and block_id not in self.must_stay:
                self.written.discard(block_id)
                self._swap_in.pop(block_id, None)
                self.loads.pop(block_id, None)
                self._copies = [pair for pair in self._copies if pair[1] != block_id]

    # ------------------------------------------------------------------ asking

    def origin(self, block_id: int) -> int | None:
        """Where the contents of a block are before the step's copies: the block itself, another
        device block or a host block. None where they are not known."""
        while block_id in self.written:
            source = next((pair[0] for pair in reversed(self._copies) if pair[1] == block_id), None)
            if source is None:
                return self._swap_in.get(block_id)  # not of a block that comes from disk
            if source in self._overwritten:
                return None
            block_id = source
        return block_id

    def take(self, disk: DiskMoves | None = None) -> CacheCopies:
        """All of them, once, with those of `loads` as part of `disk`."""
        copies = CacheCopies(
            swap_in=[(host_block, block_id) for block_id, host_block in self._swap_in.items()],
            swap_out=[(block_id, host_block) for host_block, block_id in self._swap_out.items()],
            copy=self._copies.copy(),
            disk=disk,
        )
        if self._swap_in or self._swap_out or self._copies or self.loads:
            self._clear()
        return copies

    # ------------------------------------------------------------------ invariants

    def check(self) -> None:
        """Assert that the lists may be carried out in their order, and overlap."""
        read = set(self._swap_out.values())
        assert not read & (self._swap_in.keys() | self.loads.keys())
        assert not set(self._swap_in.values()) & self._swap_out.keys()
        targets = {pair[1] for pair in self._copies}
        assert self._swap_in.keys() | self.loads.keys() | targets >= self.written
        for block_id, host_block in self._optional.items():
            assert self._swap_out[host_block] == block_id
