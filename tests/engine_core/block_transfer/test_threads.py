"""Blocks between two stores over real sockets: what comes is what was kept, whatever the way does;
all else is given up, with its reason, and never waited for."""

import contextlib
import threading
import time
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from engine_core.block_transfer import BlockMemory, Fetches, TransferStore
from engine_core.block_transfer.fetcher import BlockFetcher
from engine_core.block_transfer.messages import BlocksFound, FetchBlocks, FetchRefused
from engine_core.block_transfer.server import BlockServer
from engine_core.kv_cache.transfers import Transfer
from engine_core.server.keys import KeyFolder
from engine_core.server.transport import ZmqTransport
from protocol.keys import ClientKey, read_secret_file
from tests.protocol.sample_messages import STATISTICS

BLOCK_BYTES = 100_000
KEY = b"k" * 16
EMPTY_STEP = SimpleNamespace(plan=SimpleNamespace(total_num_scheduled_tokens=0))


def key(number):
    return 0, bytes([number]) * 64


def contents(number):
    return bytes([number]) * BLOCK_BYTES


def memory(num_blocks=100):
    return BlockMemory(limit_bytes=num_blocks * BLOCK_BYTES, block_bytes=BLOCK_BYTES)


@contextlib.contextmanager
def giving(address, *numbers, keys=None, model=KEY):
    """A store that has these blocks and gives them away."""
    store = TransferStore(memory(), keeps=True)
    for number in numbers:
        store.memory.put(key(number), contents(number))
    store.server = BlockServer(ZmqTransport(address, keys=keys), store.memory, key=model)
    try:
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def fetching(*sources, client_key=None, timeout_s=20.0, num_blocks=100):
    store = TransferStore(memory(num_blocks), keeps=False)
    store.fetcher = BlockFetcher(
        Fetches(key=KEY, group_bytes=[BLOCK_BYTES], timeout_s=timeout_s),
        sources=sources,
        key=client_key,
        block_bytes=BLOCK_BYTES,
        on_block=store.on_block,
        on_end=store.on_end,
    )
    try:
        yield store
    finally:
        store.close()


def fetched(store, source, *numbers):
    """Which of them came, once the transfer is over; those are whole."""
    transfer = Transfer(source)
    store.transfers.begin(transfer, [key(number) for number in numbers])
    store.on_plan(EMPTY_STEP.plan, 0.0)
    deadline_s = time.monotonic() + 60
    while not transfer.is_over:
        assert time.monotonic() < deadline_s
        store.on_step(EMPTY_STEP)
    assert not store.transfers.num_under_way
    found = {number: store.memory.get(key(number)) for number in numbers}
    assert all(each in (None, contents(number)) for number, each in found.items())
    came = [number for number, each in found.items() if each is not None]
    assert [number for number in numbers if key(number) in store.tier] == came
    return came


def failures(store):
    return store.add_statistics(STATISTICS).num_kv_blocks_failed


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/blocks"


def test_blocks_that_are_there_come_and_the_others_are_absent(address):
    with giving(address, *range(1, 61)) as store, fetching(store.server.address) as other:
        source = store.server.address
        assert fetched(other, source, *range(40, 70)) == [*range(40, 61)]
        assert fetched(other, source, *range(1, 5)) == [1, 2, 3, 4]
        while store.add_statistics(STATISTICS).num_kv_blocks_sent < 25:
            time.sleep(0.01)  # what is sent is counted behind it
        sent, received = (each.add_statistics(STATISTICS) for each in (store, other))
    assert sent.num_kv_blocks_sent == received.num_kv_blocks_received == 25
    assert sent.num_kv_bytes_sent == received.num_kv_bytes_received == 25 * BLOCK_BYTES
    assert failures(other) == {"absent": 9}
    assert received.kv_receive_s > 0


def test_a_block_that_is_kept_while_it_is_asked_for_comes(address):
    with giving(address, 1) as store, fetching(address) as other:
        kept = threading.Timer(0.05, store.memory.put, (key(2), contents(2)))
        kept.start()
        assert fetched(other, address, 1, 2) == [1, 2]
        kept.join()


def test_both_sides_keep_to_their_memory(address):
    with giving(address, *range(1, 100)) as store, fetching(address, num_blocks=16) as other:
        came = fetched(other, address, *range(1, 100))
        assert came == [*range(84, 100)]
        assert len(other.memory) == 16
        store.tier.saving.update(map(key, range(100, 250)))
        for number in range(100, 250):
            store.save(key(number), 0, contents(number))
        assert len(store.memory) == 100
        assert key(1) not in store.tier
        assert key(249) in store.tier
        assert fetched(other, address, 1, 249) == [249]


def test_an_engine_of_another_model_is_refused(address):
    with giving(address, 1, model=b"j" * 16) as store, fetching(address) as other:
        assert fetched(other, address, 1) == []
        assert failures(other) == {"refused": 1}
        assert failures(store) == {"refused": 1}


def test_an_address_that_the_operator_did_not_name_is_not_fetched_from(address):
    with giving(address, 1), fetching("ipc://elsewhere") as other:
        assert fetched(other, address, 1) == []
        assert failures(other) == {"unknown source": 1}


def test_only_admins_keys_get_blocks_over_tcp(tmp_path):
    folder = KeyFolder(tmp_path / "keys")
    folder.make()
    keys = [
        read_secret_file(folder.add(name, is_admin=is_admin), ClientKey)
        for name, is_admin in (("decode", True), ("user", False))
    ]
    with giving("tcp://127.0.0.1:*", 1, keys=folder) as store:
        source = store.server.address
        for client_key, came in ((keys[0], [1]), (keys[1], []), (None, [])):
            with fetching(source, client_key=client_key) as other:
                assert fetched(other, source, 1) == came
                failed = failures(other)
                assert set(failed) <= {"refused", "lost"}
                assert bool(failed) != bool(came)


def test_an_engine_that_is_away_or_goes_costs_no_more_than_its_blocks(address):
    with fetching(address) as other:
        assert fetched(other, address, 1) == []  # it was never there
        assert fetched(other, address, 1) == []  # and is not tried again at once
        with giving(address, 1, 2) as store:
            other.fetcher._back_at_s.clear()
            assert fetched(other, address, 1) == [1]
            store.close()
        assert fetched(other, address, 2) == []
    assert failures(other) == {"lost": 3}


def test_an_address_that_cannot_be_used_costs_no_more_than_its_blocks():
    with fetching("tcp://no host:1") as other:
        assert fetched(other, "tcp://no host:1", 1) == []
        assert failures(other) == {"lost": 1}


class BadServer(threading.Thread):
    """Answers each message as `answer` says; None: not at all."""

    def __init__(self, address, answer):
        super().__init__(daemon=True)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(address)
        self._answer = answer
        self._ends = False
        self.start()

    def run(self):
        while not self._ends:
            if not self._socket.poll(20):
                continue
            identity, frame = self._socket.recv_multipart()
            answer = self._answer(msgspec.msgpack.decode(frame, type=FetchBlocks))
            if answer is not None:
                self._socket.send_multipart([identity, *answer])
        self._context.destroy()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._ends = True
        self.join()


def wrong_sums(fetch):
    sums = [b"s" * 32 for _ in fetch.blocks]
    return [msgspec.msgpack.encode(BlocksFound(fetch.number, sums)), *(len(sums) * [b"x"])]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (wrong_sums, "corrupt"),
        (lambda fetch: [b"\xff garbage"], "corrupt"),
        (lambda fetch: [b"x" * (3 << 20)], "lost"),
        (lambda fetch: [msgspec.msgpack.encode(BlocksFound(fetch.number, []))], "absent"),
        (lambda fetch: [msgspec.msgpack.encode(FetchRefused(fetch.number, "no"))], "refused"),
        (lambda fetch: None, "late"),
    ],
)
def test_a_bad_answer_is_given_up_with_its_reason(address, answer, why):
    with BadServer(address, answer), fetching(address, timeout_s=0.3) as other:
        assert fetched(other, address, 1, 2) == []
        assert failures(other) == {why: 2}


def test_an_engine_that_says_nothing_counts_as_lost(address, monkeypatch):
    monkeypatch.setattr("engine_core.block_transfer.fetcher._SILENT_S", 0.3)
    with BadServer(address, lambda fetch: None), fetching(address) as other:
        begun_s = time.monotonic()
        assert fetched(other, address, 1) == []
        assert time.monotonic() - begun_s < 20
        assert failures(other) == {"lost": 1}


def test_messages_that_are_none_harm_no_other_fetch(address):
    with giving(address, 1), zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        for frames in ([b"garbage"], [b""], [msgspec.msgpack.encode([1, 2, 3])], [b"a", b"b"]):
            socket.send_multipart(frames)
        too_many = FetchBlocks(1, 5, KEY, [key(1)] * 5000)
        other_version = FetchBlocks(9, 6, KEY, [key(1)])
        for message in (too_many, other_version):
            socket.send(msgspec.msgpack.encode(message))
            refusal = msgspec.msgpack.decode(socket.recv(), type=FetchRefused)
            assert refusal.number == message.number
            assert refusal.why
        with fetching(address) as other:
            assert fetched(other, address, 1) == [1]
