"""GET /v1/scheduler: what the view of the page reads."""

import asyncio
import base64
import contextlib
import json
import time

import httpx
import pytest
from fake_engine import FakeEngine
from fake_model import snapshot
from http_server import key_file, serving, serving_models
from test_health import asking

from frontend.async_llm import AsyncLLM
from frontend.http.scheduler_stream import SchedulerFeed
from frontend.http.served_models import ServedModel, ServedModels
from protocol.snapshots import FIRST_REQUEST, IN_USE, MAX_STEPS
from tests.protocol.sample_messages import REQUEST


@contextlib.contextmanager
def watching(url, engine="0.0", **headers):
    """Its events, as they come."""
    with httpx.stream(
        "GET", f"{url}/v1/scheduler?engine={engine}", headers=headers, timeout=20
    ) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        yield (json.loads(line[6:]) for line in lines if line.startswith("data: "))


def until(events, condition):
    return next(event for event in events if condition(event))


def owners(event):
    return memoryview(base64.b64decode(event["blocks"]["owners"])).cast("H").tolist()


def test_steps_requests_and_blocks_come_as_they_change_and_nothing_of_texts(start_engine):
    engine = start_engine(step_s=0.02)
    with serving(engine.address, "small") as url, watching(url) as events:
        idle = next(events)
        assert (idle["engine"], idle["engines"], idle["unavailable"]) == (
            "0.0",
            {"0.0": "small"},
            None,
        )
        assert idle["requests"] == idle["steps"] == []
        assert set(owners(idle)) == {0}
        with asking(url, **{"x-request-id": "trace-7"}):
            busy = until(events, lambda event: event["requests"])
            later = until(events, lambda event: event["steps"])
        (shown,) = busy["requests"]
        assert shown["request_id"].startswith("trace-7-")
        assert (shown["status"], shown["tenant"]) == ("running", "127.0.0.1")
        assert owners(busy)[:2] == [FIRST_REQUEST, 0]
        assert later["steps"][0]["prefill_chunks"] == [[1, 16]]
        assert busy["statistics"]["num_running"] == 1
        assert "private" not in json.dumps(busy)
        assert until(events, lambda event: not event["requests"])["statistics"]["num_running"] == 0


def test_the_engine_is_asked_only_while_somebody_looks_and_once_for_all_who_do(start_engine):
    engine = start_engine()
    with serving(engine.address) as url:
        with watching(url) as one, watching(url) as other:
            assert next(one)["blocks"] == next(other)["blocks"]
            num_asked = engine.num_watched
            time.sleep(0.5)
            assert 0 < engine.num_watched - num_asked <= 0.5 / 0.05 + 1
        time.sleep(0.2)
        num_asked = engine.num_watched
        time.sleep(0.2)
        assert engine.num_watched == num_asked


class Counting:
    """A model whose engine ends a step whenever it is asked."""

    resting = None

    def __init__(self):
        self.asked = []
        self.session = self

    async def engines(self):
        return [self]

    async def ready(self, *, waits):
        pass

    async def watch_scheduler(self, after_step_id):
        await asyncio.sleep(0)
        self.asked.append(after_step_id)
        return snapshot(len(self.asked), [REQUEST])


async def test_a_reader_that_is_slow_skips_snapshots_and_gets_the_last_steps():
    engine = Counting()
    async with contextlib.aclosing(SchedulerFeed(engine, 0, 5.0).states()) as states:
        assert [step.step_id for step in (await anext(states)).view.steps] == [1]
        for count in (50, 500):
            while len(engine.asked) < count:
                await asyncio.sleep(0)
            steps = [step.step_id for step in (await anext(states)).view.steps]
            assert count - 2 <= steps[-1] <= count
            assert steps == list(range(steps[-1] - len(steps) + 1, steps[-1] + 1))
            assert len(steps) == (steps[-1] - 1 if count == 50 else MAX_STEPS)
    assert engine.asked == [-1, *range(1, len(engine.asked))]
    await asyncio.sleep(0.01)
    num_asked = len(engine.asked)
    await asyncio.sleep(0.01)
    assert len(engine.asked) == num_asked


def test_an_engine_that_goes_away_is_said_and_the_view_goes_on_when_it_is_back(
    start_engine, address
):
    first = start_engine()
    with serving(address) as url, watching(url) as events:
        assert next(events)["unavailable"] is None
        first.stop()
        gone = until(events, lambda event: event["unavailable"])
        assert "the engine at" in gone["unavailable"]
        assert (gone["blocks"], gone["statistics"], gone["requests"]) == (None, None, [])
        start_engine()
        assert until(events, lambda event: not event["unavailable"])["blocks"]


def test_an_engine_that_is_stuck_is_said_too(start_engine):
    engine = start_engine()
    with serving(engine.address, health_timeout=0.3) as url, watching(url) as events:
        assert next(events)["unavailable"] is None
        engine.mute = True
        stuck = until(events, lambda event: event["unavailable"])
        assert stuck["unavailable"] == "no step has ended for 0.3 s"


def test_each_of_several_engines_can_be_watched(engine):
    with FakeEngine("tcp://127.0.0.1:*").start() as other:
        models = ServedModels(
            ServedModel(lambda at=at: AsyncLLM(at, connect_timeout_s=1.0), [name])
            for name, at in {"big": engine.address, "small": other.address}.items()
        )
        with serving_models(models) as url:
            with watching(url, "1.0") as events:
                event = next(events)
            assert event["engine"] == "1.0"
            assert event["engines"] == {"0.0": "big", "1.0": "small"}
            assert (engine.num_watched, other.num_watched > 0) == (0, True)
            for wrong in ("2.0", "-1.0", "x", "1", "9" * 30):
                answer = httpx.get(f"{url}/v1/scheduler?engine={wrong}")
                assert answer.status_code == 400
                assert "it must be one of 0.0, 1.0" in answer.json()["error"]["message"]


def test_each_engine_of_one_model_can_be_watched(engine):
    with FakeEngine("tcp://127.0.0.1:*").start() as other:
        addresses = [engine.address, other.address]
        models = ServedModels([ServedModel(lambda: AsyncLLM(addresses), ["both"])])
        with serving_models(models) as url:
            with watching(url, "0.1") as events:
                event = next(events)
            assert list(event["engines"]) == ["0.0", "0.1"]
            assert event["engines"]["0.1"] == f"both at {other.address}"
            assert (engine.num_watched, other.num_watched > 0) == (0, True)
            with watching(url, "0.2") as events:
                assert "this model has 2 engines" in next(events)["unavailable"]


def test_with_keys_only_an_admins_shows_the_requests_of_others(start_engine, tmp_path):
    engine = start_engine(step_s=0.02)
    names = ("ann", "bob", "root")
    keys = [{"name": name, "key": name, "admin": name == "root"} for name in names]
    file = key_file(tmp_path, *keys)

    def seen(key):
        with watching(url, **{"x-api-key": key}) as events:
            event = until(events, lambda event: event["statistics"]["num_running"] == 2)
        return [each["tenant"] for each in event["requests"]], owners(event)[:3], event

    with (
        serving(engine.address, api_key_file=file) as url,
        asking(url, **{"x-api-key": "ann"}),
        asking(url, **{"x-api-key": "bob"}),
    ):
        assert httpx.get(f"{url}/v1/scheduler").status_code == 401
        assert seen("root")[:2] == (["ann", "bob"], [FIRST_REQUEST, FIRST_REQUEST + 1, 0])
        tenants, cells, event = seen("bob")
        assert (tenants, cells, event["sees_all"]) == (["bob"], [IN_USE, FIRST_REQUEST, 0], False)
        assert all(step["prefill_chunks"] == [[0, 16]] for step in event["steps"])


def test_the_server_stops_at_once_while_somebody_looks(engine):
    with serving(engine.address, drain_timeout=300) as url:
        reader = watching(url)
        events = reader.__enter__()
        next(events)
    with pytest.raises((httpx.HTTPError, StopIteration)):
        while True:
            next(events)
