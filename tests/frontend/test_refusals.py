"""How AsyncLLM refuses, and what it says when no engine answers."""

import asyncio

import pytest
from fake_engine import FakeEngine, collect, wait_until
from fake_model import EOS_ID, MAX_MODEL_LEN, expected_text, ids_of

from frontend import AsyncLLM, InvalidInput, SamplingParams
from frontend.errors import ClientClosed, EngineRefused, EngineUnavailable, RequestRejected
from protocol.errors import ErrorCode


def greedy(**more) -> SamplingParams:
    return SamplingParams(temperature=0, **more)


async def test_a_refused_request_raises_and_the_others_go_on(start_engine):
    marked = ids_of("bad")
    engine = start_engine(
        refuse=lambda r: "no, send another" if r.prompt_token_ids == marked else None
    )
    async with AsyncLLM(engine.address) as client:
        good = asyncio.create_task(collect(client.generate("good", greedy(max_tokens=30))))
        with pytest.raises(RequestRejected, match="no, send another") as refusal:
            await collect(client.generate("bad", SamplingParams(n=2)))
        assert refusal.value.code is ErrorCode.INVALID_REQUEST
        assert (await good)[-1].outputs[0].text == expected_text("good", 30)


async def test_a_request_that_fails_in_the_engine_ends_with_reason_error(start_engine):
    engine = start_engine(fail=lambda _request, number: "logits are NaN" if number == 4 else None)
    async with AsyncLLM(engine.address) as client:
        outputs = await collect(client.generate("x", greedy(max_tokens=30)))
    completion = outputs[-1].outputs[0]
    assert (completion.finish_reason, completion.detail) == ("error", "logits are NaN")
    assert completion.text == expected_text("x", 4)


@pytest.mark.parametrize("stop", [None, "~~"])  # text is made when it is taken, or as it comes
async def test_a_fault_in_one_stream_leaves_the_others_alone(client, engine, monkeypatch, stop):
    broken = client.generate("broken", greedy(max_tokens=300, stop=stop), "broken")
    await anext(broken)
    request = client.session.requests.get("broken")

    def explode(_token_ids):
        raise RuntimeError("boom")

    monkeypatch.setattr(request.sequences[0]._detokenizer, "append", explode)
    good = asyncio.create_task(collect(client.generate("good", greedy(max_tokens=30))))
    with pytest.raises(RuntimeError, match="boom"):
        await collect(broken)
    assert (await good)[-1].outputs[0].text == expected_text("good", 30)
    assert engine.requests[0].request_id in engine.aborted


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([EOS_ID + 1], "token id 257"),
        ([1, "x"], "holds 'x'"),
        (5, "of type int"),
        ({"text": "x"}, "has 'text'"),
        ({}, "neither"),
        ("x" * MAX_MODEL_LEN, f"has {MAX_MODEL_LEN} tokens, the limit is "),
    ],
)
async def test_a_prompt_that_cannot_be_served_is_refused_before_it_is_sent(
    client, engine, prompt, message
):
    with pytest.raises(InvalidInput, match=message):
        await anext(client.generate(prompt))
    await client.ping()
    assert engine.requests == []


async def test_the_longest_prompt_gets_one_token(client):
    outputs = await collect(
        client.generate("x" * (MAX_MODEL_LEN - 1), greedy(max_tokens=None, min_tokens=9))
    )
    assert len(outputs[-1].outputs[0].token_ids) == 1


async def test_without_a_tokenizer_tokens_are_served_and_text_is_refused(start_engine):
    engine = start_engine(with_tokenizer=False)
    async with AsyncLLM(engine.address) as client:
        with pytest.raises(InvalidInput, match="send prompt_token_ids"):
            await anext(client.generate("text"))
        with pytest.raises(InvalidInput, match="use stop_token_ids"):
            await anext(client.generate([1, 2], greedy(stop="x")))
        outputs = await collect(client.generate([1, 2], greedy(max_tokens=4)))
    assert len(outputs[-1].outputs[0].token_ids) == 4
    assert outputs[-1].outputs[0].text == ""


async def test_an_engine_of_another_wire_version_is_refused_with_its_own_words(start_engine):
    engine = start_engine(wire_version=99)
    with pytest.raises(EngineRefused, match="wire version 99"):
        await AsyncLLM.connect(engine.address)


async def test_a_missing_socket_is_told_at_once(address):
    with pytest.raises(EngineUnavailable, match="does not exist; start one with `engine-core"):
        await AsyncLLM.connect(address, connect_timeout_s=60)


async def test_a_refused_connection_is_told_at_once():
    with pytest.raises(EngineUnavailable, match="refused"):
        await AsyncLLM.connect("tcp://127.0.0.1:9", connect_timeout_s=60)


async def test_an_address_of_no_kind_is_refused():
    with pytest.raises(InvalidInput, match="use ipc://PATH or tcp://HOST:PORT"):
        await AsyncLLM.connect("engine.sock")


async def test_closing_says_goodbye_and_ends_streams(engine):
    client = await AsyncLLM.connect(engine.address)
    stream = client.generate("x", greedy(max_tokens=400))
    await anext(stream)
    await client.close()
    with pytest.raises(ClientClosed):
        await collect(stream)
    with pytest.raises(ClientClosed):
        await anext(client.generate("x"))
    await asyncio.to_thread(wait_until, lambda: engine.num_goodbyes == 1)


async def test_tcp_serves_as_well(address):
    with FakeEngine("tcp://127.0.0.1:*") as engine:
        async with AsyncLLM(engine.address) as client:
            outputs = await collect(client.generate("x", greedy(max_tokens=5)))
    assert outputs[-1].outputs[0].text == expected_text("x", 5)
