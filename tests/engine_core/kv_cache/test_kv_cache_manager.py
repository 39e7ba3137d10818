"""Block tables of requests: allocation, windows, prefix hits, eviction."""

import dataclasses

import pytest

from engine_core.kv_cache import AllocStatus, KVCacheGroupSpec, KVCacheManager

FULL = KVCacheGroupSpec()


@dataclasses.dataclass
class Tokens:
    """All that the cache reads of a request."""

    request_id: str
    all_token_ids: list[int]
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = dataclasses.field(default_factory=list)
    cache_salt: str | None = None
    adapter: str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def compute(cache, request, num_tokens=None):
    num_tokens = num_tokens or request.num_tokens - request.num_computed_tokens
    blocks = cache.allocate_slots(request, num_tokens)
    if blocks is not None:
        request.num_computed_tokens += num_tokens
    cache.check([request] if blocks is not None else ())
    return blocks


def hit_of(cache, tokens, **options):
    return cache.find_cached_prefix(Tokens("probe", tokens, **options))


def make_cache(num_blocks=20, block_size=4, **options):
    return KVCacheManager(num_blocks=num_blocks, block_size=block_size, **options)


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3), (63, 16)]
)
def test_a_request_takes_as_many_blocks_as_its_tokens_need(num_tokens, num_blocks):
    """Proves S145, S171, S173."""
    cache = make_cache()
    request = Tokens("a", list(range(num_tokens)))
    (blocks,) = compute(cache, request)
    assert len(blocks) == num_blocks == cache.num_blocks_in_use
    assert cache.block_ids(request) == (blocks,)
    cache.free(request)
    assert cache.num_blocks_in_use == 0
    cache.free(request)
    cache.check()


def test_without_room_nothing_is_taken():
    """Proves S153, S171."""
    cache = make_cache(num_blocks=2)
    request = Tokens("a", list(range(9)))
    assert compute(cache, request) is None
    assert cache.num_blocks_in_use == 0
    assert compute(cache, request, 8) is not None


@pytest.mark.parametrize(
    ("num_tokens", "num_hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (30, 12)]
)
def test_a_hit_is_whole_blocks_and_never_the_last_token(num_tokens, num_hit):
    """Proves S162, S180."""
    cache = make_cache()
    compute(cache, Tokens("a", list(range(15))))
    hit = hit_of(cache, list(range(num_tokens)))
    assert hit.num_tokens == num_hit
    assert len(hit.block_ids[0]) == num_hit // 4


def test_another_salt_adapter_or_first_token_shares_nothing():
    """Proves S027, S162."""
    cache = make_cache()
    tokens = list(range(12))
    compute(cache, Tokens("a", tokens))
    assert hit_of(cache, tokens).num_tokens == 8
    assert hit_of(cache, tokens, cache_salt="x").num_tokens == 0
    assert hit_of(cache, tokens, adapter="x").num_tokens == 0
    assert hit_of(cache, [99, *tokens[1:]]).num_tokens == 0
    assert hit_of(cache, [*tokens[:4], 99, *tokens[5:]]).num_tokens == 4


def test_prefix_caching_can_be_switched_off():
    """Proves S174."""
    cache = make_cache(enable_prefix_caching=False)
    request = Tokens("a", list(range(12)))
    compute(cache, request)
    assert hit_of(cache, request.all_token_ids).num_tokens == 0
    cache.free(request)
    assert (cache.num_blocks_cached, request.block_hashes) == (0, [])


def test_drafts_take_slots_but_never_become_findable():
    cache = make_cache()
    request = Tokens("a", [1, 2, 3])
    compute(cache, request, 6)
    assert cache.num_blocks_in_use == 2
    assert hit_of(cache, [1, 2, 3, 0, 0]).num_tokens == 0
    # one draft was accepted and another token came: the first block is full of real tokens
    request.all_token_ids += [4, 5]
    request.num_computed_tokens = 4
    compute(cache, request, 1)
    assert hit_of(cache, [1, 2, 3, 4, 9]).num_tokens == 4


def test_the_tail_is_evicted_before_the_head():
    """Proves S165."""
    cache = make_cache(num_blocks=4)
    request = Tokens("a", list(range(16)))
    compute(cache, request)
    cache.free(request)
    compute(cache, Tokens("b", [77] * 8))
    assert hit_of(cache, list(range(17))).num_tokens == 8


def test_freed_blocks_stay_findable_until_the_cache_is_reset():
    cache = make_cache()
    holder, gone = Tokens("a", [1] * 9), Tokens("b", [2] * 9)
    compute(cache, holder)
    compute(cache, gone)
    cache.free(gone)
    assert (cache.num_blocks_cached, cache.num_blocks_in_use, cache.num_blocks_free) == (2, 3, 17)
    assert cache.reset_prefix_cache() == 2
    assert hit_of(cache, [2] * 9).num_tokens == 0
    assert hit_of(cache, [1] * 9).num_tokens == 8
    cache.check([holder])


def test_a_sliding_group_drops_what_no_token_can_read_any_more():
    """Window 5, blocks of 4, about to compute position 12: it reads from 8 on. Proves S146,
    S175."""
    cache = make_cache(groups=(FULL, KVCacheGroupSpec(5)))
    request = Tokens("a", list(range(12)))
    compute(cache, request)
    assert cache.num_blocks_in_use == 6
    request.all_token_ids.append(12)
    compute(cache, request)
    full, sliding = cache.block_ids(request)
    assert 0 not in full
    assert sliding[:2] == [0, 0]
    assert 0 not in sliding[2:]
    assert cache.num_blocks_in_use == 6


def test_a_sliding_group_needs_only_its_window_before_the_boundary():
    cache = make_cache(groups=(FULL, KVCacheGroupSpec(5)))
    request = Tokens("a", list(range(13)))
    compute(cache, request)
    tables = cache.block_ids(request)
    hit = hit_of(cache, list(range(13)))
    assert hit.num_tokens == 12
    assert hit.block_ids == (tables[0][:3], [0, 0, tables[1][2]])


def test_a_boundary_whose_window_is_gone_is_not_a_hit():
    cache = make_cache(num_blocks=40, groups=(FULL, KVCacheGroupSpec(6)))
    request = Tokens("a", list(range(17)))
    compute(cache, request)
    # the sliding group loses block 2: boundaries 12 and 16 need it, 8 does not
    cache._pool.forget([cache.block_ids(request)[1][2]])
    assert hit_of(cache, list(range(20))).num_tokens == 8


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_the_peak_of_a_sliding_group_is_never_passed(window):
    spec = KVCacheGroupSpec(window)
    for block_size in (1, 2, 3, 4):
        for chunk in (1, 2, 3, 7):
            cache = make_cache(num_blocks=99, block_size=block_size, groups=(spec,))
            request = Tokens("a", list(range(40)))
            peak = spec.num_peak_blocks(40, chunk, block_size)
            while request.num_computed_tokens < 40:
                compute(cache, request, min(chunk, 40 - request.num_computed_tokens))
                assert cache.num_blocks_in_use <= peak


def test_can_admit_answers_now_later_or_never():
    """Proves S134, S135."""
    cache = make_cache(num_blocks=10, watermark=0.1)

    def ask(num_tokens, num_promised):
        request = Tokens("b", [5] * num_tokens)
        hit = cache.find_cached_prefix(request)
        return cache.can_admit(request, hit, max_chunk=8, num_promised=num_promised)

    assert ask(40, None) is AllocStatus.OK
    assert ask(41, None) is AllocStatus.NEVER
    assert ask(40, 0) is AllocStatus.LATER
    assert ask(36, 0) is AllocStatus.OK
    assert ask(36, 1) is AllocStatus.LATER
    compute(cache, Tokens("a", [5] * 24))
    # four of ten are free; five of the six blocks needed are shared with a
    assert ask(24, 0) is AllocStatus.OK
    assert ask(36, 1) is AllocStatus.LATER


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"groups": ()}, "groups is empty"),
        ({"num_blocks": 0}, "num_blocks is 0"),
    ],
)
def test_limits_are_checked_with_their_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        make_cache(**options)


def test_a_window_below_one_is_refused():
    with pytest.raises(ValueError, match="sliding_window is 0"):
        KVCacheGroupSpec(0)
