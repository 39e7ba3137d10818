"""The threads beside the loop: a full, broken or hanging disk costs blocks, never a step."""

import logging
import threading
import time
from types import SimpleNamespace

import pytest

from engine_core.kv_cache import DiskMoves
from engine_core.prefix_store import BlockFiles, PrefixStore
from engine_core.prefix_store import store as store_module

BLOCK_BYTES = 1000
EMPTY_STEP = SimpleNamespace(plan=SimpleNamespace(total_num_scheduled_tokens=0))


def key(number):
    return 0, bytes([number]) * 64


class Blocks:
    """The device's memory."""

    def __init__(self):
        self.contents = {number: bytes([number]) * BLOCK_BYTES for number in range(100)}

    def read_block(self, block_id):
        return self.contents[block_id]

    def write_block(self, block_id, contents):
        self.contents[block_id] = contents


def moves(load=(), save=(), read=(), delete=()):
    return DiskMoves(
        load=list(load), save=list(save), read=list(read), touch=[], delete=list(delete)
    )


@pytest.fixture
def files(tmp_path):
    return BlockFiles(tmp_path / "b", limit_bytes=10**6, key=b"k" * 16, block_bytes=BLOCK_BYTES)


@pytest.fixture
def blocks():
    return Blocks()


def open_store(files):
    return PrefixStore(files, flush_s=10)


def save(store, blocks, *numbers):
    """As the tier has them saved."""
    store.tier._saving.update(map(key, numbers))
    store.carry_out(moves(save=[(key(number), 0, number) for number in numbers]), blocks)


def stage(store, blocks, *numbers):
    """Have them read as a request that waits does. Whether each can be used then."""
    store.tier.stage([key(number) for number in numbers])
    store.carry_out(store.tier.take(None, unfilled=set(), loads={}), blocks)
    deadline = time.monotonic() + 10
    while store.tier._reading and time.monotonic() < deadline:
        store.on_step(EMPTY_STEP)
    return [key(number) in store.tier.staged for number in numbers]


def test_what_was_saved_is_loaded_into_another_block_after_a_restart(files, blocks):
    store = open_store(files)
    save(store, blocks, 1, 2)
    store.close()
    store.on_step(EMPTY_STEP)
    assert store.tier.num_blocks == 2
    again = open_store(files)
    assert again.tier.num_blocks == 2
    assert stage(again, blocks, 1, 2) == [True, True]
    again.tier.begin_load([key(1), key(2)])
    again.carry_out(moves(load=[(key(1), 50), (key(2), 51)]), blocks)
    assert blocks.contents[50] == blocks.contents[1]
    assert blocks.contents[51] == blocks.contents[2]
    assert not again.tier.staged


def test_the_end_waits_for_what_is_queued(files, blocks, monkeypatch):
    write = BlockFiles.write

    def slow(self, *arguments):
        time.sleep(0.02)
        return write(self, *arguments)

    monkeypatch.setattr(BlockFiles, "write", slow)
    store = open_store(files)
    save(store, blocks, *range(20))
    store.close()
    assert len(files.scan()[0]) == 20


def test_a_full_disk_ends_the_writing_with_one_line(files, blocks, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFiles, "write", full)
    store = open_store(files)
    save(store, blocks, 1, 2, 3)
    store.close()
    store.on_step(EMPTY_STEP)
    assert [record.message for record in caplog.records if "No space" in record.message] == [
        f"no more prefix blocks are written to {files.folder}: No space left on device"
    ]
    store.tier.use([(key(4), 0)])
    assert not store.tier._to_save
    assert store.tier.num_blocks == 0


def test_a_broken_block_is_dropped_with_a_line_and_may_be_written_again(files, blocks, caplog):
    files.write(key(1), 0, blocks.contents[1])
    files.write(key(2), 0, blocks.contents[2])
    path = files.path_of(key(1))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    store = open_store(files)
    assert stage(store, blocks, 1, 2) == [False, True]
    assert "a prefix block is computed anew" in caplog.text
    assert not path.exists()
    assert key(1) not in store.tier
    save(store, blocks, 1)
    store.close()
    store.on_step(EMPTY_STEP)
    assert stage(store, blocks, 1) == [True]


def test_a_block_that_another_process_evicted_is_computed_without_a_line(files, blocks, caplog):
    files.write(key(1), 0, blocks.contents[1])
    store = open_store(files)
    files.delete(key(1))
    caplog.clear()
    assert stage(store, blocks, 1) == [False]
    assert not caplog.records


def test_a_disk_that_does_not_answer_is_given_up(files, blocks, monkeypatch, caplog):
    files.write(key(1), 0, blocks.contents[1])
    answers = threading.Event()
    monkeypatch.setattr(BlockFiles, "read", lambda *_: answers.wait(10) and b"late")
    monkeypatch.setattr(store_module, "_MAX_READ_S", 0.1)
    store = open_store(files)
    assert stage(store, blocks, 1) == [False]
    assert key(1) not in store.tier
    assert "does not answer" in caplog.text
    answers.set()
    store.on_step(EMPTY_STEP)
    assert not store.tier.staged


def test_what_is_forgotten_is_gone_from_the_disk_also_while_it_is_written(files, blocks):
    files.write(key(1), 0, blocks.contents[1])
    store = open_store(files)
    save(store, blocks, 2)
    assert store.tier.clear() == 1
    store.carry_out(store.tier.take(None, unfilled=set(), loads={}), blocks)
    store.close()
    store.on_step(EMPTY_STEP)
    assert files.scan()[0] == set()
    assert store.tier.num_blocks == 0


def test_files_of_others_are_told_once_at_the_start(files, blocks, caplog):
    (files.folder / "notes.txt").write_text("mine")
    with caplog.at_level(logging.INFO):
        open_store(files)
    assert "1 files there are ignored" in caplog.text
