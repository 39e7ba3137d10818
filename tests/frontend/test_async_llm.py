"""Streams, fan-out, stop strings, ids, aborts and calls of AsyncLLM, over a real socket."""

import asyncio
import itertools

import pytest
from fake_engine import collect
from fake_model import EOS, EOS_ID, expected_text, ids_of, saying

from frontend import AsyncLLM, InvalidInput, RequestOutputKind, SamplingParams


def greedy(**more) -> SamplingParams:
    return SamplingParams(temperature=0, **more)


async def test_a_cumulative_stream_grows_to_the_whole_text_and_ends_once(client):
    outputs = await collect(client.generate("hello", greedy(max_tokens=10)))
    texts = [output.outputs[0].text for output in outputs]
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert texts[-1] == expected_text("hello", 10)
    assert [output.finished for output in outputs].count(True) == 1
    last = outputs[-1]
    assert last.finished
    assert last.prompt == "hello"
    assert last.prompt_token_ids == ids_of("hello")
    assert last.outputs[0].finish_reason == "length"
    assert len(last.outputs[0].token_ids) == 10
    assert last.num_cached_tokens == 3
    assert last.metrics.engine is not None
    assert last.metrics.first_token_s <= last.metrics.finished_s


async def test_deltas_concatenate_to_the_cumulative_output(client):
    deltas = await collect(
        client.generate("hi", greedy(max_tokens=12, output_kind=RequestOutputKind.DELTA))
    )
    [whole] = await collect(
        client.generate("hi", greedy(max_tokens=12, output_kind=RequestOutputKind.FINAL_ONLY))
    )
    completion = whole.outputs[0]
    assert "".join(o.outputs[0].text for o in deltas) == completion.text
    assert [token for o in deltas for token in o.outputs[0].token_ids] == completion.token_ids
    assert completion.text == expected_text("hi", 12)


async def test_n_sequences_come_in_one_output_with_seeds_one_apart(client, engine):
    """Proves S190."""
    [output] = await collect(
        client.generate(
            "many",
            SamplingParams(n=3, seed=40, max_tokens=6, output_kind=RequestOutputKind.FINAL_ONLY),
        )
    )
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({completion.text for completion in output.outputs}) == 3
    [sent] = engine.requests
    assert (sent.num_sequences, sent.sampling_params.seed) == (3, 40)
    for index, completion in enumerate(output.outputs):
        params = SamplingParams(seed=40 + index, max_tokens=6)
        alone = await collect(client.generate("many", params))
        assert alone[-1].outputs[0].token_ids == completion.token_ids


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
async def test_n_sequences_of_different_lengths_stream_to_their_ends(start_engine, kind):
    def by_seed(request, num_generated):
        done = num_generated >= 2 * (request.sampling_params.seed - 6)
        return EOS_ID if done else ids_of("x")[0]

    engine = start_engine(next_token=by_seed)
    async with AsyncLLM(engine.address) as client:
        params = SamplingParams(n=3, seed=7, max_tokens=50, output_kind=kind)
        outputs = await collect(client.generate("p", params))
    texts = ["", "", ""]
    for output in outputs:
        for completion in output.outputs:
            before = texts[completion.index] if kind is RequestOutputKind.DELTA else ""
            texts[completion.index] = before + completion.text
    assert texts == ["xx", "xxxx", "xxxxxx"]
    assert outputs[-1].finished
    if kind is RequestOutputKind.CUMULATIVE:
        assert all(len(output.outputs) == 3 for output in outputs)


async def test_a_stop_string_cuts_text_and_tokens_and_stops_the_engine(start_engine):
    engine = start_engine(next_token=saying("one two three four "))
    async with AsyncLLM(engine.address) as client:
        stream = client.generate("count", greedy(max_tokens=400, stop=[" thr", "zzz"]))
        outputs = await collect(stream)
        await client.ping()
    completion = outputs[-1].outputs[0]
    assert completion.text == "one two"
    assert completion.token_ids == ids_of("one two thr")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", " thr")
    assert all("one two".startswith(output.outputs[0].text) for output in outputs)
    assert engine.aborted == engine.complete == [engine.requests[0].request_id]
    assert engine.num_live == 0


async def test_a_stop_string_is_kept_if_asked_for(start_engine):
    engine = start_engine(next_token=saying("one two three "))
    async with AsyncLLM(engine.address) as client:
        params = greedy(max_tokens=99, stop="two", include_stop_str_in_output=True)
        outputs = await collect(client.generate("x", params))
    assert outputs[-1].outputs[0].text == "one two"


async def test_end_of_sequence_is_in_the_tokens_and_not_in_the_text(start_engine):
    engine = start_engine(next_token=saying("bye", then_eos=True))
    async with AsyncLLM(engine.address) as client:
        outputs = await collect(
            client.generate("x", greedy(max_tokens=9, skip_special_tokens=False))
        )
        shown = await collect(
            client.generate(
                "x",
                greedy(max_tokens=9, skip_special_tokens=False, include_stop_str_in_output=True),
            )
        )
    completion = outputs[-1].outputs[0]
    assert completion.text == "bye"
    assert completion.token_ids == [*ids_of("bye"), EOS_ID]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert shown[-1].outputs[0].text == "bye" + EOS


async def test_a_stop_token_ends_it_and_is_named(start_engine):
    engine = start_engine(next_token=saying("abc!"))
    [mark] = ids_of("!")
    async with AsyncLLM(engine.address) as client:
        outputs = await collect(client.generate("x", greedy(max_tokens=9, stop_token_ids=[mark])))
    completion = outputs[-1].outputs[0]
    assert (completion.text, completion.stop_reason) == ("abc", mark)
    assert completion.token_ids == ids_of("abc!")


async def test_logprobs_are_one_dictionary_a_token(client):
    outputs = await collect(client.generate("x", greedy(max_tokens=3, logprobs=2)))
    completion = outputs[-1].outputs[0]
    assert len(completion.logprobs) == 3
    for token_id, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert [(item.logprob, item.rank) for item in entry.values()] == [(-0.5, 1), (-1.0, 2)]
        assert next(iter(entry)) == token_id
        assert ids_of(entry[token_id].decoded_token) == [token_id]
    assert completion.cumulative_logprob == pytest.approx(-1.5)


async def test_without_detokenizing_there_are_tokens_and_no_text(client):
    outputs = await collect(client.generate("x", greedy(max_tokens=3, detokenize=False)))
    assert outputs[-1].outputs[0].text == ""
    assert len(outputs[-1].outputs[0].token_ids) == 3


async def test_leaving_a_stream_early_aborts_its_request(client, engine):
    stream = client.generate("x", greedy(max_tokens=400))
    async for _output in stream:
        break
    await stream.aclose()
    await client.ping()
    assert engine.aborted == [engine.requests[0].request_id]
    assert engine.complete == []
    assert len(client.session.requests) == 0


async def test_cancelling_the_consumer_aborts_its_request(client, engine):
    task = asyncio.create_task(collect(client.generate("x", greedy(max_tokens=400))))
    while not engine.requests:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await client.ping()
    assert engine.aborted == [engine.requests[0].request_id]


async def test_abort_gives_the_stream_a_last_output(client, engine):
    outputs = []
    async for output in client.generate("x", greedy(max_tokens=400), "mine"):
        outputs.append(output)
        await client.abort("mine")
    await client.abort("unknown")
    await client.ping()
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert engine.num_live == 0


async def test_a_second_live_request_with_the_same_id_is_refused(client, engine):
    stream = client.generate("x", greedy(max_tokens=400), "twice")
    await anext(stream)
    with pytest.raises(InvalidInput, match="'twice' is that of an unfinished request"):
        await anext(client.generate("y", greedy(), "twice"))
    await stream.aclose()
    assert (await collect(client.generate("y", greedy(), "twice")))[-1].finished
    assert len({request.request_id for request in engine.requests}) == 2


async def test_two_clients_with_the_same_ids_get_their_own_tokens(engine):
    async with AsyncLLM(engine.address) as one, AsyncLLM(engine.address) as two:
        prompts = [f"prompt {number}" for number in range(10)]
        streams = [
            collect(
                (one, two)[number % 2].generate(prompt, greedy(max_tokens=20), f"{number // 2}")
            )
            for number, prompt in enumerate(prompts)
        ]
        results = await asyncio.gather(*streams)
    for prompt, outputs in zip(prompts, results, strict=True):
        assert outputs[-1].outputs[0].text == expected_text(prompt, 20)


async def test_outputs_merge_for_a_slow_consumer_and_others_do_not_wait(client):
    slow_outputs = []
    stream = client.generate("slow", greedy(max_tokens=100, output_kind=RequestOutputKind.DELTA))
    slow_outputs.append(await anext(stream))
    fast = await collect(client.generate("fast", greedy(max_tokens=150)))
    assert fast[-1].outputs[0].text == expected_text("fast", 150)
    slow_outputs += await collect(stream)
    assert len(slow_outputs) < 100
    text = "".join(output.outputs[0].text for output in slow_outputs)
    assert text == expected_text("slow", 100)


async def test_calls_are_answered(client):
    assert (await client.ping()).uptime_s == 1.5
    assert await client.reset_prefix_cache() == 5
    assert (await client.statistics()).num_blocks == 64
    assert await client.drain() == 0
    assert client.model.name == "fake"
    assert client.get_tokenizer().encode("ab") == ids_of("ab")


async def test_the_models_defaults_are_used_where_no_parameters_are_given(client, engine):
    await collect(client.generate("x"))
    sent = engine.requests[0].sampling_params
    assert (sent.temperature, sent.top_k, sent.max_tokens) == (0.25, 7, 16)
    assert client.get_default_sampling_params() == SamplingParams(temperature=0.25, top_k=7)


async def test_a_chat_goes_through_the_template(client, engine):
    messages = [{"role": "user", "content": "hi"}]
    outputs = await collect(client.chat(messages, greedy(max_tokens=2)))
    assert outputs[-1].prompt == "user:hi;"
    assert engine.requests[0].prompt_token_ids == ids_of("user:hi;")
