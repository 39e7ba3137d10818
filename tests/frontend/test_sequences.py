"""Several sequences of one request: sent once, each with its index, ended one by one or at once."""

import struct

from fake_engine import collect
from fake_model import EOS_ID, ids_of
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend import AsyncLLM, SamplingParams
from frontend.event_loop import Clock
from frontend.output_processor import OutputProcessor
from frontend.request_state import RequestState
from protocol.outputs import DecodedTokens, EngineCoreOutput, EngineCoreOutputs, FinishReason
from protocol.requests import EngineRequest
from tests.profiles import examples

NOTHING = []
"""To abort: neither requests nor samples."""


def request_state(n=3, *, seed=10, **params):
    params = SamplingParams(**{"n": n, "max_tokens": 100, "detokenize": False} | params)
    request = EngineRequest(
        request_id="mine", prompt_token_ids=[1, 2], num_sequences=n, priority=3, tenant="team",
        sampling_params=params.to_wire(2, 500, seed=seed),
    )  # fmt: skip
    return RequestState(
        request,
        params,
        prompt_text=None,
        output_kind=params.output_kind,
        tokenizer=None,
        now=Clock().now,
    )


def in_flight(**params):
    """A processor with one request, the request, and what was sent for it."""
    processor, request = OutputProcessor(Clock().now), request_state(**params)
    processor.add_request(request)
    return processor, request, processor.wire_requests(request)


def columns(*entries):
    """(wire id, index, token) each."""
    return EngineCoreOutputs(
        other_outputs=[],
        decoded=DecodedTokens(
            request_ids=[name for name, _, _ in entries],
            token_ids=struct.pack(f"<{len(entries)}i", *(token for _, _, token in entries)),
            indexes=[index for _, index, _ in entries],
        ),
    )


def end(name, index=0, reason=FinishReason.LENGTH, detail=None, tokens=()):
    return EngineCoreOutput(
        request_id=name,
        new_token_ids=list(tokens),
        index=index,
        finish_reason=reason,
        detail=detail,
    )


async def test_the_prompt_is_sent_once_with_all_that_the_engine_needs():
    _, request, [message] = in_flight()
    assert (message.num_sequences, message.prompt_token_ids) == (3, [1, 2])
    assert (message.priority, message.tenant, message.sampling_params.seed) == (3, "team", 10)
    assert request.metrics.engine_request_id == message.request_id
    assert not message.is_resumed


async def test_what_is_sent_again_says_that_it_is_resumed():
    processor, request, _ = in_flight()
    assert processor.drop_wire_ids() == [request]
    [again] = processor.wire_requests(request)
    assert again.is_resumed, "also if nothing of it has come"
    processor.process_outputs(columns((again.request_id, 1, 5)))
    assert processor.drop_wire_ids() == [request]
    assert [part.is_resumed for part in processor.wire_requests(request)] == [True] * 3


async def test_after_a_loss_outputs_under_the_old_ids_reach_nothing():
    processor, request, [before] = in_flight()
    assert processor.drop_wire_ids() == [request]
    assert processor.num_in_flight == 0
    [after] = processor.wire_requests(request)
    assert (after.num_sequences, after.request_id != before.request_id) == (3, True)
    late = columns((before.request_id, 0, 5))
    late.finished_req_ids.append(before.request_id)
    assert processor.process_outputs(late) == NOTHING
    assert (request.has_started, request.finished) == (False, False)
    processor.process_outputs(columns((after.request_id, 0, 6)))
    assert request.sequences[0].token_ids == [6]


async def test_columns_and_objects_reach_their_sequence_in_any_mixture():
    processor, request, [message] = in_flight()
    name = message.request_id
    assert (
        processor.process_outputs(columns((name, 0, 5), (name, 2, 7), ("gone", 1, 9), (name, 1, 6)))
        == NOTHING
    )
    middle = EngineCoreOutputs(other_outputs=[end(name, 1, tokens=[8])])
    assert processor.process_outputs(middle) == NOTHING
    assert not request.finished
    last = EngineCoreOutputs(
        other_outputs=[end(name, 0), end(name, 2, tokens=[4])], finished_req_ids=[name]
    )
    assert processor.process_outputs(last) == NOTHING
    assert [sequence.token_ids for sequence in request.sequences] == [[5], [6, 8], [7, 4]]
    assert request.finished
    assert processor.num_in_flight == 0


async def test_an_engine_that_stops_ends_every_sequence_with_one_output():
    processor, request, [message] = in_flight()
    name = message.request_id
    processor.process_outputs(columns((name, 1, 5)))
    stopping = end(name, 0, FinishReason.ABORT, "the engine is stopping")
    processor.process_outputs(EngineCoreOutputs(other_outputs=[stopping], finished_req_ids=[name]))
    output = await request.next_output()
    assert output.finished
    assert {(c.finish_reason, c.detail) for c in output.outputs} == {
        ("abort", "the engine is stopping")
    }


async def test_each_sequence_is_stopped_when_it_has_found_its_stop_string(start_engine):
    """The engine is told at once, so that it frees what the sequence holds; the others go on."""

    def by_seed(request, number):
        text = "ab" * request.sampling_params.seed + "STOP" + "x" * 400
        return ids_of(text)[number]

    engine = start_engine(next_token=by_seed)
    async with AsyncLLM(engine.address) as client:
        params = SamplingParams(n=3, seed=1, max_tokens=400, stop="STOP")
        outputs = await collect(client.generate("x", params))
        await client.ping()
    assert [c.text for c in outputs[-1].outputs] == ["ab", "abab", "ababab"]
    [name] = [request.request_id for request in engine.requests]
    assert engine.aborted_samples == [(name, 0), (name, 1)]
    assert engine.aborted == engine.complete == [name]
    assert engine.num_live == 0


async def test_a_sequence_stopped_here_and_another_there_stop_the_request_too(start_engine):
    def by_seed(request, number):
        if request.sampling_params.seed == 1:
            return ids_of("STOP" + "w" * 400)[number]
        return ids_of("abcdefgh")[number] if number < 8 else EOS_ID

    engine = start_engine(next_token=by_seed)
    async with AsyncLLM(engine.address) as client:
        params = SamplingParams(n=2, seed=1, max_tokens=400, stop="STOP")
        outputs = await collect(client.generate("x", params))
        await client.ping()
    assert [(c.text, c.stop_reason) for c in outputs[-1].outputs] == [
        ("", "STOP"),
        ("abcdefgh", None),
    ]
    assert engine.num_live == 0


async def test_logprobs_of_every_sequence_are_its_own(client):
    params = SamplingParams(n=2, seed=3, max_tokens=4, logprobs=1)
    outputs = await collect(client.generate("x", params))
    for completion in outputs[-1].outputs:
        assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids


@settings(max_examples=examples(60))
@given(data=st.data())
async def test_tokens_arrive_whole_and_in_order_however_often_the_engine_is_lost(data):
    """Any mixture of columns, objects and losses: each sequence has its tokens, once, in order."""
    processor, request, messages = in_flight(n=3, max_tokens=1000)
    expected = [[], [], []]
    ended = set()
    while not request.finished:
        if data.draw(st.integers(0, 9), "loss") == 0:
            [unfinished] = processor.drop_wire_ids()
            messages = processor.wire_requests(unfinished)
            for message in messages:
                number = message.sampling_params.seed - 10
                if message.num_sequences == 1:
                    assert message.output_token_ids == expected[number]
                    assert number not in ended
                else:
                    assert not any(expected), "what never began is sent whole"
        entries, others, over = [], [], []
        for message in messages:
            first = message.sampling_params.seed - 10
            for index in range(message.num_sequences):
                if first + index in ended:
                    continue
                token = data.draw(st.integers(0, 99))
                expected[first + index].append(token)
                match data.draw(st.sampled_from(["end", "column", "object"])):
                    case "column":
                        entries.append((message.request_id, index, token))
                    case "object":
                        others.append(
                            EngineCoreOutput(
                                request_id=message.request_id, new_token_ids=[token], index=index
                            )
                        )
                    case "end":
                        others.append(end(message.request_id, index, tokens=[token]))
                        ended.add(first + index)
            if ended.issuperset(range(first, first + message.num_sequences)):
                over.append(message.request_id)
        batch = columns(*entries)
        sent = EngineCoreOutputs(other_outputs=others, finished_req_ids=over, decoded=batch.decoded)
        assert processor.process_outputs(sent) == NOTHING
    assert [sequence.token_ids for sequence in request.sequences] == expected
    assert processor.num_in_flight == 0
