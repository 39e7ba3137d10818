"""Names of blocks are equal on both sides."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.kv_cache.block_hashes import extend_block_hashes
from protocol.block_hashes import block_keys, isolated_salt, joined_keys, root_hash
from protocol.cache_events import CacheEvents
from protocol.codec import decode_engine_message, encode
from protocol.errors import MalformedMessage

NAME = st.one_of(st.none(), st.text(max_size=5))


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=70),
    block_size=st.integers(1, 20),
    adapter=NAME,
    salt=NAME,
    weights=st.text(max_size=3),
)
def test_a_client_names_whole_blocks_as_the_cache_does(tokens, block_size, adapter, salt, weights):
    root = root_hash(adapter=adapter, cache_salt=salt, weights=weights)
    token_bytes, hashes = array("i", tokens).tobytes(), []
    num_whole = len(tokens) // block_size
    extend_block_hashes(hashes, root, token_bytes[: 4 * num_whole * block_size], block_size)
    keys = block_keys(root, token_bytes, block_size)
    assert keys == list(memoryview(joined_keys(hashes)).cast("Q"))
    assert len(keys) == num_whole


def test_isolated_salts_differ_by_tenant_and_by_client_without_one():
    salts = [
        isolated_salt(nonce, tenant, salt)
        for nonce in ("n", "m")
        for tenant in (None, "a", "None")
        for salt in (None, "x")
    ]
    assert len(set(salts)) == 2 * 2 + 2 * 2, "the nonce counts where there is no tenant"


def test_keys_that_are_cut_are_no_message():
    events = CacheEvents(number=0, stored=b"", removed=b"", others_load=0)
    cut = encode(events).replace(b"\xc4\x00", b"\xc4\x01a", 1)
    with pytest.raises(MalformedMessage, match="no keys of 8 bytes"):
        decode_engine_message(cut)
    assert decode_engine_message(encode(events)) == events
