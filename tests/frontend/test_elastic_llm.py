"""A client whose engines come and go."""

import asyncio

import pytest
from fake_engine import wait_until
from fake_model import expected_text

from frontend.elastic_llm import ElasticLLM
from frontend.errors import EngineDied, InvalidInput
from frontend.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
PROMPTS = "abcd"


async def final(stream):
    return [output async for output in stream][-1]


async def eventually(condition):
    await asyncio.to_thread(wait_until, condition, 60)


@pytest.fixture
def start_at(start_engine, address):
    return lambda name, **script: start_engine(at=f"{address}.{name}", **script)


def streams(llm):
    return asyncio.gather(*(final(llm.generate(p, GREEDY)) for p in PROMPTS))


def texts(outputs):
    return [each.outputs[0].text for each in outputs]


EXPECTED = [expected_text(p, 40) for p in PROMPTS]


async def test_an_engine_that_comes_is_used_and_one_that_goes_is_not(start_at):
    a, b = start_at("a"), start_at("b")
    async with ElasticLLM(a.address) as llm:
        assert texts(await streams(llm)) == EXPECTED
        assert len(a.requests) == 4
        llm.set_addresses([a.address, b.address])
        await eventually(lambda: all(e.session.is_connected for e in llm.engines))
        assert texts(await streams(llm)) == EXPECTED
        assert b.requests
        llm.set_addresses([b.address])
        num_requests = len(a.requests)
        assert texts(await streams(llm)) == EXPECTED
        assert [each.address for each in llm.engines] == [b.address]
        await eventually(lambda: a.num_goodbyes == 1)
        assert len(a.requests) == num_requests


async def test_what_runs_in_an_engine_that_leaves_ends_there(start_at):
    a, b = start_at("a", step_s=0.005), start_at("b")
    async with ElasticLLM(a.address) as llm:
        running = streams(llm)
        await eventually(lambda: a.num_tokens > 10)
        llm.set_addresses([b.address])
        assert texts(await running) == EXPECTED
    assert not b.requests


async def test_streams_of_the_only_engine_go_on_at_one_that_comes_later(start_at):
    a = start_at("a", step_s=0.005)
    async with ElasticLLM(a.address, reconnect_timeout_s=60) as llm:
        running = streams(llm)
        await eventually(lambda: a.num_tokens > 10)
        a.stop()
        llm.set_addresses([])
        await eventually(lambda: not llm.is_served)
        assert llm.engines == []
        b = start_at("b")
        llm.set_addresses([b.address])
        outputs = await running
        assert texts(outputs) == EXPECTED
        assert {each.metrics.num_resumptions for each in outputs} == {1}
        assert texts(await streams(llm)) == EXPECTED


async def test_streams_without_any_engine_end_in_time(start_at):
    a = start_at("a", step_s=0.005)
    async with ElasticLLM(a.address, reconnect_timeout_s=0.3) as llm:
        running = asyncio.gather(
            *(final(llm.generate(p, GREEDY)) for p in PROMPTS), return_exceptions=True
        )
        await eventually(lambda: a.num_tokens > 10)
        a.stop()
        llm.set_addresses([])
        assert {type(each) for each in await running} == {EngineDied}


async def test_numbers_of_engines_that_left_are_given_again(start_at):
    first = start_at("first")
    async with ElasticLLM(first.address) as llm:
        for turn in range(2):
            other = start_at(f"{turn}")
            llm.set_addresses([first.address, other.address])
            await eventually(lambda: all(e.session.is_connected for e in llm.engines))
            assert texts(await streams(llm)) == EXPECTED
            assert other.requests
            llm.set_addresses([first.address])
            await eventually(lambda engine=other: engine.num_goodbyes == 1)
        assert len(llm.session.sessions) == 2


async def test_an_address_of_neither_kind_is_refused_and_changes_nothing(start_at):
    a = start_at("a")
    async with ElasticLLM(a.address) as llm:
        with pytest.raises(InvalidInput, match="no known scheme"):
            llm.set_addresses(["http://here"])
        assert [each.address for each in llm.engines] == [a.address]
