"""The threads beside the loop: a full, broken or hanging disk costs blocks, never a step."""

import logging
import threading
import time
from types import SimpleNamespace

import pytest

from engine_core.prefix_store import BlockFiles, PrefixStore
from engine_core.prefix_store import store as store_module
from engine_core.scheduler import ModelRunnerOutput
from tests.engine_core.scheduler.scenario_help import Scenario, make_request

BLOCK_BYTES = 1000
EMPTY_STEP = SimpleNamespace(plan=SimpleNamespace(total_num_scheduled_tokens=0))


def key(number):
    return 0, bytes([number]) * 64


def contents(number):
    return bytes([number]) * BLOCK_BYTES


@pytest.fixture
def files(tmp_path):
    return BlockFiles(tmp_path / "b", limit_bytes=10**6, key=b"k" * 16, group_bytes=[BLOCK_BYTES])


def open_store(files):
    return PrefixStore(files, flush_s=10)


def save(store, *numbers):
    """As the tier has them saved."""
    store.tier.saving.update(map(key, numbers))
    for number in numbers:
        store.save(key(number), 0, contents(number))


def stage(store, *numbers):
    """Have them read as a request that waits does. Whether each can be used then."""
    store.tier.stage([key(number) for number in numbers])
    store.on_plan(EMPTY_STEP.plan, 0.0)
    deadline = time.monotonic() + 10
    while store.tier.reading and time.monotonic() < deadline:
        store.on_step(EMPTY_STEP)
    return [key(number) in store.tier.staged for number in numbers]


def test_what_was_saved_is_loaded_into_another_block_after_a_restart(files):
    store = open_store(files)
    save(store, 1, 2)
    store.close()
    store.on_step(EMPTY_STEP)
    assert store.tier.num_blocks == 2
    again = open_store(files)
    assert again.tier.num_blocks == 2
    assert stage(again, 1, 2) == [True, True]
    again.tier.begin_load([key(1), key(2)])
    assert [again.load(key(1)), again.load(key(2))] == [contents(1), contents(2)]
    assert not again.tier.staged


def test_the_end_waits_for_what_is_queued(files, monkeypatch):
    write = BlockFiles.write

    def slow(self, *arguments):
        time.sleep(0.02)
        return write(self, *arguments)

    monkeypatch.setattr(BlockFiles, "write", slow)
    store = open_store(files)
    save(store, *range(20))
    store.close()
    assert len(files.scan()[0]) == 20


def test_a_full_disk_ends_the_writing_with_one_line(files, monkeypatch, caplog):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFiles, "write", full)
    store = open_store(files)
    save(store, 1, 2, 3)
    store.close()
    store.on_step(EMPTY_STEP)
    assert [record.message for record in caplog.records if "No space" in record.message] == [
        f"no more prefix blocks are written to {files.folder}: No space left on device"
    ]
    store.tier.use([(key(4), 0)])
    assert not store.tier.to_save
    assert store.tier.num_blocks == 0


def test_a_broken_block_is_dropped_with_a_line_and_may_be_written_again(files, caplog):
    files.write(key(1), 0, contents(1))
    files.write(key(2), 0, contents(2))
    path = files.path_of(key(1))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    store = open_store(files)
    assert stage(store, 1, 2) == [False, True]
    assert "a prefix block is computed anew" in caplog.text
    assert not path.exists()
    assert key(1) not in store.tier
    save(store, 1)
    store.close()
    store.on_step(EMPTY_STEP)
    assert stage(store, 1) == [True]


def test_a_block_that_another_process_evicted_is_computed_without_a_line(files, caplog):
    files.write(key(1), 0, contents(1))
    store = open_store(files)
    files.delete(key(1))
    caplog.clear()
    assert stage(store, 1) == [False]
    assert not caplog.records


def test_a_disk_that_does_not_answer_is_given_up(files, monkeypatch, caplog):
    files.write(key(1), 0, contents(1))
    answers = threading.Event()
    monkeypatch.setattr(BlockFiles, "read", lambda *_: answers.wait(10) and b"late")
    monkeypatch.setattr(store_module, "_MAX_READ_S", 0.1)
    store = open_store(files)
    assert stage(store, 1) == [False]
    assert key(1) not in store.tier
    assert "does not answer" in caplog.text
    answers.set()
    store.on_step(EMPTY_STEP)
    assert not store.tier.staged


def test_what_is_forgotten_is_gone_from_the_disk_also_while_it_is_written(files):
    files.write(key(1), 0, contents(1))
    store = open_store(files)
    save(store, 2)
    assert store.tier.clear() == 1
    store.on_plan(EMPTY_STEP.plan, 0.0)
    store.close()
    store.on_step(EMPTY_STEP)
    assert files.scan()[0] == set()
    assert store.tier.num_blocks == 0


def test_files_of_others_are_told_once_at_the_start(files, caplog):
    (files.folder / "notes.txt").write_text("mine")
    with caplog.at_level(logging.INFO):
        open_store(files)
    assert "1 files there are ignored" in caplog.text


def test_a_step_that_fails_before_it_moves_a_block_keeps_no_request_waiting(files):
    prompt = list(range(100))
    request = make_request("first", prompt, max_tokens=2)
    store = open_store(files)
    scenario = Scenario(request, disk=store.tier)
    scenario.step()
    for block, index, _ in scenario.step().copies.disk.save:
        store.save(block, index, contents(index))
    store.close()
    store = open_store(files)
    scenario = Scenario(make_request("again", prompt, max_tokens=2), disk=store.tier)
    failing = scenario.plan()
    store.on_plan(failing, 0.0)
    scenario.scheduler.discard_step(failing, "no memory")
    scenario.take(failing, ModelRunnerOutput(req_ids=[], sampled_token_ids=[]))
    deadline = time.monotonic() + 10
    while scenario.scheduler.has_work():
        assert time.monotonic() < deadline, "it waits for blocks that nobody reads"
        plan = scenario.plan()
        store.on_plan(plan, 0.0)
        for block, _ in plan.copies.disk.load if plan.copies.disk else ():
            store.load(block)
        scenario.requests |= scenario.scheduler.pool.by_id
        scenario.update(plan)
        store.on_step(SimpleNamespace(plan=plan))
    assert store.tier.num_blocks == 6
