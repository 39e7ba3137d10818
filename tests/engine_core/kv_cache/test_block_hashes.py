"""Block hashes against hashlib spelled out by hand."""

import struct
from hashlib import sha256

from engine_core.kv_cache.block_hashes import extend_block_hashes, root_hash


def hashes_of(tokens, num_full=None, block_size=4, **extra):
    hashes = []
    num_full = len(tokens) // block_size if num_full is None else num_full
    options = {"adapter": None, "cache_salt": None, **extra}
    extend_block_hashes(hashes, tokens, num_full, block_size, **options)
    return hashes


def test_each_hash_chains_sha256_over_the_parent_and_int32_tokens():
    """Proves S028, S161."""
    parent = root_hash(adapter=None, cache_salt=None)
    expected = []
    for block in ([1, 2, 3, 4], [5, 6, 7, 2**31 - 1]):
        parent = sha256(parent + struct.pack("=4i", *block)).digest()
        expected.append(parent)
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 2**31 - 1, 9]) == expected


def test_extending_step_by_step_gives_the_same_and_hashes_nothing_twice():
    hashes = []
    tokens = list(range(23))
    for count in (0, 1, 1, 3, 5):
        before = list(hashes)
        extend_block_hashes(hashes, tokens, count, 4, adapter=None, cache_salt=None)
        assert hashes[: len(before)] == before
    assert hashes == hashes_of(tokens)


def test_same_tokens_elsewhere_under_another_salt_or_adapter_have_another_hash():
    """Proves S027, S152, S162."""
    block = [1, 2, 3, 4]
    repeated = hashes_of(block * 3)
    salted = hashes_of(block * 3, cache_salt="a")
    adapted = hashes_of(block * 3, adapter="a")
    named_none = hashes_of(block * 3, cache_salt="None")
    empty = hashes_of(block * 3, cache_salt="")
    everything = repeated + salted + adapted + named_none + empty
    assert len(set(everything)) == len(everything)
