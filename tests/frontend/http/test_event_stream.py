"""Events of which only a text changes, beside the same events encoded whole."""

import asyncio
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.http.event_stream import TextEvents, built, event, in_pieces
from frontend.http.generation.answer_bodies import ChatChunkChoice, ChatCompletionChunk, Delta


def chunk(model: str, text: str) -> bytes:
    choice = ChatChunkChoice(index=3, delta=Delta(content=text))
    return event(ChatCompletionChunk(id="chatcmpl-1", created=7, model=model, choices=[choice]))


@given(model=st.text(), text=st.text())
def test_a_text_event_is_the_event_encoded_whole(model, text):
    assert TextEvents(chunk(model, ""), "content").event(text) == chunk(model, text)


def test_a_name_that_looks_like_the_field_changes_nothing():
    model = 'a "content":"" b'
    assert TextEvents(chunk(model, ""), "content").event('"\n') == chunk(model, '"\n')


@given(items=st.lists(st.integers() | st.text() | st.none()), size=st.integers(1, 5))
def test_a_list_in_pieces_is_the_list_encoded_whole(items, size):
    assert msgspec.json.encode({"a": in_pieces(iter(items), size)}) == msgspec.json.encode(
        {"a": items}
    )


@pytest.mark.parametrize(("num_parts", "is_beside"), [(3, False), (100_000, True)])
def test_what_has_many_parts_is_made_beside_the_event_loop(num_parts, is_beside):
    thread = asyncio.run(built(threading.get_ident, num_parts))
    assert (thread != threading.get_ident()) == is_beside


USAGE = {"stream_options": {"continuous_usage_stats": True, "include_usage": True}}


@pytest.mark.parametrize("extra", [{}, {"logprobs": True}, USAGE])
def test_chat_deltas_have_the_same_fields_with_and_without_other_wishes(serve_text, extra):
    http = serve_text("Hello you")
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 64}
    lines = http.post("/v1/chat/completions", json=body | extra).text.split("\n\n")
    events = [msgspec.json.decode(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for each in events for choice in each["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello you"
    assert all(set(choice) == {"index", "delta", "logprobs", "finish_reason"} for choice in choices)
    assert all(("usage" in each) == ("stream_options" in extra) for each in events)


@pytest.mark.parametrize("extra", [{}, {"return_token_ids": True}, {"echo": True}])
def test_completions_of_several_prompts_stream_each_its_own_text(serve_text, extra):
    http = serve_text("Hello you")
    body = {"prompt": ["a", "b"], "n": 2, "stream": True, "max_tokens": 64}
    lines = http.post("/v1/completions", json=body | extra).text.split("\n\n")
    texts = {}
    for line in lines:
        if line.startswith("data: {"):
            for choice in msgspec.json.decode(line[6:])["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    prompts = "aabb" if "echo" in extra else [""] * 4
    assert texts == {index: prompt + "Hello you" for index, prompt in enumerate(prompts)}
