"""Names for the contents of full blocks. Knows tokens, not blocks.

    hash(0) = H(root, tokens of block 0)      root = H(adapter, cache salt)
    hash(i) = H(hash(i - 1), tokens of block i)

So a hash covers all tokens before it and whatever else changes their keys and values. It is
SHA-256, because a collision would show one tenant's text to another; all parts of the input have
a fixed length, so that no two inputs are spelled alike.
"""

from array import array
from collections.abc import Sequence
from hashlib import sha256

_PLAIN_ROOT = sha256(b"engine-core block root").digest()
_BYTES_A_TOKEN = 4


def root_hash(*, adapter: str | None, cache_salt: str | None) -> bytes:
    """What the first block is chained to."""
    if adapter is None and cache_salt is None:
        return _PLAIN_ROOT
    # repr quotes and escapes, so that no two pairs are spelled alike (None is not 'None')
    return sha256(_PLAIN_ROOT + repr((adapter, cache_salt)).encode()).digest()


def extend_block_hashes(
    hashes: list[bytes],
    token_ids: Sequence[int],
    num_full_blocks: int,
    block_size: int,
    *,
    adapter: str | None,
    cache_salt: str | None,
) -> None:
    """Append to `hashes` until it covers the first `num_full_blocks` blocks of `token_ids`.

    Each block is hashed once in a request's life. Token ids fit int32.
    """
    first = len(hashes)
    if first >= num_full_blocks:
        return
    new_tokens = array("i", token_ids[first * block_size : num_full_blocks * block_size])
    assert new_tokens.itemsize == _BYTES_A_TOKEN
    data = new_tokens.tobytes()
    num_bytes = block_size * _BYTES_A_TOKEN
    parent = hashes[-1] if hashes else root_hash(adapter=adapter, cache_salt=cache_salt)
    for start in range(0, len(data), num_bytes):
        parent = sha256(parent + data[start : start + num_bytes]).digest()
        hashes.append(parent)
