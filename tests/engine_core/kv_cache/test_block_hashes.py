"""Block hashes against hashlib spelled out by hand."""

import struct
from hashlib import blake2b

from engine_core.kv_cache.prefix_cache import extend_block_hashes, root_hash


def hashes_of(tokens, block_size=4, adapter=None, cache_salt=None):
    hashes = []
    root = root_hash(adapter=adapter, cache_salt=cache_salt)
    extend_block_hashes(hashes, root, struct.pack(f"<{len(tokens)}i", *tokens), block_size)
    return hashes


def test_each_hash_chains_blake2b_over_the_parent_and_int32_tokens():
    """Proves S028, S161."""
    parent = root_hash(adapter=None, cache_salt=None)
    expected = []
    for block in ([1, 2, 3, 4], [5, 6, 7, 2**31 - 1]):
        parent = blake2b(parent + struct.pack("<4i", *block)).digest()
        expected.append(parent)
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 2**31 - 1]) == expected


def test_hashes_go_on_from_the_last_one():
    tokens = list(range(24))
    hashes = hashes_of(tokens[:8])
    extend_block_hashes(hashes, hashes[-1], struct.pack("<16i", *tokens[8:]), 4)
    assert hashes == hashes_of(tokens)


def test_same_tokens_elsewhere_under_another_salt_or_adapter_have_another_hash():
    """Proves S027, S152, S162, S209."""
    block = [1, 2, 3, 4]
    repeated = hashes_of(block * 3)
    salted = hashes_of(block * 3, cache_salt="a")
    adapted = hashes_of(block * 3, adapter="a")
    named_none = hashes_of(block * 3, cache_salt="None")
    empty = hashes_of(block * 3, cache_salt="")
    everything = repeated + salted + adapted + named_none + empty
    assert len(set(everything)) == len(everything)
