"""A prompt is computed by one engine and goes on at another, if that pays; whatever becomes of the
first one, the answer is the same."""

import asyncio
import threading

import pytest
from fake_engine import wait_until
from fake_model import expected_text

from frontend import AsyncLLM, SamplingParams
from frontend.errors import ClientClosed
from frontend.fleet.disaggregation import MIN_TOKENS, PrefillPlanner
from protocol.outputs import DisaggregationInfo

SOURCE = "tcp://10.0.0.1:5700"
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
LONG = "x" * (2 * MIN_TOKENS)


async def final(stream):
    return [output async for output in stream][-1]


@pytest.fixture
def start_both(start_engine, address):
    """An engine that computes prompts, and one that fetches from it; what each does else."""

    def start(prefill=(), decode=(), *, source=SOURCE):
        return (
            start_engine(
                disaggregation=DisaggregationInfo("prefill", kv_address=SOURCE), **dict(prefill)
            ),
            start_engine(
                at=f"{address}.decode",
                disaggregation=DisaggregationInfo("decode", kv_sources=(source,)),
                **dict(decode),
            ),
        )

    return start


def client_of(*engines):
    return AsyncLLM([engine.address for engine in engines])


async def test_a_long_prompt_is_computed_first_and_a_short_or_known_one_is_not(start_both):
    prefill, decode = start_both()
    async with client_of(prefill, decode) as llm:
        for prompt in (LONG, "short", LONG):
            output = await final(llm.generate(prompt, GREEDY))
            assert output.outputs[0].text == expected_text(prompt, 20)
        reports = SamplingParams(max_tokens=2, prompt_logprobs=1)
        await final(llm.generate("y" * len(LONG), reports))
        assert not llm.session.handoff.prefills
        assert not llm.session.handoff.handed_over
        assert len(llm.session.requests) == 0
    (computed,) = prefill.requests
    assert computed.sampling_params.max_tokens == 1
    assert [each.kv_source for each in decode.requests] == [SOURCE, None, None, None]


async def test_samples_and_their_salt_go_the_same_way(start_both):
    prefill, decode = start_both()
    params = SamplingParams(max_tokens=5, n=3, seed=4)
    async with client_of(prefill, decode) as llm:
        stream = llm.generate({"prompt": LONG, "cache_salt": "salt"}, params)
        assert len((await final(stream)).outputs) == 3
    assert [each.num_sequences for each in (*prefill.requests, *decode.requests)] == [1, 3]
    assert [each.cache_salt for each in (*prefill.requests, *decode.requests)] == ["salt"] * 2


@pytest.mark.parametrize(
    "script",
    [
        {"die_after_tokens": 0},
        {"refuse": lambda request: "no room"},
        {"fail": lambda request, number: "a fault"},
    ],
)
async def test_an_engine_that_cannot_compute_it_costs_time_only(start_both, script):
    prefill, decode = start_both(script)
    async with client_of(prefill, decode) as llm:
        output = await asyncio.wait_for(final(llm.generate(LONG, GREEDY)), 30)
        assert output.outputs[0].text == expected_text(LONG, 20)
    assert [each.kv_source for each in decode.requests] == [None]


async def test_an_engine_that_hangs_is_waited_for_no_longer_than_it_may_be_silent(
    start_both, monkeypatch
):
    prefill, decode = start_both()
    monkeypatch.setattr("frontend.fleet.disaggregation._SILENT_S", -1.0)
    async with client_of(prefill, decode) as llm:
        output = await asyncio.wait_for(final(llm.generate(LONG, GREEDY)), 30)
    assert output.outputs[0].text == expected_text(LONG, 20)
    assert [each.kv_source for each in decode.requests] == [None]


async def test_engines_whose_blocks_are_of_no_use_are_not_asked(start_both):
    prefill, decode = start_both(source="tcp://10.0.0.2:5700")
    async with client_of(prefill, decode) as llm:
        await final(llm.generate(LONG, GREEDY))
    assert [len(prefill.requests), len(decode.requests)] == [0, 1]


async def test_engines_of_other_arithmetic_are_not_asked(start_both):
    prefill, decode = start_both({"instruction_set": "other"})
    async with client_of(prefill, decode) as llm:
        await final(llm.generate(LONG, GREEDY))
    assert [len(prefill.requests), len(decode.requests)] == [0, 1]


async def test_a_stream_whose_decoding_engine_dies_goes_on_where_prompts_are_computed(start_both):
    prefill, decode = start_both(decode={"die_after_tokens": 5})
    async with client_of(prefill, decode) as llm:
        output = await asyncio.wait_for(final(llm.generate(LONG, GREEDY)), 30)
    assert output.outputs[0].text == expected_text(LONG, 20)
    assert prefill.requests[-1].kv_source is None, "it fetches from no engine"
    assert len(prefill.requests) == 2


@pytest.mark.parametrize("how", ["abort", "close"])
async def test_a_request_may_end_while_its_prompt_is_computed(start_both, how):
    prefill, decode = start_both()
    never = threading.Event()
    prefill.next_token = lambda *_: never.wait(30)
    async with client_of(prefill, decode) as llm:
        task = asyncio.create_task(final(llm.generate(LONG, GREEDY, request_id="mine")))
        await asyncio.to_thread(wait_until, lambda: prefill.requests)
        if how == "abort":
            await llm.abort("mine")
            assert (await asyncio.wait_for(task, 30)).outputs[0].finish_reason == "abort"
            assert not llm.session.handoff.prefills
            assert len(llm.session.requests) == 0
    if how == "close":
        with pytest.raises(ClientClosed):
            await asyncio.wait_for(task, 30)
    never.set()
    assert not decode.requests


# what pays


def measured(prefill_s, transfer_s, num_arrived=1000):
    planner = PrefillPlanner()
    planner.on_prefilled(1000, 1000 * prefill_s)
    for _ in range(100):
        planner.on_transferred(1000, num_arrived, 1000 * transfer_s)
    return planner


def test_nothing_measured_a_prompt_goes_if_it_is_not_short():
    planner = PrefillPlanner()
    assert planner.pays(MIN_TOKENS, num_streams=0, num_queued=0)
    assert not planner.pays(MIN_TOKENS - 1, num_streams=50, num_queued=0)


@pytest.mark.parametrize(
    ("transfer_s", "num_streams", "num_queued", "pays"),
    [
        (1e-5, 0, 0, True),  # 1 s of work, 10 ms of transfer
        (2e-3, 1, 0, False),  # moved more slowly than computed
        (2e-3, 5, 0, True),  # and yet less than five streams would wait
        (1e-5, 1, 5000, False),  # 5 s of other prompts before it
        (1e-5, 8, 5000, True),
    ],
)
def test_seconds_of_all_that_wait_are_weighed(transfer_s, num_streams, num_queued, pays):
    planner = measured(1e-3, transfer_s)
    assert planner.pays(1000, num_streams=num_streams, num_queued=num_queued) == pays


def test_blocks_that_do_not_arrive_save_nothing_and_are_tried_again_some_time():
    planner = measured(1e-3, 1e-5, num_arrived=0)
    tries = [planner.pays(1000, num_streams=4, num_queued=0) for _ in range(200)]
    assert not any(tries[:10])
    assert tries[-1]
