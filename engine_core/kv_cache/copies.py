"""What the runner copies between blocks before a forward pass. Pairs of ids, no data."""

import dataclasses

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

    @property
    def is_empty(self) -> bool:
        return not (self.swap_in or self.swap_out or self.copy)
