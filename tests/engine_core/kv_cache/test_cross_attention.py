"""The table of an encoder's blocks: one a request, whole, counted, and given back by the last."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from paged_memory import Stream

from engine_core.kv_cache import AllocStatus, KVCacheGroupSpec, KVCacheManager
from tests.profiles import examples


def make_cache(num_blocks=12, block_size=4, **options):
    options = {"enable_prefix_caching": False, "watermark": 0.0, **options}
    groups = (KVCacheGroupSpec(), KVCacheGroupSpec(is_encoders=True))
    return KVCacheManager(num_blocks=num_blocks, block_size=block_size, groups=groups, **options)


def ask(cache, stream, head_room=0):
    hit = cache.find_cached_prefix(stream)
    return hit, cache.can_admit(stream, hit, max_chunk=8, head_room=head_room, is_resumed=False)


def admit(cache, stream):
    hit, status = ask(cache, stream)
    assert status is AllocStatus.OK
    cache.allocate_cached(stream, hit)
    assert cache.allocate_slots(stream, stream.num_tokens) is not None
    stream.num_computed_tokens = stream.num_tokens


def test_the_encoders_blocks_are_counted_when_a_request_asks_to_start():
    """Proves S144."""
    cache = make_cache(num_blocks=5)
    assert cache.num_encoder_blocks(9) == 3
    assert ask(cache, Stream("a", [1] * 8, num_encoder_tokens=9))[1] is AllocStatus.OK
    assert ask(cache, Stream("a", [1] * 8, num_encoder_tokens=13))[1] is AllocStatus.NEVER
    admit(cache, Stream("b", [1] * 4, num_encoder_tokens=5))
    assert cache.num_blocks_in_use == 3
    assert ask(cache, Stream("a", [1] * 4, num_encoder_tokens=9))[1] is AllocStatus.LATER


def test_samples_share_the_encoders_blocks_until_the_last_of_them_ends():
    cache = make_cache()
    first = Stream("a", [1] * 4, num_encoder_tokens=9)
    admit(cache, first)
    own, encoded = cache.block_ids(first)
    assert (len(own), len(encoded)) == (1, 3)
    second = Stream("a#1", [1] * 4, num_encoder_tokens=9)
    cache.fork(first, second, 4)
    assert cache.block_ids(second) == (own, encoded)
    assert cache.num_blocks_in_use == 4
    assert cache.held_blocks(second) == own + encoded
    hit = cache.find_cached_prefix(second)
    assert cache.num_freed_blocks([first], hit) == 0
    assert cache.num_freed_blocks([first, second], hit) == 4
    cache.free(first)
    assert cache.block_ids(second)[1] == encoded
    cache.free(second)
    cache.free(second)  # what ended twice gives nothing back twice
    assert cache.num_blocks_in_use == 0
    cache.check()


@pytest.mark.parametrize("num_encoder_tokens", [1, 4, 5])
def test_a_swapped_request_gets_other_blocks_for_its_encoder(num_encoder_tokens):
    cache = make_cache(num_host_blocks=4)
    stream = Stream("a", [1] * 6, num_encoder_tokens=num_encoder_tokens)
    admit(cache, stream)
    cache.take_copies()
    assert cache.swap_out([stream]) == 2
    assert cache.num_blocks_in_use == 0
    cache.take_copies()
    num_blocks = 2 + cache.num_encoder_blocks(num_encoder_tokens)
    assert cache.can_swap_in([stream], head_room=12 - num_blocks) is AllocStatus.OK
    assert cache.can_swap_in([stream], head_room=13 - num_blocks) is AllocStatus.LATER
    cache.swap_in([stream])
    assert cache.num_blocks_in_use == num_blocks
    cache.check([stream])


class CrossAttentionMachine(RuleBasedStateMachine):
    """Any order of arrivals, growth, forks and ends."""

    @initialize(num_blocks=st.integers(4, 30), block_size=st.sampled_from([1, 3, 4]))
    def start(self, num_blocks, block_size):
        self.cache = make_cache(num_blocks, block_size)
        self.streams: dict[str, Stream] = {}
        self.tables: dict[str, list[int]] = {}
        self.number = 0

    @rule(num_tokens=st.integers(1, 6), num_encoder_tokens=st.integers(1, 20))
    def arrive(self, num_tokens, num_encoder_tokens):
        self.number += 1
        name = f"r{self.number}"
        stream = Stream(name, [1] * num_tokens, num_encoder_tokens=num_encoder_tokens)
        if ask(self.cache, stream)[1] is AllocStatus.OK:
            admit(self.cache, stream)
            self.streams[name] = stream
            self.tables[name] = self.cache.block_ids(stream)[-1]
            num_blocks = self.cache.num_encoder_blocks(num_encoder_tokens)
            assert len(set(self.tables[name])) == num_blocks

    @precondition(lambda self: self.streams)
    @rule(data=st.data(), num_tokens=st.integers(1, 5))
    def grow(self, data, num_tokens):
        stream = self.streams[data.draw(st.sampled_from(sorted(self.streams)))]
        stream.tokens += [1] * num_tokens
        if self.cache.allocate_slots(stream, num_tokens) is None:
            del stream.tokens[-num_tokens:]
        else:
            stream.num_computed_tokens += num_tokens
        self.cache.take_copies()

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.streams[data.draw(st.sampled_from(sorted(self.streams)))]
        self.number += 1
        name = f"{parent.request_id}#{self.number}"
        child = Stream(
            name, parent.tokens.copy(), parent.num_computed_tokens,
            num_encoder_tokens=parent.num_encoder_tokens,
        )  # fmt: skip
        self.cache.fork(parent, child, parent.num_tokens)
        self.streams[name] = child

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def end(self, data):
        self.cache.free(self.streams.pop(data.draw(st.sampled_from(sorted(self.streams)))))

    @invariant()
    def tables_are_the_requests_own(self):
        self.cache.check(self.streams.values())
        held = {
            stream.request_id: self.tables[stream.request_id] for stream in self.streams.values()
        }
        for stream in self.streams.values():
            assert self.cache.block_ids(stream)[-1] == held[stream.request_id]
        blocks = [block for table in held.values() for block in table]
        assert len(blocks) == len(set(blocks))
        tables = [b for s in self.streams.values() for b in self.cache.block_ids(s)[0]]
        assert not set(tables) & set(blocks)
        assert self.cache.num_blocks_in_use == len(set(tables) | set(blocks))

    def teardown(self):
        for stream in getattr(self, "streams", {}).values():
            self.cache.free(stream)
        if hasattr(self, "cache"):
            assert self.cache.num_blocks_in_use == 0


TestCrossAttentionMachine = CrossAttentionMachine.TestCase
TestCrossAttentionMachine.settings = settings(max_examples=examples(60), stateful_step_count=25)
