"""What a body may be made of, and what is left out of it."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.http.anthropic.bodies import MessagesRequest
from frontend.http.api_errors import ApiError
from frontend.http.app import OPERATIONS
from frontend.http.decoding import BodyCounter, decode
from frontend.http.generation.requests import ChatCompletionRequest, CompletionRequest
from frontend.http.ollama.bodies import ChatRequest

JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a,:{}[]"\\é\n')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('a"\\,')), inner),
)


def counted(body: bytes, *cuts: int) -> dict[str, int]:
    counter = BodyCounter()
    places = [0, *sorted(cuts), len(body)]
    for start, stop in zip(places, places[1:], strict=False):  # noqa: RUF007
        counter.feed(body[start:stop])
    return counter.counts


def parts_of(value: Any) -> tuple[int, int, int]:
    """Texts, names, objects and arrays."""
    inner = []
    if isinstance(value, dict):
        inner = [*value.values()]
    elif isinstance(value, list):
        inner = value
    texts, names, several = map(sum, zip((0, 0, 0), *map(parts_of, inner), strict=True))
    is_several, num_names = isinstance(value, dict | list), isinstance(value, dict) and len(value)
    return texts + isinstance(value, str) + num_names, names + num_names, several + is_several


@given(value=JSON, is_ascii=st.booleans(), cuts=st.lists(st.integers(0, 40)))
def test_marks_in_texts_do_not_count_however_the_body_is_cut(value, is_ascii, cuts):
    body = json.dumps(value, ensure_ascii=is_ascii).encode()
    found = counted(body, *(min(cut, len(body)) for cut in cuts))
    assert (found["texts"], found["names"], found["objects and arrays"]) == parts_of(value)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"[" + b"1," * 2**19 + b"1,1]", "524288 values"),
        (b"[" * 2**14 + b"[", "16384 objects and arrays"),
        (b"{" + b'"a":1,' * (2**16 + 1), "65536 names"),
        (b"[" + b'"a",' * (2**17 + 1), "131072 texts"),
    ],
)
def test_a_body_of_too_many_parts_is_refused_before_it_is_decoded(body, what):
    with pytest.raises(ApiError, match=f"the body has more than {what}; send fewer") as refused:
        counted(body)
    assert refused.value.status == 413


def decoded(kind: type, body: bytes | dict[str, Any]) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return asyncio.run(decode(msgspec.json.Decoder(kind), data))


def test_unknown_nulls_are_dropped_at_every_place_in_one_pass(monkeypatch):
    conversions = []

    def convert(*args: Any) -> Any:
        conversions.append(args)
        return original(*args)

    original = msgspec.convert
    monkeypatch.setattr(msgspec, "convert", convert)
    thought = {"type": "thinking", "thinking": "b", "v": None}
    blocks = [{"type": "text", "text": "a", "u": None}, thought]
    body = {
        "model": "m",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": blocks, "w": None}] * 3,
        "metadata": {"user_id": None, "x": None},
        **{f"field {number}": None for number in range(40)},
    }
    asked = decoded(MessagesRequest, body)
    assert [block.cache_control for block in asked.messages[2].content] == [None, None]
    assert len(conversions) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "a", "x": 1}], "y": None}, "messages[0].x"),
        ({"messages": [{"role": "user", "content": "a"}], "x": None, "z": 0}, "z"),
        ({"messages": [{"role": "user", "x": None}, {"role": "user", "x": 0}]}, "messages[1].x"),
    ],
)
def test_an_unknown_field_that_asks_for_something_is_refused_by_name(fields, param):
    with pytest.raises(ApiError, match="is not supported; omit it") as refused:
        decoded(ChatCompletionRequest, fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (ChatCompletionRequest, "max_token", "or did you mean 'max_tokens'"),
        (ChatCompletionRequest, "functions", "or did you mean 'tools'"),
        (ChatCompletionRequest, "extra_body", "fields of the body itself"),
        (ChatCompletionRequest, "colour", "omit it$"),
        (MessagesRequest, "stop", "or did you mean 'stop_sequences'"),
        (ChatRequest, "temperature", "or did you mean 'options.temperature'"),
        (ChatRequest, "max_tokens", "or did you mean 'options.num_predict'"),
        (ChatRequest, "response_format", "or did you mean 'format'"),
    ],
)
def test_an_unknown_field_is_answered_with_the_one_that_was_meant(kind, name, meant):
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(ApiError, match=meant):
        decoded(kind, {"model": "m", "messages": messages, name: 1})


@pytest.mark.parametrize(
    ("text", "half", "place"),
    [
        (rb"\ud83d", r"\ud83d", 12),
        (rb"abc \ud83d abc", r"\ud83d", 16),
        (rb"abc \ud83dabcdefghijklmnopqrstuvw", r"\ud83d", 16),
        (rb"\ude00 and so on and so on and so on", r"\ude00", 12),
        (rb"\ud83d\ude00\ud83d\ud83d\ude00", r"\ud83d", 24),
    ],
)
def test_half_a_surrogate_pair_is_named_with_its_place(text, half, place):
    with pytest.raises(ApiError) as refused:
        decoded(CompletionRequest, b'{"prompt": "' + text + b'"}')
    assert f"half a surrogate pair, {half}, at byte {place}:" in str(refused.value)


DEEP = b"[" * 10_000 + b"]" * 10_000
BROKEN = [
    b'{"model": "\xe9"}',
    b'{"model": "\\ud800"}',
    b'{"zzz": null, "model": "\xe9"}',
    b'{"zzz": null, "model": NaN}',
    b'{"zzz": null, "model": 1e999}',
    b'{"zzz": null, "model": [}',
    b'{"zzz":' + DEEP + b"}",
    b'{"zzz": null, "model": ' + DEEP + b"}",
    b'{"chat_template_kwargs": {"a": ' + DEEP + b"}}",
    b"",
    b"null",
    b"[]",
]


@pytest.mark.parametrize("kind", [each.takes for each in OPERATIONS if each.takes is not None])
def test_a_broken_body_is_the_callers_fault(kind):
    for body in BROKEN:
        with pytest.raises(ApiError) as refused:
            decoded(kind, body)
        assert refused.value.status == 400


@pytest.mark.parametrize(
    "body", [b'{"prompt": "a', b'{"prompt": "\\\\ud83d', b"{]", b'{"prompt": "\xed\xa0\xbd"}']
)
def test_other_broken_bodies_are_no_json(body):
    with pytest.raises(ApiError, match="the body is not valid JSON"):
        decoded(CompletionRequest, body)
