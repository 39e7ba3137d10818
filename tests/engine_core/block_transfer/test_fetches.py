"""The receiving side without sockets: each transfer ends once, in time, and no wrong byte stays."""

from collections import Counter

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine_core.block_transfer.fetches import BrokenAnswer, Fetches
from engine_core.block_transfer.messages import BlocksFound, FetchRefused, checksum
from engine_core.kv_cache.transfers import Transfer

KEY = b"k" * 16
SOURCES = ("ipc://a", "ipc://b")
TIMEOUT_S = 10.0
encode = msgspec.msgpack.encode


def contents(key, block_bytes):
    group, block_hash = key
    return (block_hash + bytes([group])) * (block_bytes // 65 + 1)


def true_contents(key, block_bytes):
    return contents(key, block_bytes)[:block_bytes]


def hash_key(number):
    return number % 2, number.to_bytes(64, "little")


def answer_to(message, block_bytes, *, without=(), broken=()):
    """As an honest server answers, but for blocks that it lacks or that the way has changed."""
    found = [
        None if index in without else true_contents(key, block_bytes)
        for index, key in enumerate(message.blocks)
    ]
    checksums = [
        b"" if each is None else checksum(KEY, key, each)
        for key, each in zip(message.blocks, found, strict=True)
    ]
    frames = []
    for index, each in enumerate(found):
        if each is not None:
            frames.append(bytes([each[0] ^ 1]) + each[1:] if index in broken else each)
    return [encode(BlocksFound(message.number, checksums)), *frames]


class ReceivingMachine(RuleBasedStateMachine):
    @initialize(block_bytes=st.sampled_from([70, 400_000, 3_000_000]))
    def start(self, block_bytes):
        self.block_bytes = block_bytes
        self.fetches = Fetches(key=KEY, group_bytes=[block_bytes] * 3, timeout_s=TIMEOUT_S)
        self.now_s = 0.0
        self.begun = {}
        self.ended = Counter()
        self.asked = {source: [] for source in SOURCES}
        self.answered = []
        self.num_received = self.num_numbers = 0

    def take(self, source, frames):
        for key, each in self.fetches.on_answer(source, frames, self.now_s):
            assert each == true_contents(key, self.block_bytes)
            self.num_received += 1

    def lose(self, source, why):
        self.fetches.on_lost(source, why, self.now_s)
        self.asked[source].clear()

    @rule(source=st.sampled_from(SOURCES), num_blocks=st.integers(1, 40))
    def begin(self, source, num_blocks):
        numbers = range(self.num_numbers, self.num_numbers + num_blocks)
        self.num_numbers += num_blocks
        transfer = Transfer(source, [hash_key(number) for number in numbers])
        self.fetches.begin(transfer, self.now_s)
        self.begun[transfer] = self.now_s

    @rule(source=st.sampled_from(SOURCES))
    def ask(self, source):
        self.asked[source] += self.fetches.take_to_send(source)

    @precondition(lambda self: any(self.asked.values()))
    @rule(data=st.data())
    def answer(self, data):
        source = data.draw(st.sampled_from([each for each in SOURCES if self.asked[each]]))
        index = data.draw(st.integers(0, len(self.asked[source]) - 1))
        message = self.asked[source].pop(index)
        places = st.sets(st.integers(0, max(0, len(message.blocks) - 1)), max_size=3)
        frames = answer_to(
            message, self.block_bytes, without=data.draw(places), broken=data.draw(places)
        )
        frames = frames[
            : data.draw(st.integers(1, len(frames))) if data.draw(st.booleans()) else None
        ]
        self.take(source, frames)
        self.answered.append((source, frames))

    @precondition(lambda self: any(self.asked.values()))
    @rule()
    def refuse(self):
        source = next(each for each in SOURCES if self.asked[each])
        message = self.asked[source].pop()
        self.take(source, [encode(FetchRefused(message.number, "no"))])

    @precondition(lambda self: self.answered)
    @rule(data=st.data(), elsewhere=st.booleans())
    def answer_once_more(self, data, elsewhere):
        source, frames = data.draw(st.sampled_from(self.answered[-5:]))
        before = self.num_received
        if not elsewhere:
            self.take(source, frames)
            assert self.num_received == before

    @rule(source=st.sampled_from(SOURCES), frames=st.lists(st.binary(max_size=40), max_size=3))
    def send_garbage(self, source, frames):
        try:
            self.take(source, frames)
        except BrokenAnswer:
            self.lose(source, "corrupt")

    @rule(source=st.sampled_from(SOURCES))
    def lose_the_connection(self, source):
        self.lose(source, "lost")

    @rule(wait_s=st.sampled_from([0.1, 4.0, 11.0]))
    def wait(self, wait_s):
        self.now_s += wait_s
        for source in self.fetches.expire(self.now_s):
            self.lose(source, "late")

    @invariant()
    def each_ends_once_and_in_time(self):
        self.fetches.check()
        self.ended.update(self.fetches.take_ended())
        assert set(self.ended.values()) <= {1}
        for transfer, begun_s in self.begun.items():
            assert transfer in self.ended or self.now_s < begun_s + TIMEOUT_S
        deadline_s = self.fetches.next_deadline_s
        assert (deadline_s is None) == (len(self.ended) == len(self.begun))

    @invariant()
    def every_block_is_received_or_counted_as_failed(self):
        num_blocks = sum(len(each.keys) for each in self.ended)
        assert self.fetches.num_blocks == self.num_received
        known = self.num_received + sum(self.fetches.failures.values())
        assert num_blocks <= known <= self.num_numbers
        if len(self.ended) == len(self.begun):
            assert known == num_blocks


TestReceiving = ReceivingMachine.TestCase


def test_a_block_under_another_hash_or_of_another_model_is_not_taken():
    fetches = Fetches(key=KEY, group_bytes=[70] * 3, timeout_s=TIMEOUT_S)
    transfer = Transfer("ipc://a", [hash_key(1), hash_key(2), hash_key(3)])
    fetches.begin(transfer, 0.0)
    (message,) = fetches.take_to_send("ipc://a")
    right = [true_contents(key, 70) for key in message.blocks]
    sums = [
        checksum(KEY, hash_key(2), right[0]),  # the way has swapped two blocks
        checksum(b"j" * 16, hash_key(2), right[1]),
        checksum(KEY, hash_key(3), right[2]),
    ]
    found = fetches.on_answer("ipc://a", [encode(BlocksFound(message.number, sums)), *right], 1.0)
    assert found == [(hash_key(3), right[2])]
    assert fetches.failures == {"corrupt": 2}
    assert fetches.take_ended() == [transfer]


@pytest.mark.parametrize("frames", [[], [b""], [b"\x00" * 9], [encode([7, 1, []])]])
def test_what_is_no_answer_is_an_error(frames):
    with pytest.raises(BrokenAnswer, match="answer"):
        Fetches(key=KEY, group_bytes=[70] * 3, timeout_s=1.0).on_answer("ipc://a", frames, 0.0)
