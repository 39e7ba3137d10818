"""A block for many decodes at once is what one call of allocate_slots for each would have done."""

import random

import pytest
from paged_memory import Stream, hit_of, make_cache

from engine_core.kv_cache import ContentSpan, KVCacheGroupSpec

BLOCK_SIZE = 4


def decode(cache, streams, token, *, together: bool) -> None:
    """One step: each stream computes its last token and gets the next one. `token`: of a stream."""
    full = [s for s in streams if s.num_computed_tokens % BLOCK_SIZE == 0]
    found = {}
    if together and full:
        indexes = [s.num_computed_tokens // BLOCK_SIZE for s in full]
        contents = [
            s.token_bytes(s.num_computed_tokens - BLOCK_SIZE, s.num_computed_tokens) for s in full
        ]
        found = cache.next_blocks.allocate(full, indexes, b"".join(contents))
        for place, block_id in found.items():
            assert cache.block_ids(full[place])[0][-1] == block_id
    done = {full[place].sequence_id for place in found}
    for stream in streams:
        if stream.sequence_id not in done:
            assert cache.allocate_slots(stream, 1) is not None
        stream.num_computed_tokens += 1
        stream.tokens.append(token(stream))
    cache.take_copies()
    cache.check(streams)


def started(cache, prompts, **options) -> list[Stream]:
    streams = [Stream(f"s{i}", list(prompt), **options) for i, prompt in enumerate(prompts)]
    for stream in streams:
        assert cache.allocate_slots(stream, stream.num_tokens) is not None
        stream.num_computed_tokens = stream.num_tokens
        stream.tokens.append(1)
    cache.take_copies()
    return streams


def seen(cache, streams):
    """What requests and the scheduler can tell of the cache."""
    return (
        [len(cache.block_ids(stream)[0]) for stream in streams],
        [hit_of(cache, [*stream.tokens, 0]).num_tokens for stream in streams],
        [stream.block_hashes for stream in streams],
        (cache.num_blocks_in_use, cache.num_blocks_free, cache.num_deduplicated_blocks),
    )


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_many_at_once_leave_the_cache_as_one_by_one(seed, caching):
    """Few different tokens, so that equal blocks are found and replaced; blocks are evicted."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(2) for _ in range(chance.randint(1, 13))] for _ in range(6)]
    tokens = [[chance.randrange(2) for _ in range(20)] for _ in range(6)]
    states = []
    for together in (False, True):
        cache = make_cache(num_blocks=70, enable_prefix_caching=caching)
        gone = started(cache, [[5, *prompt] for prompt in prompts])
        for stream in gone:
            cache.free(stream)
        streams = started(cache, prompts)
        for step in range(20):
            decode(
                cache,
                streams,
                lambda stream, step=step: tokens[int(stream.sequence_id[1:])][step],
                together=together,
            )
        states.append(seen(cache, streams))
    assert states[0] == states[1]


def test_the_ordinary_case_is_not_left_over():
    cache = make_cache(num_blocks=70)
    streams = started(cache, [[i] * 8 for i in range(5)])
    contents = b"".join(stream.token_bytes(4, 8) for stream in streams)
    assert len(cache.next_blocks.allocate(streams, [2] * 5, contents)) == 5
    assert [update.num_blocks for update in map(cache._blocks_of.get, ["s0", "s1"])] == [3, 3]


@pytest.mark.parametrize("case", ["span", "equal block", "hashes are missing"])
def test_what_is_special_is_left_as_it_was(case):
    cache = make_cache(num_blocks=70)
    spans = (ContentSpan(4, 5, bytes(32)),) if case == "span" else ()
    stream, other = started(cache, [[1] * 6, [9] * 8], content_spans=spans)
    for token in (1, 1):
        decode(cache, [stream], lambda _, token=token: token, together=False)
    stream.tokens[:9] = [1] * 9
    if case == "equal block":
        twin = Stream("twin", [1] * 9)
        assert cache.allocate_slots(twin, 9) is not None
    if case == "hashes are missing":
        stream.block_hashes.clear()
    before = cache.block_ids(stream)
    contents = stream.token_bytes(4, 8) + other.token_bytes(4, 8)
    found = cache.next_blocks.allocate([stream, other], [2, 2], contents)
    assert list(found) == ([] if case == "span" else [1])
    assert cache.block_ids(stream) == before
    assert cache.allocate_slots(stream, 1) is not None
    stream.num_computed_tokens += 1
    cache.check([stream])


def test_tables_of_several_groups_or_windows_go_one_by_one():
    for groups in ((KVCacheGroupSpec(8),), (KVCacheGroupSpec(),) * 2):
        assert make_cache(groups=groups).next_blocks is None
