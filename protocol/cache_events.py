"""What an engine tells clients that ask for it (WatchCache): which blocks its prefix cache holds,
and how much others have it do. At most one message a step, and none where nothing has changed."""

from protocol.base import Message
from protocol.block_hashes import KEY_BYTES

MAX_SNAPSHOT_BLOCKS = 2**17
"""Of the first message: 1 MiB. Blocks that were stored earlier go first: a prompt's head is one."""


class BlockNaming(Message, frozen=True):
    """How an engine names the blocks of this client's prompts, see `protocol.block_hashes`."""

    block_size: int
    weights: str = ""
    nonce: str | None = None
    """If given, tenants are isolated, and this stands for a tenant in requests without one."""
    tenant: str | None = None
    """The tenant of this client's requests that name none."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}, it must be at least 1")


class CacheEvents(Message, frozen=True, tag=10):
    """Blocks are named by `protocol.block_hashes.block_keys`: no tokens are told."""

    number: int
    """One more than that of the client's last one; otherwise some were lost: ask for all again."""
    stored: bytes
    """Keys of blocks that are found now, on the device or in host memory."""
    removed: bytes
    """Keys of blocks that are not found any more."""
    others_load: int
    """What unfinished requests of other clients have the engine do, in tokens (`load_of`)."""
    naming: BlockNaming | None = None
    """If given, all was cleared before, and `stored` is everything."""

    def __post_init__(self) -> None:
        if len(self.stored) % KEY_BYTES or len(self.removed) % KEY_BYTES:
            raise ValueError(f"stored and removed are no keys of {KEY_BYTES} bytes")


_SEQUENCE_TOKENS = 128


def load_of(num_prompt_tokens: int, num_sequences: int = 1) -> int:
    """What an unfinished request adds to its engine's load, in tokens: those of its prompt that
    are not cached there, and for each sequence what running beside it costs others. How long
    answers get is not known."""
    return num_prompt_tokens + _SEQUENCE_TOKENS * num_sequences
