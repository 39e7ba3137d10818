"""Lines asked of the scripted engine by the server's routes, without a socket."""

import json

import pytest
from http_server import TEMPLATE

from frontend.async_llm import AsyncLLM
from frontend.cluster.answering import answering
from frontend.errors import EngineUnavailable
from frontend.http.served_models import ServedModels


async def answers_of(engine, *lines):
    found = []
    llm = await AsyncLLM.connect(engine.address, reconnect_timeout_s=1)
    async with answering(llm, ["tiny"]) as answerer:
        await answerer.answer_all(
            [(number, json.dumps(each).encode()) for number, each in enumerate(lines, 1)],
            lambda answer: found.append(json.loads(answer.line())),
        )
    return {each["custom_id"]: each for each in found}


async def test_each_line_has_one_answer_also_those_that_are_refused(start_engine, monkeypatch):
    monkeypatch.setattr("frontend.batch.answerer._MOST_IN_FLIGHT", 16)
    engine = start_engine(chat_template=TEMPLATE)
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    found = await answers_of(
        engine,
        {"custom_id": "chat", "url": "/v1/chat/completions", "body": {"model": "tiny", **chat}},
        {"prompt": "A", "max_tokens": 4, "n": 2},
        {"prompt": "A", "max_tokens": -1},
        {"prompt": "A", "model": "gpt-4"},
        {"prompt": "A", "stream": True},
        *({"custom_id": f"more {number}", "prompt": "B"} for number in range(50)),
    )
    assert len(found) == 55
    assert found["chat"]["response"]["status_code"] == 200
    assert found["chat"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert found["chat"]["response"]["request_id"] and found["chat"]["error"] is None
    assert len(found["line-2"]["response"]["body"]["choices"]) == 2
    assert found["line-3"]["response"]["status_code"] == 400
    assert "max_tokens" in found["line-3"]["error"]["message"]
    assert found["line-4"]["error"]["code"] == "model_not_found"
    assert found["line-5"]["response"] is None
    assert found["line-5"]["error"]["code"] == "invalid_request"
    assert all(found[f"more {number}"]["error"] is None for number in range(50))
    assert len({each["id"] for each in found.values()}) == len(found)


async def test_a_defect_is_the_error_of_its_row_alone(engine, monkeypatch):
    find = ServedModels.find

    async def fails_once(self, name):
        monkeypatch.setattr(ServedModels, "find", find)
        raise ZeroDivisionError

    monkeypatch.setattr(ServedModels, "find", fails_once)
    found = await answers_of(engine, {"prompt": "A"}, {"prompt": "B"})
    assert found["line-1"]["response"]["status_code"] == 500
    assert "ZeroDivisionError" in found["line-1"]["error"]["message"]
    assert found["line-2"]["error"] is None


async def test_an_engine_that_is_gone_is_not_the_rows_error(engine):
    llm = await AsyncLLM.connect(engine.address, reconnect_timeout_s=0.2)
    found = []
    async with answering(llm) as answerer:
        engine.stop()
        with pytest.raises(EngineUnavailable, match="is gone"):
            await answerer.answer_all([(1, b'"A"'), (2, b'"B"')], found.append)
    assert found == []
