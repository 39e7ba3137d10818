"""Several engines of one model behind one client."""

import asyncio

import pytest
from fake_engine import FakeEngine, collect, wait_until
from fake_model import expected_text

from frontend import (
    AsyncLLM,
    EngineDied,
    QueueFull,
    RequestOutputKind,
    SamplingParams,
)
from frontend.errors import EngineUnavailable, InvalidInput, RequestRejected
from frontend.fleet import engine_group
from protocol.errors import ErrorCode

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
LONG = "a prompt of many tokens that two requests begin with, "


async def final(stream):
    return (await collect(stream))[-1]


async def eventually(condition):
    await asyncio.to_thread(wait_until, condition)


def connected(llm):
    return [engine.session.is_connected for engine in llm.engines]


@pytest.fixture
def pair(start_engine, address):
    """Two engines: what both do, then what each does."""

    def start(first=(), second=(), **both):
        return (
            start_engine(**both, **dict(first)),
            start_engine(at=f"{address}.second", **both, **dict(second)),
        )

    return start


def client_of(*engines, **options):
    return AsyncLLM([engine.address for engine in engines], **options)


async def test_requests_are_shared_out(pair):
    a, b = pair()
    async with client_of(a, b) as llm:
        outputs = await asyncio.gather(*(final(llm.generate("x" * n, GREEDY)) for n in range(1, 9)))
    assert [each.outputs[0].text for each in outputs] == [
        expected_text("x" * n, 40) for n in range(1, 9)
    ]
    assert len(a.requests) == len(b.requests) == 4


async def test_a_prompt_goes_where_its_beginning_went(pair):
    a, b = pair()
    async with client_of(a, b) as llm:
        for number in range(6):
            for prompt in (LONG, LONG.upper()):
                await final(llm.generate(f"{prompt}{number}", SamplingParams(max_tokens=1)))
    assert [len(a.requests), len(b.requests)] == [6, 6]
    for engine in (a, b):
        assert len({tuple(each.prompt_token_ids[:30]) for each in engine.requests}) == 1


@pytest.mark.parametrize(("kind", "n"), [(kind, n) for n, kind in enumerate(RequestOutputKind, 1)])
async def test_streams_of_a_lost_engine_go_on_exactly_at_an_equal_one(pair, kind, n):
    a, b = pair({"die_after_tokens": 30})
    params = SamplingParams(seed=5, max_tokens=40, n=n, logprobs=2, output_kind=kind)
    async with client_of(a, b) as llm:
        results = await asyncio.gather(*(collect(llm.generate(p, params)) for p in "abcd"))
    async with AsyncLLM(b.address) as alone:
        whole = SamplingParams(seed=5, max_tokens=40, n=n, logprobs=2)
        expected = [await final(alone.generate(p, whole)) for p in "abcd"]
    assert sum(output[-1].metrics.num_resumptions for output in results) == 2
    for outputs, want in zip(results, expected, strict=True):
        assert [output.finished for output in outputs].count(True) == 1
        for index in range(n):
            pieces = [c for o in outputs for c in o.outputs if c.index == index]
            if kind is not RequestOutputKind.DELTA:
                pieces = pieces[-1:]
            assert "".join(piece.text for piece in pieces) == want.outputs[index].text
            tokens = [token for piece in pieces for token in piece.token_ids]
            assert tokens == want.outputs[index].token_ids
            logprobs = [entry for piece in pieces for entry in piece.logprobs]
            assert logprobs == want.outputs[index].logprobs


async def test_what_an_engine_ends_with_itself_goes_on_at_another_one(pair):
    a, b = pair(step_s=0.005)
    async with client_of(a, b) as llm:
        streams = asyncio.gather(*(collect(llm.generate(p, GREEDY)) for p in "abcd"))
        await eventually(lambda: a.num_tokens > 10)
        a.must_end = True
        results = await streams
    assert [each[-1].outputs[0].text for each in results] == [expected_text(p, 40) for p in "abcd"]
    assert [each[-1].outputs[0].finish_reason for each in results] == ["length"] * 4


async def test_an_engine_of_another_instruction_set_does_not_get_what_has_begun(pair):
    a, b = pair({"die_after_tokens": 20}, instruction_set="one")
    b.instruction_set = "two"
    async with client_of(a, b, reconnect_timeout_s=0.5) as llm:
        results = await asyncio.gather(
            *(collect(llm.generate(p, GREEDY)) for p in "abcd"), return_exceptions=True
        )
        assert sum(isinstance(each, EngineDied) for each in results) == 2
        why = str(next(each for each in results if isinstance(each, EngineDied)))
        assert "within 0.5 s" in why
        assert "none of the 1 other engines that are there could go on with it: they differ" in why
        await final(llm.generate("new ones go there", GREEDY))
    assert len(b.requests) == 3
    assert not any(each.is_resumed for each in b.requests)


async def test_without_an_equal_engine_a_stream_waits_for_its_own(pair):
    a, b = pair({"die_after_tokens": 20}, instruction_set="one")
    b.instruction_set = "two"
    async with client_of(a, b) as llm:
        streams = asyncio.gather(*(collect(llm.generate(p, GREEDY)) for p in "abcd"))
        await asyncio.to_thread(a.join)
        with FakeEngine(a.address, instruction_set="one").start() as again:
            results = await streams
    assert [each[-1].outputs[0].text for each in results] == [expected_text(p, 40) for p in "abcd"]
    assert len(again.requests) == 2
    assert all(each.is_resumed for each in again.requests)


async def test_a_stream_moves_to_an_equal_engine_that_comes_while_its_own_is_away(pair):
    a, b = pair({"die_after_tokens": 20}, instruction_set="one")
    b.instruction_set = "two"
    async with client_of(a, b) as llm:
        streams = asyncio.gather(*(collect(llm.generate(p, GREEDY)) for p in "abcd"))
        await asyncio.to_thread(a.join)
        await eventually(lambda: not b.num_live)
        await asyncio.to_thread(b.stop)
        with FakeEngine(b.address, instruction_set="one").start() as other:
            results = await streams
    assert [each[-1].outputs[0].text for each in results] == [expected_text(p, 40) for p in "abcd"]
    assert len(other.requests) == 2


def refuses_other_weights(request):
    """As an engine whose adapters have the weights "one"."""
    is_known = request.adapter_fingerprint in (None, "one")
    return None if is_known else "adapter 'sql' has other weights than those that it began with"


async def test_streams_with_an_adapter_go_on_only_where_it_has_the_same_weights(pair, address):
    a, b = pair({"die_after_tokens": 20})
    c = FakeEngine(f"{address}.third").start()
    a.adapters, b.adapters, c.adapters = {"sql": "one"}, {"sql": "two"}, {"sql": "one"}
    with c:
        async with client_of(a, b, c) as llm:
            results = await asyncio.gather(
                *(collect(llm.generate(p, GREEDY, adapter="sql")) for p in "abcd")
            )
    assert [each[-1].outputs[0].text for each in results] == [expected_text(p, 40) for p in "abcd"]
    assert all([output.finished for output in each].count(True) == 1 for each in results)
    moved = [each for each in c.requests if each.is_resumed]
    assert len(moved) == len(a.requests) > 0
    assert {(each.adapter, each.adapter_fingerprint) for each in moved} == {("sql", "one")}
    assert not any(each.is_resumed for each in b.requests)


async def test_without_the_same_adapter_elsewhere_a_stream_ends_with_the_reason(pair):
    a, b = pair({"die_after_tokens": 20})
    a.adapters, b.adapters = {"sql": "two"}, {"sql": "one"}
    async with client_of(a, b, reconnect_timeout_s=0.5) as llm:
        results = await asyncio.gather(
            *(collect(llm.generate(p, GREEDY, adapter="sql")) for p in "abcd"),
            return_exceptions=True,
        )
        died = [each for each in results if isinstance(each, EngineDied)]
        assert len(died) == len(a.requests) == 2
        assert "did not come back within 0.5 s" in str(died[0])
        # a request that has not begun goes to the engine that is left, with its weights
        await final(llm.generate("new", GREEDY, adapter="sql"))
    assert not any(each.is_resumed for each in b.requests)


async def test_its_own_engine_with_other_weights_of_the_adapter_ends_a_stream(pair):
    a, b = pair({"die_after_tokens": 20})
    a.adapters, b.adapters = {"sql": "two"}, {"sql": "one"}
    async with client_of(a, b) as llm:
        streams = asyncio.gather(
            *(collect(llm.generate(p, GREEDY, adapter="sql")) for p in "abcd"),
            return_exceptions=True,
        )
        await asyncio.to_thread(a.join)
        again = FakeEngine(
            a.address, refuse=refuses_other_weights, refusal_code=ErrorCode.UNKNOWN_ADAPTER
        )
        again.adapters = {"sql": "one"}
        with again:
            results = await streams
    refused = [each for each in results if isinstance(each, RequestRejected)]
    assert len(refused) == len(again.requests) == 2
    assert {each.code for each in refused} == {ErrorCode.UNKNOWN_ADAPTER}
    assert "other weights" in str(refused[0])


async def test_an_adapters_requests_go_where_its_beginnings_are_cached(pair):
    a, b = pair()
    a.adapters = b.adapters = {"sql": "one"}
    async with client_of(a, b) as llm:
        for number in range(4):
            for adapter in (None, "sql"):
                one = SamplingParams(max_tokens=1)
                await final(llm.generate(f"{LONG}{number}", one, adapter=adapter))
    adapters = [{each.adapter for each in engine.requests} for engine in (a, b)]
    assert adapters in ([{None}, {"sql"}], [{"sql"}, {None}])
    assert len(a.requests) == len(b.requests) == 4


async def test_an_engine_that_answers_again_is_used_again(pair):
    a, b = pair()
    async with client_of(a, b) as llm:
        await asyncio.to_thread(a.stop)
        await eventually(lambda: connected(llm) == [False, True])
        await asyncio.gather(*(final(llm.generate(p, GREEDY)) for p in "abcd"))
        assert [len(a.requests), len(b.requests)] == [0, 4]
        with FakeEngine(a.address).start() as again:
            await eventually(lambda: connected(llm) == [True, True])
            await asyncio.gather(*(final(llm.generate(p, GREEDY)) for p in "abcd"))
        assert len(again.requests) > 1


async def test_a_request_made_while_all_engines_are_away_waits_for_one_of_them(pair, address):
    a, b = pair()
    async with client_of(a, b, reconnect_timeout_s=10) as llm:
        await asyncio.to_thread(a.stop)
        await asyncio.to_thread(b.stop)
        await eventually(lambda: connected(llm) == [False, False])
        await asyncio.sleep(1.5)  # between attempts to reach them
        waiting = [asyncio.create_task(final(llm.generate(p, GREEDY))) for p in "abcd"]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in waiting)
        with FakeEngine(b.address).start():
            results = await asyncio.gather(*waiting)
    assert [each.outputs[0].text for each in results] == [expected_text(p, 40) for p in "abcd"]


async def test_an_engine_that_is_silent_gets_no_new_requests(pair, monkeypatch):
    a, b = pair()
    monkeypatch.setattr(engine_group, "_SILENT_S", 0.3)
    async with client_of(a, b) as llm:
        await final(llm.generate(LONG, GREEDY))
        a.mute = True
        await eventually(lambda: llm.engines[0].session.silence_s() > 0.3)
        await asyncio.gather(*(final(llm.generate(LONG + p, GREEDY)) for p in "abcd"))
        assert [len(a.requests), len(b.requests)] == [1, 4]
        a.mute = False
        await eventually(lambda: llm.engines[0].session.silence_s() < 0.3)
        await final(llm.generate(LONG, GREEDY))
        assert len(a.requests) == 2


async def test_an_engine_that_drains_gets_no_new_requests(pair):
    a, b = pair()
    async with client_of(a, b) as llm:
        a.is_draining = True
        await eventually(lambda: llm.engines[0].session.is_draining)
        await asyncio.gather(*(final(llm.generate(p, GREEDY)) for p in "abcd"))
    assert [len(a.requests), len(b.requests)] == [0, 4]


@pytest.mark.parametrize("code", [ErrorCode.DRAINING, ErrorCode.QUEUE_FULL])
async def test_what_one_engine_is_too_busy_for_another_one_takes(pair, code):
    a, b = pair({"refuse": lambda _request: "not now", "refusal_code": code})
    async with client_of(a, b) as llm:
        results = await asyncio.gather(*(final(llm.generate(p, GREEDY)) for p in "abcd"))
    assert [each.outputs[0].text for each in results] == [expected_text(p, 40) for p in "abcd"]
    assert len(b.requests) == 4
    assert not any(each.is_resumed for each in b.requests), "the limits of the queue hold"


async def test_what_all_engines_refuse_ends_once_with_the_last_ones_reason(pair):
    a, b = pair(refuse=lambda _request: "12 wait", refusal_code=ErrorCode.QUEUE_FULL)
    async with client_of(a, b) as llm:
        with pytest.raises(QueueFull, match="12 wait"):
            await collect(llm.generate("x", GREEDY))
        assert len(llm.session.requests) == llm.session.requests.num_in_flight == 0
    assert len(a.requests) == len(b.requests) == 1


async def test_a_request_that_is_wrong_is_asked_once(pair):
    a, b = pair(refuse=lambda _request: "wrong")
    async with client_of(a, b) as llm:
        with pytest.raises(RequestRejected, match="wrong"):
            await collect(llm.generate("x", GREEDY))
    assert len(a.requests) + len(b.requests) == 1


class DyingEngine(FakeEngine):
    def _accept(self, identity, request):
        self.requests.append(request)
        self._stopping.set()


async def test_a_request_that_three_engines_die_of_is_not_given_to_a_fourth(address):
    engines = [DyingEngine(f"{address}.{number}").start() for number in range(4)]
    async with client_of(*engines, reconnect_timeout_s=0.5) as llm:
        with pytest.raises(EngineDied):
            await collect(llm.generate("x", GREEDY))
    assert sorted(len(engine.requests) for engine in engines) == [0, 1, 1, 1]


async def test_when_all_engines_are_lost_each_stream_ends_once(pair):
    a, b = pair(die_after_tokens=20)
    async with client_of(a, b, reconnect_timeout_s=0.3) as llm:
        results = await asyncio.gather(
            *(collect(llm.generate(p, GREEDY)) for p in "abcd"), return_exceptions=True
        )
        assert all(isinstance(each, EngineDied) for each in results)
        with pytest.raises(EngineUnavailable, match="none of 2 engines is there"):
            await collect(llm.generate("later", GREEDY))
        assert len(llm.session.requests) == 0


async def test_leaving_a_stream_that_moved_aborts_it_where_it_is(pair):
    a, b = pair({"die_after_tokens": 6}, {"step_s": 0.01})
    async with client_of(a, b) as llm:
        streams = [llm.generate(p, SamplingParams(max_tokens=400)) for p in "ab"]
        for stream in streams:
            await anext(stream)
        await asyncio.to_thread(a.join)
        await eventually(lambda: len(b.requests) == 2)
        for stream in streams:
            await stream.aclose()
        await eventually(lambda: b.num_live == 0)
        assert len(b.aborted) == 2


async def test_requests_of_both_engines_are_known_by_their_ids(pair):
    a, b = pair(step_s=0.01)
    async with client_of(a, b) as llm:
        streams = [llm.generate(p, SamplingParams(max_tokens=400), p) for p in "ab"]
        for stream in streams:
            await anext(stream)
        assert {(await llm.request_info(p)).request_id[0] for p in "ab"} == {"a", "b"}
        assert [len(await engine.request_ids()) for engine in llm.engines] == [1, 1]
        with pytest.raises(InvalidInput, match=r"use one of `client\.engines`"):
            await llm.statistics()
        with pytest.raises(InvalidInput, match="'a' is that of an unfinished request"):
            await collect(llm.generate("x", GREEDY, "a"))
        await llm.abort(["a", "b"])
        for stream in streams:
            assert (await collect(stream))[-1].outputs[0].finish_reason == "abort"


async def test_one_engine_is_enough_to_begin(pair, address):
    a, _ = pair()
    async with AsyncLLM([f"{address}.nothing", a.address]) as llm:
        assert (await final(llm.generate("x", GREEDY))).outputs[0].text == expected_text("x", 40)
    with pytest.raises(EngineUnavailable, match="none of 2 engines is there"):
        await AsyncLLM.connect([f"{address}.nothing", f"{address}.either"])


def test_an_address_twice_is_refused():
    with pytest.raises(InvalidInput, match="given twice"):
        AsyncLLM(["ipc:///a", "ipc:///b", "ipc:///a"])
