"""What the server says of its engines and of unfinished requests."""

import contextlib

import httpx
import pytest
from fake_engine import FakeEngine, wait_until
from http_server import key_file, serving, serving_models

from frontend.async_llm import AsyncLLM
from frontend.http.served_models import ServedModel, ServedModels
from protocol import calls
from protocol.errors import ErrorCode
from protocol.outputs import CallFailed


@contextlib.contextmanager
def asking(url, *, count=1, **headers):
    """Requests that go on until the block ends."""
    body = {"prompt": "a private prompt", "max_tokens": 400, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as streams:
        for _ in range(count):
            stream = httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers)
            assert streams.enter_context(stream).status_code == 200
        yield


def pong_of(state):
    return lambda _call: calls.Pong(uptime_s=1.0, step_id=1, progress_age_s=0.0, state=state)


def test_an_idle_and_a_busy_engine_are_healthy_and_ready(start_engine):
    engine = start_engine(step_s=0.02)
    with serving(engine.address, "small") as url:
        for path in ("/health", "/ready"):
            assert httpx.get(url + path).json() == {"status": "ok", "engines": {"small": "ok"}}
        with asking(url):
            assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("state", [calls.EngineState.PAUSED, calls.EngineState.ASLEEP])
def test_a_paused_engine_is_healthy_says_so_and_is_not_ready(engine, monkeypatch, state):
    monkeypatch.setattr(engine, "do", pong_of(state))
    with serving(engine.address, "small") as url:
        health, ready = httpx.get(f"{url}/health"), httpx.get(f"{url}/ready")
    assert (health.status_code, ready.status_code) == (200, 503)
    assert health.json()["engines"] == ready.json()["engines"] == {"small": state.value}


def test_health_names_the_engine_that_is_stuck_and_the_one_that_is_away(engine, address):
    with FakeEngine("tcp://127.0.0.1:*").start() as stuck:
        addresses = {"good": address, "stuck": stuck.address, "away": f"{address}.nothing"}
        models = ServedModels(
            ServedModel(lambda at=at: AsyncLLM(at, connect_timeout_s=1.0), [name])
            for name, at in addresses.items()
        )
        with serving_models(models, health_timeout=0.5) as url:
            assert httpx.get(f"{url}/v1/models/stuck").status_code == 200
            stuck.mute = True
            answer = httpx.get(f"{url}/health")
            assert answer.status_code == 503
            engines = answer.json()["engines"]
            assert engines["good"] == "ok"
            assert engines["stuck"].startswith("stuck: no step has ended within 0.5 s")
            assert engines["away"].startswith("away: no engine answers at")
            listed = httpx.get(f"{url}/v1/requests")
            assert listed.status_code == 200
            assert set(listed.json()["unavailable"]) == {"stuck", "away"}


def test_unfinished_requests_say_why_they_wait_and_nothing_of_their_text(start_engine):
    engine = start_engine(step_s=0.02)
    with serving(engine.address, "small") as url, asking(url, **{"x-request-id": "trace-7"}):
        answer = httpx.get(f"{url}/v1/requests")
    assert "private" not in answer.text
    (found,) = answer.json()["data"]
    assert found["id"].startswith("trace-7-")
    assert found["model"] == "small"
    assert found["tenant"] == "127.0.0.1"
    assert found["waits_for"] == "blocks"
    assert found["why"] == "needs 9 blocks, 3 are free"
    assert (found["num_cached_tokens"], found["num_preemptions"]) == (32, 1)


def test_a_key_that_is_no_admins_sees_its_own_requests_only(start_engine, tmp_path):
    engine = start_engine(step_s=0.02)
    names = ("ann", "bob", "root")
    keys = [{"name": name, "key": name, "admin": name == "root"} for name in names]
    file = key_file(tmp_path, *keys)

    def tenants(key):
        listed = httpx.get(f"{url}/v1/requests", headers={"x-api-key": key}).json()
        assert listed["num_unfinished"] == len(listed["data"])
        return sorted(each["tenant"] for each in listed["data"])

    with (
        serving(engine.address, api_key_file=file) as url,
        asking(url, **{"x-api-key": "ann"}),
        asking(url, count=2, **{"x-api-key": "bob"}),
    ):
        assert tenants("ann") == ["ann"]
        assert tenants("bob") == ["bob", "bob"]
        assert tenants("root") == ["ann", "bob", "bob"]


def test_an_engine_that_explains_a_clients_own_requests_only_is_asked_for_each(start_engine):
    engine = start_engine(step_s=0.02)
    answer = engine.answer

    def refuse(call):
        if isinstance(call.call, calls.GetRequests):
            code = ErrorCode.PERMISSION_DENIED
            return CallFailed(call_id=call.call_id, code=code, message="over TCP without keys")
        return answer(call)

    engine.answer = refuse
    with (
        serving(engine.address) as url,
        serving(engine.address) as other,
        asking(url, count=2),
        asking(other),
    ):
        listed = httpx.get(f"{url}/v1/requests").json()
    assert (len(listed["data"]), listed["num_unfinished"]) == (2, 2)
    assert listed["unavailable"] == {}


def test_requests_of_other_clients_of_the_engine_are_listed_too(start_engine):
    engine = start_engine(step_s=0.02)
    with serving(engine.address) as url, serving(engine.address) as other, asking(other):
        assert len(httpx.get(f"{url}/v1/requests").json()["data"]) == 1


@pytest.fixture
def two(start_engine, address):
    return start_engine(), start_engine(at=f"{address}.second")


def test_a_model_of_two_engines_is_ready_with_one_of_them(two):
    one, other = two
    with serving([one.address, other.address], "small") as url:
        names = [f"small at {each.address}" for each in two]
        answer = httpx.get(f"{url}/health")
        assert answer.json() == {"status": "ok", "engines": dict.fromkeys(names, "ok")}
        other.stop()
        health, ready = httpx.get(f"{url}/health"), httpx.get(f"{url}/ready")
        assert (health.status_code, ready.status_code) == (503, 200)
        assert health.json()["engines"][names[0]] == "ok"
        assert health.json()["engines"][names[1]].startswith("away: no engine answers at")
        assert list(httpx.get(f"{url}/v1/requests").json()["unavailable"]) == [names[1]]
        one.stop()
        assert httpx.get(f"{url}/ready").status_code == 503


def test_a_model_with_a_draining_engine_is_ready_by_the_other_one(two):
    one, other = two
    with serving([one.address, other.address], "small") as url:
        assert httpx.get(f"{url}/ready").status_code == 200
        one.is_draining = True
        wait_until(lambda: "draining" in httpx.get(f"{url}/health").text)
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/ready").status_code == 200
        other.is_draining = True
        wait_until(lambda: httpx.get(f"{url}/ready").status_code == 503)


def test_requests_of_all_engines_of_a_model_are_listed_once_each(two):
    for each in two:
        each.step_s = 0.02
    with serving([each.address for each in two], "small") as url, asking(url, count=4):
        wait_until(lambda: all(each.num_live == 2 for each in two))
        listed = httpx.get(f"{url}/v1/requests").json()
    assert listed["num_unfinished"] == 4
    assert len({each["id"] for each in listed["data"]}) == 4
    assert {each["model"] for each in listed["data"]} == {"small"}


def test_metrics_of_a_models_engines_have_their_own_labels(two):
    one, other = two
    with serving([one.address, other.address], "small") as url:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        for each in two:
            assert f'engine_core_up{{address="{each.address}",model_name="small"}} 1.0' in lines
            label = f'{{engine="{each.engine_id}",model_name="fake",served_model_name="small"}}'
            running = f"engine_core_num_requests_running{label}"
            assert sum(each.startswith(running) for each in lines) == 1
        other.stop()
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        assert f'engine_core_up{{address="{one.address}",model_name="small"}} 1.0' in lines
        assert f'engine_core_up{{address="{other.address}",model_name="small"}} 0.0' in lines
        keys = [line.rpartition(" ")[0] for line in lines if line[:1] not in ("#", "")]
        assert len(keys) == len(set(keys))
