"""Names of KV blocks: of their tokens, all tokens before them, and what else their contents depend
on. The engine finds blocks by them, and a client knows which of its prompts an engine holds."""

from collections.abc import Sequence
from hashlib import blake2b

#     hash(0) = H(root, tokens of block 0)      root = H(weights, adapter, cache salt)
#     hash(i) = H(hash(i - 1), tokens of block i)
#
# H is BLAKE2b with all its 64 bytes, because a collision would show one tenant's text to another;
# with 16 tokens a block its input is exactly one of BLAKE2b's blocks.
_PLAIN_ROOT = blake2b(b"engine-core block root").digest()
BYTES_A_TOKEN = 4
KEY_BYTES = 8


def root_hash(*, adapter: str | None, cache_salt: str | None, weights: str = "") -> bytes:
    """What the first block is chained to.

    Args:
        adapter: its fingerprint.
        weights: a name of the weights that compute the blocks.
    """
    root = _PLAIN_ROOT
    if weights:
        root = blake2b(root + b"weights " + weights.encode()).digest()
    if adapter is None and cache_salt is None:
        return root
    # repr quotes and escapes, so that no two pairs are spelled alike (None is not 'None')
    return blake2b(root + repr((adapter, cache_salt)).encode()).digest()


def isolated_salt(nonce: str, tenant: str | None, cache_salt: str | None) -> str:
    """A salt that no other tenant has. `nonce`: the client's, which is a tenant of its own where
    the request names none."""
    # quoted, so that no two are spelled alike
    return repr((nonce if tenant is None else None, tenant, cache_salt))


def block_keys(root: bytes, token_bytes: bytes, block_size: int) -> list[int]:
    """The first KEY_BYTES of the hash of each whole block, as numbers: enough to know a block by,
    where a mistake costs only time.

    Args:
        token_bytes: of tokens from the first on, int32, little-endian.
    """
    keys, parent, size = [], root, block_size * BYTES_A_TOKEN
    for start in range(0, len(token_bytes) - size + 1, size):
        parent = blake2b(parent + token_bytes[start : start + size]).digest()
        keys.append(key_of(parent))
    return keys


def key_of(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:KEY_BYTES], "little")


def joined_keys(block_hashes: Sequence[bytes]) -> bytes:
    """Their keys on the wire: uint64, little-endian."""
    return b"".join([each[:KEY_BYTES] for each in block_hashes])
