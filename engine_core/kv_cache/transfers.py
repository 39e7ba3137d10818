"""Prompts whose blocks another engine has computed: what of them is to be fetched."""

import dataclasses

from engine_core.kv_cache.host_pool import HashKey


@dataclasses.dataclass(eq=False, slots=True)
class Transfer:
    """Of one request. It ends once: then what came is in the prefix cache's third tier, and the
    rest is computed.

        not begun --missing blocks known--> to_begin --taken--> under way --> over
    """

    source: str
    """The address at which the other engine gives its blocks away."""
    keys: list[HashKey] = dataclasses.field(default_factory=list)
    """Keys of the blocks to be fetched, by rising logical block."""
    has_begun: bool = False
    is_over: bool = False


class Transfers:
    """Between the scheduler, which lets requests wait, and the thread that fetches."""

    def __init__(self) -> None:
        self.to_begin: list[Transfer] = []
        """Emptied by who fetches them, whatever becomes of the plan."""
        self.num_under_way = 0

    def why_wait(self, transfer: Transfer) -> str | None:
        """None: it is over."""
        if transfer.is_over:
            return None
        return f"{len(transfer.keys)} blocks of its prompt come from {transfer.source}"

    def begin(self, transfer: Transfer, keys: list[HashKey]) -> None:
        """These blocks are missing."""
        transfer.has_begun, transfer.keys = True, keys
        transfer.is_over = not keys
        if keys:
            self.num_under_way += 1
            self.to_begin.append(transfer)

    def end(self, transfer: Transfer) -> None:
        """The last block has come, or is given up."""
        assert not transfer.is_over, "a transfer ends once"
        transfer.is_over = True
        self.num_under_way -= 1
