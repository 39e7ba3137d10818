"""The HTTP server's model whose engines are replicas: it waits for one, and follows them."""

import asyncio
import contextlib

import httpx
import pytest
from fake_model import expected_text

from frontend.cluster.replicated_model import ReplicatedModel
from frontend.http.app import make_app
from frontend.http.served_models import ServedModels

BODY = {"model": "small", "prompt": "abc", "max_tokens": 8, "temperature": 0}


@pytest.fixture
def start_at(start_engine, address):
    return lambda name: start_engine(at=f"{address}.{name}")


@contextlib.asynccontextmanager
async def served(start, *, may_rest, startup_timeout_s=60.0):
    """The model, and a client of a server of it."""
    model = ReplicatedModel(
        "small",
        start=start,
        may_rest=may_rest,
        startup_timeout_s=startup_timeout_s,
        client_options={"reconnect_timeout_s": 60.0},
    )
    app = make_app(ServedModels([model]))
    transport = httpx.ASGITransport(app=app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client,
    ):
        yield model, client


async def test_a_request_has_a_replica_started_and_waits_for_it(start_at):
    num_asked = 0

    async def start():
        nonlocal num_asked
        num_asked += 1
        await asyncio.sleep(0.3)
        model.set_addresses((start_at("a").address,))

    async with served(start, may_rest=True) as (model, client):
        health = (await client.get("/ready")).json()
        assert health == {"status": "ok", "engines": {"small": "scaled to zero"}}
        assert num_asked == 0
        answers = await asyncio.gather(*(client.post("/v1/completions", json=BODY) for _ in "ab"))
        for answer in answers:
            assert answer.json()["choices"][0]["text"] == expected_text("abc", 8)
        assert num_asked == 1
        assert (await client.get("/health")).json()["engines"] == {"small": "ok"}


async def test_a_stream_says_meanwhile_what_it_waits_for(start_at, monkeypatch):
    from frontend.http.on_demand import while_starting

    monkeypatch.setattr(while_starting, "BEGIN_S", 0.1)

    async def start():
        await asyncio.sleep(0.5)
        model.set_addresses((start_at("a").address,))

    async with served(start, may_rest=True) as (model, client):
        answer = await client.post("/v1/completions", json={**BODY, "stream": True})
    first, *_ = answer.text.splitlines()
    assert first.startswith(": small is starting for 0 s")
    assert answer.text.endswith("data: [DONE]\n\n")


async def test_without_a_replica_in_time_a_request_is_a_503(start_at):
    async def start():
        await asyncio.Event().wait()

    async with served(start, may_rest=False, startup_timeout_s=0.2) as (_, client):
        answer = await client.post("/v1/completions", json=BODY)
        assert answer.status_code == 503
        assert "small does not serve: no replica is there" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]
        ready = await client.get("/ready")
        assert ready.status_code == 503
        assert "has no replica" in ready.json()["engines"]["small"]


async def test_after_its_replicas_have_gone_it_is_started_again(start_at):
    names = iter("ab")

    async def start():
        model.set_addresses((start_at(next(names)).address,))

    async with served(start, may_rest=True) as (model, client):
        for _ in range(2):
            answer = await client.post("/v1/completions", json=BODY)
            assert answer.json()["choices"][0]["text"] == expected_text("abc", 8)
            model.set_addresses(())
            assert (await client.get("/health")).json()["engines"] == {"small": "scaled to zero"}
