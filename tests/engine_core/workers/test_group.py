"""Rank 0 and a worker over real sockets, with runners that note what they are given: here the
worker is a thread that joins by TCP."""

import contextlib
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from engine_core.control import ModelHost
from engine_core.distributed.parallel import Parallel
from engine_core.errors import ConfigurationError, RequestRefused, StartupError, WorkerLost
from engine_core.executor import InProcessExecutor
from engine_core.options.engine import EngineOptions
from engine_core.options.workers import ParallelOptions
from engine_core.scheduler import DeviceFault, ModelRunnerOutput
from engine_core.server.keys import KeyFolder
from engine_core.startup.runner_spec import _plan
from engine_core.workers import channel as channel_module
from engine_core.workers.channel import Channel
from engine_core.workers.executor import GroupExecutor, GroupModelHost
from engine_core.workers.following import follow
from engine_core.workers.group import WorkerGroup
from engine_core.workers.messages import Serve, Sizes, Start, WorkerAnswer
from protocol.errors import ErrorCode
from protocol.keys import ClientKey, read_secret_file

LIMIT_S = 60.0


class Killed(BaseException):
    """Of a worker."""


class Rank(ModelHost):
    """Runner and model of a rank; `log` has what came, in order."""

    max_steps_in_flight = 1
    fingerprint = "first"
    keeps_cache = True

    def __init__(self):
        self.log = []
        self.failing = {}
        """By step or call, the error."""

    def _note(self, what):
        self.log.append(what)
        if what in self.failing:
            raise self.failing[what]

    def submit(self, plan):
        self._plan = plan

    def collect(self):
        self._note(self._plan.step_id)
        return ModelRunnerOutput(req_ids=self._plan.batch.req_ids, sampled_token_ids=[[1]])

    def check_device(self):
        pass

    def check_sleep(self, level):
        pass

    def release(self, *, weights):
        self._note(f"release {weights}")

    def restore(self):
        self._note("restore")

    def open(self, model):
        self._note(f"open {model}")
        self._opened = model
        return f"fingerprint of {model}"

    def update(self):
        self._note(f"update {self._opened}")


def plan(step_id, finished=None):
    names = [] if finished else ["a"]
    one = np.ones(len(names), np.int32)
    return _plan(step_id, names, one, one, finished=finished)


def wait_for(condition):
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.002)


class Joined:
    """A worker that joins; `over` is what `follow` returned, or its error."""

    def __init__(self, group, key=None):
        self.rank, self.over, self.start = Rank(), None, None
        self._arguments = group.address, key
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.channel = Channel(*self._arguments)
            self.start = self.channel.receive()
            assert isinstance(self.start, Start)
            self.channel.send(WorkerAnswer())
            assert isinstance(self.channel.receive(), Sizes)
            self.channel.send(
                WorkerAnswer(serve=Serve(num_blocks=7, num_host_blocks=9, max_model_len=64))
            )
            self.served = self.channel.receive()
            self.channel.send(WorkerAnswer())
            self.over = follow(self.channel, InProcessExecutor(self.rank), self.rank, Parallel())
        except StartupError as error:
            self.over = error
        except Killed:
            self.channel._socket.close(0)
            return
        self.channel.close()


def options(**more):
    parallel = {"tensor_parallel_size": 2, "num_joining": 1, "workers_bind": "tcp://127.0.0.1:0"}
    return EngineOptions(model="m", parallel=ParallelOptions(**parallel | more))


def begin(group):
    start = group.assemble("cpu", "first")
    group.loaded()
    sizes = Sizes(max_num_seqs=1, max_num_batched_tokens=2, dtype="float32", keeps_bytes=False)
    group.measure(sizes)
    least = group.agree_on(Serve(num_blocks=8, num_host_blocks=4, max_model_len=128))
    group.serving()
    return start, least


@pytest.fixture(autouse=True)
def exits(monkeypatch):
    """How often a worker would have ended the process."""
    found = []
    monkeypatch.setattr(channel_module.os, "_exit", found.append)
    with tempfile.TemporaryDirectory(prefix="ec-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield found
        assert not list(Path(folder).rglob("workers-*")), "nothing is left on disk"


@pytest.fixture
def pair():
    with WorkerGroup(options(), None) as group:
        joined = Joined(group)
        joined.begun = begin(group)
        yield group, joined
    joined.thread.join(LIMIT_S)


def test_ranks_agree_on_the_least_and_share_the_machine(pair):
    _, joined = pair
    start, least = joined.begun
    assert least == joined.served == Serve(num_blocks=7, num_host_blocks=4, max_model_len=64)
    assert (start.rank, joined.start.rank) == (0, 1)
    assert start.num_workers_here == joined.start.num_workers_here == 2
    assert (start.local_rank, joined.start.local_rank) == (0, 1)
    assert joined.start.rendezvous == start.rendezvous


def test_plans_and_changes_reach_every_rank_in_one_order(pair):
    group, joined = pair
    mine = Rank()
    executor, host = GroupExecutor(mine, group), GroupModelHost(mine, group, "first")
    executor.submit(plan(1))
    assert executor.collect().req_ids == ["a"]
    host.release(weights=True)
    host.restore()
    executor.submit(plan(2))
    executor.collect()
    assert host.open("second") == "fingerprint of second"
    host.update()
    executor.submit(plan(3, finished=["a"]))
    executor.collect()
    executor.close()
    joined.thread.join(LIMIT_S)
    assert joined.over is True
    assert mine.log == joined.rank.log
    assert mine.log == [
        1, "release True", "restore", 2, "open second", "update second", 3
    ]  # fmt: skip


def test_a_plan_of_nothing_wakes_no_worker(pair):
    group, joined = pair
    executor = GroupExecutor(Rank(), group)
    nothing = np.zeros(0, np.int32)
    executor.submit(_plan(1, [], nothing, nothing))
    executor.collect()
    executor.submit(plan(2))
    executor.collect()
    wait_for(lambda: joined.rank.log)
    assert joined.rank.log == [2]


def test_a_step_that_fails_at_every_rank_is_survived(pair):
    group, joined = pair
    mine = Rank()
    mine.failing[1] = joined.rank.failing[1] = ValueError("77 comes first")
    executor = GroupExecutor(mine, group)
    executor.submit(plan(1))
    with pytest.raises(ValueError, match="77 comes first"):
        executor.collect()
    executor.check_device()
    executor.submit(plan(2))
    assert executor.collect().req_ids == ["a"]


def test_a_step_that_fails_at_a_worker_alone_ends_the_engine_with_its_reason(pair):
    group, joined = pair
    joined.rank.failing[1] = ValueError("a bit has tipped")
    executor = GroupExecutor(Rank(), group)

    def run_on():
        executor.submit(plan(1))
        wait_for(lambda: joined.rank.log)
        executor.collect()
        executor.submit(plan(2))

    with pytest.raises(WorkerLost, match=r"rank 1 \(pid \d+, joined\): ValueError: a bit"):
        wait_for(run_on)
    with pytest.raises(DeviceFault, match=r"a worker is lost: rank 1 .*: ValueError: a bit"):
        executor.check_device()


def test_a_step_that_fails_at_rank_0_alone_ends_the_engine(pair):
    group, _ = pair
    mine = Rank()
    mine.failing[1] = ValueError("here")
    executor = GroupExecutor(mine, group)
    executor.submit(plan(1))
    with pytest.raises(ValueError):
        executor.collect()
    with pytest.raises(DeviceFault, match=r"rank 1 .* computed a step that failed at another rank"):
        executor.check_device()


def test_weights_that_one_rank_cannot_load_are_taken_back_at_the_others(pair):
    group, joined = pair
    mine = Rank()
    host = GroupModelHost(mine, group, "first")
    joined.rank.failing["update second"] = RequestRefused(ErrorCode.WEIGHTS_REFUSED, "too large")
    host.open("second")
    with pytest.raises(RequestRefused, match="rank 1: too large"):
        host.update()
    back = ["open first", "update first"]
    assert mine.log == joined.rank.log == ["open second", "update second", *back]


def test_if_one_rank_cannot_wake_up_all_sleep_on(pair):
    group, joined = pair
    mine = Rank()
    mine.failing["restore"] = RequestRefused(ErrorCode.WEIGHTS_REFUSED, "no memory")
    with pytest.raises(RequestRefused, match="no memory"):
        GroupModelHost(mine, group, "first").restore()
    assert joined.rank.log == ["restore", "release False"]


def test_a_worker_whose_connection_is_gone_is_named(pair):
    group, joined = pair
    joined.rank.failing[1] = Killed()
    executor = GroupExecutor(Rank(), group)

    def run_on():
        executor.submit(plan(1))
        executor.collect()

    with pytest.raises(WorkerLost, match=r"rank 1 \(pid \d+, joined\) is gone, or its network is"):
        wait_for(run_on)


def test_a_worker_ends_when_rank_0_is_gone_without_a_word(exits):
    group = WorkerGroup(options(), None)
    joined = Joined(group)
    begin(group)
    with contextlib.suppress(WorkerLost):
        group._is_serving = False  # so it says nothing
        group.close()
    wait_for(lambda: exits)
    assert joined.over is None
    joined.channel._is_over.set()


def told(group, stranger):
    wait_for(lambda: group.poll(0.01) or stranger.over is not None)
    return str(stranger.over)


def test_a_worker_that_is_not_wanted_is_told_why(monkeypatch):
    with WorkerGroup(options(), None) as group:
        with monkeypatch.context() as patch:
            patch.setattr(channel_module, "code_version", lambda: "0.0, wire 1")
            assert "it runs engine-core 0.0, wire 1, the engine" in told(group, Joined(group))
        Joined(group)
        begin(group)
        why = "the engine has all its workers; raise --num-joining there"
        assert why in told(group, Joined(group))


def test_beyond_this_machine_a_worker_needs_the_key_of_an_admin(tmp_path):
    with pytest.raises(ConfigurationError, match="open to the network, and there are no keys"):
        WorkerGroup(options(workers_bind="tcp://192.0.2.1:0"), None)
    with pytest.raises(ConfigurationError, match="names no address that other machines reach"):
        WorkerGroup(options(workers_bind="tcp://0.0.0.0:0"), None)
    keys = KeyFolder(tmp_path / "keys")
    keys.make()
    for name in ("alice", "root"):
        keys.add(name, is_admin=name == "root")

    def key(name):
        return read_secret_file(keys.folder / "clients" / f"{name}.key", ClientKey)

    with WorkerGroup(options(), KeyFolder(keys.folder)) as group:
        assert "its key is no admin's" in told(group, Joined(group, key("alice")))
        joined = Joined(group, key("root"))
        begin(group)
        executor = GroupExecutor(Rank(), group)
        executor.submit(plan(1))
        executor.close()
        joined.thread.join(LIMIT_S)
        assert joined.rank.log == [1]
