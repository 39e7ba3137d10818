"""Block hashes against hashlib spelled out by hand."""

import struct
from hashlib import blake2b

from hypothesis import given
from hypothesis import strategies as st

from engine_core.kv_cache import ContentSpan
from engine_core.kv_cache.block_hashes import extend_block_hashes
from protocol.block_hashes import root_hash


def hashes_of(tokens, block_size=4, adapter=None, cache_salt=None, spans=()):
    hashes = []
    root = root_hash(adapter=adapter, cache_salt=cache_salt)
    tokens = tokens[: len(tokens) // block_size * block_size]
    extend_block_hashes(hashes, root, struct.pack(f"<{len(tokens)}i", *tokens), block_size, spans)
    return hashes


def test_each_hash_chains_blake2b_over_the_parent_and_int32_tokens():
    """Proves S028, S161."""
    parent = root_hash(adapter=None, cache_salt=None)
    expected = []
    for block in ([1, 2, 3, 4], [5, 6, 7, 2**31 - 1]):
        parent = blake2b(parent + struct.pack("<4i", *block)).digest()
        expected.append(parent)
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 2**31 - 1]) == expected


def test_a_block_hashes_the_part_of_each_content_span_that_it_has():
    """Position in the block, length, offset in the span, the content's hash. Proves S020, S028."""
    first, second = bytes(range(32)), bytes(range(32, 64))
    spans = [ContentSpan(1, 3, first), ContentSpan(3, 10, second)]
    parts = [
        struct.pack("<IIQ", 1, 2, 0) + first + struct.pack("<IIQ", 3, 1, 0) + second,
        struct.pack("<IIQ", 0, 4, 1) + second,
        struct.pack("<IIQ", 0, 2, 5) + second,
        b"",
    ]
    parent, expected, tokens = root_hash(adapter=None, cache_salt=None), [], range(16)
    for number, part in enumerate(parts):
        block = struct.pack("<4i", *tokens[4 * number : 4 * number + 4])
        parent = blake2b(parent + block + part).digest()
        expected.append(parent)
    assert hashes_of(tokens, spans=spans) == expected
    later = expected[:2]  # of a request whose first blocks were hashed before
    extend_block_hashes(later, later[-1], struct.pack("<8i", *tokens[8:]), 4, spans)
    assert later == expected


CUTS = st.lists(st.integers(0, 40), min_size=2, max_size=8, unique=True).map(sorted)


@given(
    st.lists(st.integers(0, 1), min_size=40, max_size=40),
    CUTS,
    CUTS,
    st.lists(st.integers(0, 2), min_size=8, max_size=8),
    st.lists(st.integers(0, 2), min_size=8, max_size=8),
    st.sampled_from([1, 3, 4, 16]),
)
def test_blocks_are_equal_as_long_as_all_before_them_is_and_no_longer(
    tokens, cuts, other_cuts, contents, other_contents, block_size
):
    """Spans lie anywhere, across borders of blocks and side by side. Proves S020."""
    all_spans, meanings = [], []
    for each_cuts, each_contents in ((cuts, contents), (other_cuts, other_contents)):
        pairs = [*zip(each_cuts[::2], each_cuts[1::2], strict=False)]
        spans = [ContentSpan(*pair, bytes([each_contents[i]] * 32)) for i, pair in enumerate(pairs)]
        all_spans.append(spans)
        meaning = [(token,) for token in tokens]
        for span in spans:
            for position in range(span.start, span.stop):
                where = position - span.start
                meaning[position] += (where, position == span.start, span.content_hash)
        meanings.append(meaning)
    one, other = (hashes_of(tokens, block_size, spans=spans) for spans in all_spans)
    for number in range(40 // block_size):
        stop = (number + 1) * block_size
        is_same = meanings[0][:stop] == meanings[1][:stop]
        assert (one[number] == other[number]) == is_same


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
