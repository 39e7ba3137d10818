"""Names for the contents of full blocks. Knows tokens, not blocks.

    hash(0) = H(root, tokens of block 0)      root = H(adapter, cache salt)
    hash(i) = H(hash(i - 1), tokens of block i)

So a hash covers all tokens before it and whatever else changes their keys and values. H is
BLAKE2b with all its 64 bytes, because a collision would show one tenant's text to another; with
16 tokens a block its input is exactly one of BLAKE2b's blocks. All parts of the input have a fixed
length, so that no two inputs are spelled alike.
"""

from hashlib import blake2b

_PLAIN_ROOT = blake2b(b"engine-core block root").digest()
BYTES_A_TOKEN = 4


def root_hash(*, adapter: str | None, cache_salt: str | None) -> bytes:
    """What the first block is chained to."""
    if adapter is None and cache_salt is None:
        return _PLAIN_ROOT
    # repr quotes and escapes, so that no two pairs are spelled alike (None is not 'None')
    return blake2b(_PLAIN_ROOT + repr((adapter, cache_salt)).encode()).digest()


def extend_block_hashes(
    hashes: list[bytes], parent: bytes, token_bytes: bytes, block_size: int
) -> None:
    """Append the hashes of the whole blocks in `token_bytes`, which follow on `parent`.

    Args:
        token_bytes: int32, little-endian.
    """
    num_bytes = block_size * BYTES_A_TOKEN
    append = hashes.append
    for start in range(0, len(token_bytes), num_bytes):
        parent = blake2b(parent + token_bytes[start : start + num_bytes]).digest()
        append(parent)
