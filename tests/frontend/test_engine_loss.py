"""What a client does when its engine goes away: resume exactly, or end every stream clearly."""

import asyncio
import time

import pytest
from fake_engine import FakeEngine, collect, wait_until
from fake_model import ids_of, saying

from frontend import AsyncLLM, EngineDied, RequestOutputKind, SamplingParams
from frontend.errors import RequestRejected
from protocol.errors import ErrorCode
from protocol.outputs import ErrorMessage


async def whole_answer(address, prompt, params):
    async with AsyncLLM(address) as client:
        return (await collect(client.generate(prompt, params)))[-1]


def die_and_return(first: FakeEngine, **script) -> FakeEngine:
    first.join()
    return FakeEngine(first.address, **script).start()


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_streams_continue_exactly_when_the_engine_comes_back(start_engine, kind):
    first = start_engine(die_after_tokens=30)
    params = SamplingParams(seed=5, max_tokens=40, n=2, output_kind=kind)
    async with AsyncLLM(first.address, reconnect_timeout_s=10) as client:
        streams = [
            asyncio.create_task(collect(client.generate(prompt, params))) for prompt in ("a", "bc")
        ]
        second = await asyncio.to_thread(die_and_return, first)
        results = await asyncio.gather(*streams)
    with second:
        for prompt, outputs in zip(("a", "bc"), results, strict=True):
            whole = SamplingParams(seed=5, max_tokens=40, n=2)
            expected = await whole_answer(second.address, prompt, whole)
            for index in range(2):
                want = expected.outputs[index]
                pieces = [c for o in outputs for c in o.outputs if c.index == index]
                if kind is RequestOutputKind.DELTA:
                    assert "".join(piece.text for piece in pieces) == want.text
                    assert [
                        token for piece in pieces for token in piece.token_ids
                    ] == want.token_ids
                else:
                    assert (pieces[-1].text, pieces[-1].token_ids) == (want.text, want.token_ids)
            assert [output.finished for output in outputs].count(True) == 1
            assert outputs[-1].metrics.num_resumptions == 1
    # one request of two sequences becomes a request for each, with the seed that it had
    resumed = [request for request in second.requests if request.output_token_ids]
    assert [request.num_sequences for request in first.requests] == [2, 2]
    assert [request.num_sequences for request in resumed] == [1, 1, 1, 1]
    assert sorted(request.sampling_params.seed for request in resumed) == [5, 5, 6, 6]
    assert not {r.request_id for r in first.requests} & {r.request_id for r in second.requests}


async def test_a_drawn_seed_survives_the_engine(start_engine):
    first = start_engine(die_after_tokens=10)
    async with AsyncLLM(first.address, reconnect_timeout_s=10) as client:
        task = asyncio.create_task(collect(client.generate("x", SamplingParams(max_tokens=30))))
        second = await asyncio.to_thread(die_and_return, first)
        with second:
            await task
    assert first.requests[0].sampling_params.seed is not None
    assert first.requests[0].sampling_params == second.requests[0].sampling_params


async def test_a_resumed_request_has_the_time_that_is_left(start_engine):
    first = start_engine(die_after_tokens=10)
    params = SamplingParams(max_tokens=30)
    async with AsyncLLM(first.address, reconnect_timeout_s=10) as client:
        tasks = [
            asyncio.create_task(collect(client.generate("x", params, timeout_s=timeout_s)))
            for timeout_s in (20.0, 0.3)
        ]
        await asyncio.to_thread(first.join)
        await asyncio.sleep(0.5)
        with FakeEngine(first.address).start() as second:
            await asyncio.gather(*tasks)
    assert 15 < second.requests[0].timeout_s < 19.6
    assert 0 < second.requests[1].timeout_s < 0.01  # over: the engine says so


async def test_a_stop_string_is_found_across_the_loss(start_engine):
    script = {"next_token": saying("0123456789abcdefghij")}
    first = start_engine(die_after_tokens=12, **script)
    async with AsyncLLM(first.address, reconnect_timeout_s=10) as client:
        params = SamplingParams(max_tokens=200, stop="9abcde")
        task = asyncio.create_task(collect(client.generate("x", params)))
        second = await asyncio.to_thread(die_and_return, first, **script)
        with second:
            outputs = await task
    assert outputs[-1].outputs[0].text == "012345678"
    assert outputs[-1].outputs[0].token_ids == ids_of("0123456789abcde")


async def test_an_engine_that_stays_away_ends_every_stream_with_its_address(start_engine):
    engine = start_engine(die_after_tokens=20)
    async with AsyncLLM(engine.address, reconnect_timeout_s=0.3) as client:
        params = SamplingParams(max_tokens=300)
        streams = [collect(client.generate(prompt, params)) for prompt in ("a", "b", "c")]
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(result, EngineDied) for result in results)
        assert results[0].address == engine.address
        assert engine.address in str(results[0])
        assert "within 0.3 s" in str(results[0])
        assert len(client.session.requests) == 0
        with pytest.raises(EngineDied, match=r"within 0\.3 s"):  # a new request waits as long
            await anext(client.generate("later"))


async def test_what_arrived_before_the_loss_is_delivered_before_the_error(start_engine):
    engine = start_engine(die_after_tokens=20)
    texts = []
    async with AsyncLLM(engine.address, reconnect_timeout_s=0.1) as client:
        with pytest.raises(EngineDied):
            async for output in client.generate("a", SamplingParams(max_tokens=300, seed=1)):
                texts.append(output.outputs[0].text)
                await asyncio.sleep(0.1)
    assert len(texts[-1]) == 20


async def test_another_model_at_the_address_ends_the_streams(start_engine):
    first = start_engine(die_after_tokens=10)
    async with AsyncLLM(first.address, reconnect_timeout_s=10) as client:
        task = asyncio.create_task(collect(client.generate("x", SamplingParams(max_tokens=90))))
        second = await asyncio.to_thread(die_and_return, first, fingerprint="model-2")
        with second:
            with pytest.raises(EngineDied, match="came back with another model"):
                await task
            outputs = await collect(client.generate("x", SamplingParams(max_tokens=3)))
            assert client.model.fingerprint == "model-2"
    assert outputs[-1].finished


async def test_an_engine_that_comes_back_in_another_dtype_ends_what_had_begun(start_engine):
    first = start_engine(die_after_tokens=10, model_fields={"dtype": "bfloat16"})
    async with AsyncLLM(first.address, reconnect_timeout_s=10) as client:
        task = asyncio.create_task(collect(client.generate("x", SamplingParams(max_tokens=90))))
        second = await asyncio.to_thread(die_and_return, first, model_fields={"dtype": "float32"})
        with second:
            with pytest.raises(EngineDied, match=r"tokens differ \(float32.*it was bfloat16"):
                await task
            assert (await collect(client.generate("x", SamplingParams(max_tokens=3))))[-1].finished


async def test_an_engine_that_was_not_restarted_goes_on_with_what_it_serves_now(start_engine):
    """The connection is lost while its weights are updated."""
    first = start_engine(die_after_tokens=10, engine_id="one")
    async with AsyncLLM(first.address, reconnect_timeout_s=10) as client:
        task = asyncio.create_task(collect(client.generate("x", SamplingParams(max_tokens=30))))
        second = await asyncio.to_thread(
            die_and_return, first, engine_id="one", fingerprint="model-2"
        )
        with second:
            outputs = await task
    assert len(outputs[-1].outputs[0].token_ids) == 30


@pytest.mark.parametrize("fingerprint", ["model-1", "model-2"])
async def test_the_weights_that_a_client_was_told_of_last_are_those_that_count(
    start_engine, fingerprint
):
    first = start_engine(die_after_tokens=20, update_after_tokens=10)
    async with AsyncLLM(first.address, reconnect_timeout_s=10) as client:
        task = asyncio.create_task(collect(client.generate("x", SamplingParams(max_tokens=90))))
        second = await asyncio.to_thread(die_and_return, first, fingerprint=fingerprint)
        with second:
            if fingerprint == "model-1":
                with pytest.raises(EngineDied, match="other weights"):
                    await task
            else:
                last = (await task)[-1]
                assert len(last.outputs[0].token_ids) == 90
                assert last.weights_versions == [0, 1, 0]


async def test_a_stream_that_meets_a_draining_engine_goes_on_with_the_next(start_engine):
    first = start_engine(die_after_tokens=10)
    draining = {"refuse": lambda _request: "draining", "refusal_code": ErrorCode.DRAINING}
    async with AsyncLLM(first.address, reconnect_timeout_s=10) as client:
        stream = client.generate("x", SamplingParams(max_tokens=30, seed=2))
        task = asyncio.create_task(collect(stream))
        second = await asyncio.to_thread(die_and_return, first, **draining)
        with second:
            await asyncio.to_thread(wait_until, lambda: second.requests)
            with pytest.raises(RequestRejected, match="draining"):  # not interrupted: said at once
                await collect(client.generate("y"))
        with FakeEngine(first.address) as third:
            outputs = await task
            assert outputs[-1].outputs[0].finish_reason == "length"
            assert outputs[-1].metrics.num_resumptions == 2
            assert third.requests[0].output_token_ids == second.requests[0].output_token_ids
            params = SamplingParams(max_tokens=30, seed=2)
            expected = await whole_answer(third.address, "x", params)
            assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids


async def test_leaving_a_stream_during_a_recovery_forgets_its_request(start_engine):
    first = start_engine(die_after_tokens=5)
    async with AsyncLLM(first.address, reconnect_timeout_s=10) as client:
        stream = client.generate("x", SamplingParams(max_tokens=30))
        await anext(stream)
        await asyncio.to_thread(first.join)
        await asyncio.sleep(0.1)
        await stream.aclose()
        with FakeEngine(first.address) as second:
            await client.ping()
            assert second.requests == []


async def test_a_call_in_flight_ends_with_the_loss(engine, client):
    engine.do = lambda _call: (_ for _ in ()).throw(SystemExit)  # the engine dies of it
    with pytest.raises(EngineDied, match="is gone"):
        await client.ping()


async def test_a_busy_client_does_not_consider_its_engine_lost(engine):
    async with AsyncLLM(engine.address, silence_timeout_s=0.2, reconnect_timeout_s=0) as client:
        task = asyncio.create_task(collect(client.generate("x", SamplingParams(max_tokens=300))))
        await asyncio.sleep(0.05)
        time.sleep(0.6)  # the loop is blocked on purpose
        assert (await task)[-1].metrics.num_resumptions == 0


async def test_a_client_that_the_engine_dropped_connects_again(engine, client):
    stream = client.generate("x", SamplingParams(max_tokens=100, seed=3))
    await anext(stream)
    unknown = ErrorMessage(code="hello_required", message="say HELLO")
    client.session._on_message(unknown)
    outputs = await collect(stream)
    assert len(outputs[-1].outputs[0].token_ids) == 100
    assert len(engine.requests) == 2


async def test_a_resumed_stream_has_its_prompt_logprobs_once_and_asks_for_them_no_more(
    start_engine,
):
    first = start_engine(die_after_tokens=5)
    params = SamplingParams(
        seed=5, max_tokens=20, prompt_logprobs=0, output_kind=RequestOutputKind.DELTA
    )
    async with AsyncLLM(first.address, reconnect_timeout_s=10) as client:
        stream = asyncio.create_task(collect(client.generate("abc", params)))
        second = await asyncio.to_thread(die_and_return, first)
        outputs = await stream
    second.stop()
    [found] = [each.prompt_logprobs for each in outputs if each.prompt_logprobs is not None]
    assert len(found) == 3
    assert first.requests[0].sampling_params.prompt_logprobs == 0
    assert second.requests[0].sampling_params.prompt_logprobs is None
