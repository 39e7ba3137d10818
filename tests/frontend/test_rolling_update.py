"""The order of a rolling update, and where it stops. With real engines: tests/e2e."""

import asyncio
from types import SimpleNamespace

import pytest

from frontend.errors import CallRefused, EngineDied
from frontend.rolling_update import RollingUpdateStopped, rolling_update
from protocol.calls import EngineState
from protocol.errors import ErrorCode


class Engine:
    """Answers as an engine's client does, and writes down what it was asked.

    Args:
        loads: the fingerprint by the model's name.
    """

    def __init__(self, name, log, loads=None):
        self.address, self._log = name, log
        self.loads = {"new": "fn", "old": "fo"} if loads is None else loads
        self.start_again()
        self.dies_of = ""

    def start_again(self):
        self.weights, self.version, self.state = "fo", 0, EngineState.RUNNING

    @property
    def session(self):
        return SimpleNamespace(arithmetic=(self.weights, "float32"), ready=self._nothing)

    async def _nothing(self):
        pass

    def _note(self, what):
        self._log.append(f"{self.address} {what}")
        if what == self.dies_of:
            self.dies_of = ""
            self.start_again()
            raise EngineDied("it is gone", address=self.address)

    async def ping(self):
        return SimpleNamespace(uptime_s=100.0)

    async def statistics(self):
        return SimpleNamespace(state=self.state, weights_version=self.version)

    async def pause_generation(self, *, mode):
        self._note(mode)
        self.state = EngineState.PAUSED

    async def resume_generation(self):
        self._note("resume")
        self.state = EngineState.RUNNING

    async def update_weights(self, model, version):
        self._note(model)
        if model not in self.loads:
            raise CallRefused("a tensor is missing", code=ErrorCode.WEIGHTS_REFUSED)
        self.weights, self.version = self.loads[model], version
        return SimpleNamespace(weights_version=version)


@pytest.fixture
def log():
    return []


@pytest.fixture
def engines(log):
    return [Engine(name, log) for name in "abc"]


def changes(log):
    return " ".join(each.replace(" ", ".") for each in log)


@pytest.mark.parametrize(
    ("new_requests", "order"),
    [
        ("any", "a.wait a.new a.resume b.wait b.new b.resume c.wait c.new c.resume"),
        ("old", "a.wait a.new b.wait b.new a.resume b.resume c.wait c.new c.resume"),
        ("new", "a.wait a.new a.resume b.wait c.wait b.new b.resume c.new c.resume"),
    ],
)
async def test_who_takes_new_requests_meanwhile(engines, log, new_requests, order):
    served = await rolling_update(engines, "new", new_requests=new_requests)
    assert changes(log) == order
    assert {(each.state, each.weights_version, each.fingerprint) for each in served} == {
        ("running", 1, "fn")
    }


async def test_a_refused_load_stops_it_and_that_engine_serves_the_old_weights(engines):
    del engines[1].loads["new"]
    with pytest.raises(RollingUpdateStopped, match="b refuses new: a tensor is missing") as stopped:
        await rolling_update(engines, "new")
    assert [each.fingerprint for each in stopped.value.engines] == ["fn", "fo", "fo"]
    assert {each.state for each in engines} == {EngineState.RUNNING}
    engines[1].loads["new"] = "fn"
    served = await rolling_update(engines, "new")
    assert {(each.weights_version, each.fingerprint) for each in served} == {(2, "fn")}


@pytest.mark.parametrize(
    ("previous", "fingerprint", "state"),
    [("old", "fo", EngineState.RUNNING), (None, "other", EngineState.PAUSED)],
)
async def test_an_engine_that_loads_other_files_than_the_rest_gets_no_requests(
    engines, previous, fingerprint, state
):
    engines[1].loads["new"] = "other"
    with pytest.raises(RollingUpdateStopped, match="b loaded new, but its weights are other"):
        await rolling_update(engines, "new", previous=previous)
    assert (engines[1].weights, engines[1].state) == (fingerprint, state)
    assert engines[2].weights == "fo"


@pytest.mark.parametrize("dies_of", ["wait", "new", "resume"])
async def test_an_engine_that_comes_back_with_old_weights_gets_its_turn_again(engines, dies_of):
    engines[1].dies_of = dies_of
    served = await rolling_update(engines, "new")
    assert {(each.state, each.fingerprint) for each in served} == {("running", "fn")}


async def test_one_that_was_updated_and_lost_is_updated_again_at_the_end(engines, log):
    engines[2].loads = {"new": "fn"}
    update = engines[2].update_weights

    async def update_and_lose_the_first(model, version):
        engines[0].start_again()
        engines[2].update_weights = update
        return await update(model, version)

    engines[2].update_weights = update_and_lose_the_first
    served = await rolling_update(engines, "new")
    assert {each.fingerprint for each in served} == {"fn"}
    assert changes(log).endswith("c.new c.resume a.wait a.new a.resume")


async def test_an_engine_that_a_killed_update_left_paused_runs_in_the_end(engines):
    engines[0].state = EngineState.PAUSED
    served = await rolling_update(engines, "new")
    assert {each.state for each in served} == {"running"}
    engines[0].state = EngineState.ASLEEP
    with pytest.raises(RollingUpdateStopped, match="a cannot be updated, it is asleep"):
        await rolling_update(engines, "new")


async def test_an_update_that_is_cancelled_leaves_no_engine_paused(engines):
    held = asyncio.Event()

    async def never_ends(*, mode):
        engines[1].state = EngineState.PAUSED
        held.set()
        await asyncio.Event().wait()

    engines[1].pause_generation = never_ends
    update = asyncio.create_task(rolling_update(engines, "new"))
    await held.wait()
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert {each.state for each in engines} == {EngineState.RUNNING}


async def test_streams_that_take_longer_than_they_may_stop_it_and_run_on(engines):
    async def never_ends(*, mode):
        await asyncio.Event().wait()

    engines[0].pause_generation = never_ends
    with pytest.raises(RollingUpdateStopped, match=r"did not end within 0\.01 s"):
        await rolling_update(engines, "new", drain_timeout_s=0.01)
    assert {each.weights for each in engines} == {"fo"}
