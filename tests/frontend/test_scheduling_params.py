"""Priority, tenant, cache salt and timeout: from every call to the wire; and a full queue."""

import pytest
from fake_engine import collect
from fake_model import ids_of

from frontend import LLM, AsyncLLM, BeamSearchParams, InvalidInput, QueueFull, SamplingParams
from frontend.errors import CallRefused
from protocol.errors import ErrorCode
from protocol.explanations import WaitReason

GREEDY = SamplingParams(temperature=0, max_tokens=3)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=2)
MESSAGES = [{"role": "user", "content": "hi"}]


async def test_what_a_call_says_reaches_the_engine(client, engine):
    turn = {"priority": -2, "tenant": "team", "cache_salt": "salt", "timeout_s": 7}
    await collect(client.generate("x", GREEDY, **turn))
    await collect(client.chat(MESSAGES, GREEDY, **turn))
    await client.beam_search("x", BEAMS, **turn)
    await collect(client.generate("x", GREEDY))
    *sent, last = [(r.priority, r.tenant, r.cache_salt) for r in engine.requests]
    assert (sent, last) == ([(-2, "team", "salt")] * 3, (0, None, None))
    assert all(6 < request.timeout_s <= 7 for request in engine.requests[:-1])
    assert engine.requests[-1].timeout_s is None


def test_a_batch_has_a_priority_a_prompt_and_one_tenant(engine):
    with LLM(address=engine.address) as llm:
        llm.generate(
            ["a", {"prompt": "b", "cache_salt": "own"}], GREEDY, False, priority=[5, 6],
            tenant="team", cache_salt="own", timeout_s=7,
        )  # fmt: skip
        turn = {"priority": [7], "tenant": "other", "cache_salt": "s", "timeout_s": 7}
        llm.chat(MESSAGES, GREEDY, False, **turn)
        llm.beam_search("x", BEAMS, **turn)
    sent = [(r.priority, r.tenant, r.cache_salt) for r in engine.requests]
    assert sent == [(5, "team", "own"), (6, "team", "own"), *[(7, "other", "s")] * 2]
    assert all(6 < request.timeout_s <= 7 for request in engine.requests)


@pytest.mark.parametrize(
    ("turn", "words"),
    [
        ({"priority": "high"}, "priority is 'high'"),
        ({"priority": True}, "priority is True"),
        ({"priority": 2**31}, "it must be from -2147483647 to 2147483647"),
        ({"tenant": ""}, "tenant is ''"),
        ({"tenant": 5}, "tenant is 5"),
        ({"cache_salt": ""}, "cache_salt of prompt is ''"),
        ({"timeout_s": 0}, "timeout_s is 0, it must be a finite number of seconds above 0"),
        ({"timeout_s": "5"}, "timeout_s is '5'"),
        ({"timeout_s": float("inf")}, "timeout_s is inf"),
        ({"top_k": 3}, "there is no option top_k.* fields of SamplingParams"),
    ],
)
async def test_what_is_none_is_refused_before_it_is_sent(client, engine, turn, words):
    with pytest.raises(InvalidInput, match=words):
        await anext(client.generate("x", GREEDY, **turn))
    assert engine.requests == []


async def test_two_salts_for_one_prompt_are_refused(client):
    prompt = {"prompt": "x", "cache_salt": "one"}
    with pytest.raises(InvalidInput, match="has cache_salt 'one', and 'two' was given beside it"):
        await anext(client.generate(prompt, GREEDY, cache_salt="two"))


async def test_a_full_queue_has_an_exception_of_its_own_and_the_others_go_on(start_engine):
    late = ids_of("late")
    engine = start_engine(
        refuse=lambda r: "9 requests wait, the limit is 9" if r.prompt_token_ids == late else None,
        refusal_code=ErrorCode.QUEUE_FULL,
    )
    async with AsyncLLM(engine.address) as client:
        stream = client.generate("early", SamplingParams(temperature=0, max_tokens=20))
        await anext(stream)
        with pytest.raises(QueueFull, match="9 requests wait, the limit is 9") as caught:
            await collect(client.generate("late", SamplingParams(n=2)))
        assert (await collect(stream))[-1].finished
    assert caught.value.code is ErrorCode.QUEUE_FULL


async def test_a_live_request_explains_itself_by_either_id(start_engine):
    engine = start_engine(step_s=0.01)
    async with AsyncLLM(engine.address) as client:
        stream = client.generate("x", SamplingParams(max_tokens=400, n=2), "mine")
        output = await anext(stream)
        by_mine = await client.request_info("mine")
        by_theirs = await client.request_info(output.metrics.engine_request_id)
        assert by_mine == by_theirs
        assert by_mine.request_id == engine.requests[0].request_id
        assert (by_mine.num_sequences, by_mine.waits_for) == (2, WaitReason.BLOCKS)
        assert await client.request_ids() == [by_mine.request_id]
        await stream.aclose()
        with pytest.raises(CallRefused, match="who is that") as refused:
            await client.request_info("mine")
        assert refused.value.code is ErrorCode.UNKNOWN_REQUEST
