"""Beam search as a caller sees it: what is sent, what comes back, and what is refused."""

import asyncio

import pytest
from fake_engine import FakeEngine
from fake_model import EOS_ID, ids_of

from frontend import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    InvalidInput,
    QueueFull,
    RequestRejected,
)
from protocol.errors import ErrorCode


async def test_the_beams_come_best_first_with_prompt_text_and_score(client, engine):
    params = BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.5, early_stopping=True)
    output = await client.beam_search("hi", params)
    [sent] = engine.requests
    assert (sent.num_sequences, sent.beam_search.beam_width) == (3, 3)
    assert (sent.beam_search.length_penalty, sent.beam_search.early_stopping) == (0.5, True)
    assert (sent.sampling_params.temperature, sent.sampling_params.logprobs) == (0.0, None)
    assert [beam.cum_logprob for beam in output.sequences] == [-1.0, -2.0, -3.0]
    best, second, _ = output.sequences
    assert best.tokens[:2] == ids_of("hi")
    assert len(best.output_token_ids) == 5
    assert second.output_token_ids == [(token + 1) % EOS_ID for token in best.output_token_ids]
    assert best.text.startswith("hi")
    assert len(best.text) == 7
    assert best.finish_reason == "length"


def test_batches_come_in_order_and_vllms_call_is_taken(engine):
    with LLM(address=engine.address) as llm:
        prompts = [{"prompt_token_ids": ids_of("b")}, {"prompt": "a"}, "c"]
        outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=4))
    assert [output.sequences[0].tokens[0] for output in outputs] == [
        ids_of(letter)[0] for letter in "bac"
    ]
    assert all(len(output.sequences) == 2 for output in outputs)


async def test_a_search_that_lost_its_engine_starts_again_from_the_prompt(start_engine):
    first = start_engine()
    first.step = lambda: None  # nothing comes
    async with AsyncLLM(first.address, reconnect_timeout_s=10) as client:
        params = BeamSearchParams(beam_width=2, max_tokens=4)
        task = asyncio.create_task(client.beam_search("x", params))
        while not first.requests:
            await asyncio.sleep(0.005)
        await asyncio.to_thread(first.stop)
        with FakeEngine(first.address) as second:
            output = await task
            [again] = second.requests
    assert (again.num_sequences, again.output_token_ids) == (2, [])
    assert again.beam_search == first.requests[0].beam_search
    assert len(output.sequences) == 2


async def test_a_refused_search_raises_or_says_why_in_its_place(start_engine):
    bad = ids_of("bad")
    engine = start_engine(
        refuse=lambda r: "2 requests wait" if r.prompt_token_ids == bad else None,
        refusal_code=ErrorCode.QUEUE_FULL,
    )
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    async with AsyncLLM(engine.address) as client:
        with pytest.raises(QueueFull, match="2 requests wait") as caught:
            await client.beam_search("bad", params)
    assert isinstance(caught.value, RequestRejected)
    assert caught.value.code is ErrorCode.QUEUE_FULL

    def batch():
        with LLM(address=engine.address) as llm:
            return llm.beam_search(["good", "bad"], params)

    good, refused = await asyncio.to_thread(batch)
    assert len(good.sequences) == 2
    assert (refused.sequences, refused.detail) == ([], "2 requests wait")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"beam_width": 0}, "beam_width is 0, it must be from 1 to 64"),
        ({"beam_width": 65}, "beam_width is 65"),
        ({"beam_width": 2.0}, "beam_width is 2.0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'"),
        ({"temperature": 0.7}, "temperature is 0.7 in a beam search"),
    ],
)
def test_values_that_cannot_be_are_refused_when_they_are_given(arguments, words):
    with pytest.raises(InvalidInput, match=words):
        BeamSearchParams(**arguments)


def test_other_parameters_are_not_taken_for_a_beam_search(engine):
    with LLM(address=engine.address) as llm:
        with pytest.raises(InvalidInput, match="it must be BeamSearchParams"):
            llm.beam_search("x", {"beam_width": 2})
        with pytest.raises(InvalidInput, match="lora_request"):
            llm.beam_search("x", BeamSearchParams(), lora_request=object())
        with pytest.raises(InvalidInput, match="token id 257"):
            llm.beam_search([[257]], BeamSearchParams())
    assert engine.requests == []
