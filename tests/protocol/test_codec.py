"""The wire: what goes in comes out, and nothing else does."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_messages import CLIENT_MESSAGES, ENGINE_MESSAGES, REQUEST

from protocol.base import WIRE_VERSION
from protocol.codec import (
    binary_frame,
    check_wire_version,
    decode_client_message,
    decode_engine_message,
    encode,
    request_id_of,
)
from protocol.errors import MalformedMessage, WireVersionMismatch
from protocol.multimodal import TensorRef
from protocol.outputs import DecodedTokens, EngineCoreOutput, EngineCoreOutputs
from protocol.requests import Goodbye
from tests.protocol.all_outputs import all_outputs


@pytest.mark.parametrize("message", CLIENT_MESSAGES, ids=lambda m: type(m).__name__)
def test_client_messages_survive_the_wire(message):
    """Proves S031."""
    assert decode_client_message(encode(message)) == message


@pytest.mark.parametrize("message", ENGINE_MESSAGES, ids=lambda m: type(m).__name__)
def test_engine_messages_survive_the_wire(message):
    """Proves S227, S228."""
    assert decode_engine_message(encode(message)) == message


@given(st.binary(max_size=200), st.sampled_from([decode_client_message, decode_engine_message]))
def test_garbage_is_a_malformed_message_or_another_version_and_nothing_else(frame, decode):
    with contextlib.suppress(MalformedMessage, WireVersionMismatch):
        decode(frame)


_SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
_VALUES = st.recursive(
    _SCALARS | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@given(data=st.data(), value=_VALUES)
def test_a_message_with_one_wrong_field_is_understood_or_malformed_and_nothing_else(data, value):
    """A field, at any depth, of any message is replaced by anything that msgpack can hold."""
    direction = data.draw(st.sampled_from(["client", "engine"]))
    messages = CLIENT_MESSAGES if direction == "client" else ENGINE_MESSAGES
    decode = decode_client_message if direction == "client" else decode_engine_message
    fields = msgspec.msgpack.decode(encode(data.draw(st.sampled_from(messages))))
    place, key = _some_place(fields, data)
    place[key] = value
    with contextlib.suppress(MalformedMessage, WireVersionMismatch):
        message = decode(msgspec.msgpack.encode(fields))
        assert decode(encode(message)) == message or value != value or _holds_nan(fields)


def _some_place(fields, data):
    while True:
        keys = list(fields) if isinstance(fields, dict) else list(range(len(fields)))
        key = data.draw(st.sampled_from(keys))
        inner = fields[key]
        if not (isinstance(inner, list | dict) and inner and data.draw(st.booleans())):
            return fields, key
        fields = inner


def _holds_nan(value):
    if isinstance(value, list):
        return any(map(_holds_nan, value))
    if isinstance(value, dict):
        return any(map(_holds_nan, value.values()))
    return value != value


def test_columns_are_read_as_outputs_when_asked_for():
    outputs = EngineCoreOutputs(
        other_outputs=[EngineCoreOutput(request_id="first", new_token_ids=[1])],
        decoded=DecodedTokens(
            request_ids=["a", "b", "a"],
            token_ids=b"\5\0\0\0\6\0\0\0\7\0\0\0",
            indexes=[0, 0, 2],
        ),
    )
    seen = [(each.request_id, each.index, each.new_token_ids) for each in all_outputs(outputs)]
    assert seen == [("first", 0, [1]), ("a", 0, [5]), ("b", 0, [6]), ("a", 2, [7])]
    assert not any(each.finished for each in all_outputs(outputs))


_OPENINGS = {
    "lists": b"\x91", "long lists": b"\xdc\0\1", "longer lists": b"\xdd\0\0\0\1",
    "maps": b"\x81\0", "keys": b"\x81", "long maps": b"\xdf\0\0\0\1\xa1a",
}  # fmt: skip


@pytest.mark.parametrize("opening", _OPENINGS.values(), ids=_OPENINGS)
@pytest.mark.parametrize(
    ("decode", "messages"),
    [(decode_client_message, CLIENT_MESSAGES), (decode_engine_message, ENGINE_MESSAGES)],
    ids=["client", "engine"],
)
def test_a_message_that_nests_or_is_cut_anywhere_is_malformed(decode, messages, opening):
    """Also in the place of any field, and behind the last one."""
    nested = opening * 5000 + b"\0" * 10_000
    for message in messages:
        frame, fields = encode(message), msgspec.msgpack.decode(encode(message))
        head = msgspec.msgpack.encode([*fields[:1]])[1:]
        frames = [frame[:place] for place in range(0, len(frame), 1 + len(frame) // 50)]
        frames += [frame + nested, bytes([0x90 + min(15, len(fields) + 1)]) + frame[1:] + nested]
        for at in range(1, len(fields) + 1):
            before = b"".join(map(msgspec.msgpack.encode, fields[1:at]))
            after = b"".join(map(msgspec.msgpack.encode, fields[at + 1 :]))
            length = bytes([0xDC, 0, max(at + 1, len(fields))])
            frames.append(length + head + before + nested + after)
        for each in frames:
            with pytest.raises((MalformedMessage, WireVersionMismatch)) as raised:
                decode(each)
            assert len(str(raised.value)) < 2000
            request_id_of(each)


def test_lengths_that_lie_take_no_memory():
    for length in (b"\xdd", b"\xdf", b"\xc6", b"\xdb"):
        for head in (b"", b"\x92\3", b"\x94\2\xa1r", b"\x93\2\xa1r\x90"):
            with pytest.raises(MalformedMessage):
                decode_client_message(head + length + b"\xff\xff\xff\xff")


def test_a_hello_of_another_version_is_told_apart_from_garbage_whatever_its_other_fields():
    for fields in ([1, 99], [1, 99, 7, 8, {"new": "field"}], [1, 99, "name", True, "more"]):
        with pytest.raises(
            WireVersionMismatch, match=f"version 99, this side speaks {WIRE_VERSION}"
        ):
            message = decode_client_message(msgspec.msgpack.encode(fields))
            check_wire_version(message.wire_version)


@pytest.mark.parametrize("text", [b"\xa1\xff", b"\xa2\xc3\x28", b"\xa3\xed\xa0\x80"])
def test_a_text_that_is_not_utf_8_is_malformed(text):
    """msgspec raises another error for it than for all other garbage."""
    for frame in (
        b"\x94\x01" + bytes([WIRE_VERSION]) + text + b"\xc3",
        b"\x93\x03\x91" + text + b"\x90",
    ):
        with pytest.raises(MalformedMessage, match="not a client message: 'utf-8' codec"):
            decode_client_message(frame)
    with pytest.raises(MalformedMessage, match="not an engine message: 'utf-8' codec"):
        decode_engine_message(b"\x93\x06" + text + b"\xa1a")
    assert request_id_of(b"\x92\x02" + text) is None


def test_unknown_tags_and_extra_fields_are_malformed():
    for fields in ([77], ["hello"], {"type": 1}, [3, ["a"], "extra"], [4, 1, [9]]):
        with pytest.raises(MalformedMessage):
            decode_client_message(msgspec.msgpack.encode(fields))


def test_a_request_with_a_bad_parameter_still_says_which_request_it_is():
    raw = msgspec.msgpack.decode(encode(REQUEST))
    raw[3][0] = -5  # max_tokens
    frame = msgspec.msgpack.encode(raw)
    with pytest.raises(MalformedMessage, match="max_tokens is -5, it must be at least 1"):
        decode_client_message(frame)
    assert request_id_of(frame) == "r"
    assert request_id_of(b"\xc1") is None
    assert request_id_of(encode(Goodbye())) is None


def test_binary_frames_are_checked_against_shape_and_dtype():
    frames = [bytes(48), bytes(5)]
    assert binary_frame(TensorRef(frame=0, dtype="float32", shape=(3, 4)), frames).nbytes == 48
    for ref, words in [
        (TensorRef(frame=2, dtype="uint8", shape=(1,)), "frame 2 is missing, 2 were sent"),
        (TensorRef(frame=-1, dtype="uint8", shape=(1,)), "frame -1 is missing"),
        (TensorRef(frame=0, dtype="object", shape=(1,)), "dtype 'object' is unknown"),
        (TensorRef(frame=0, dtype="float32", shape=(-1, 4)), "negative"),
        (TensorRef(frame=1, dtype="uint8", shape=(2, 3)), "has 5 bytes"),
        (TensorRef(frame=1, dtype="uint8", shape=(2**64 - 1,) * 8), "has 5 bytes"),
        (TensorRef(frame=1, dtype="uint8", shape=(2**63,) * 400_000), "400000 dimensions"),
        (TensorRef(frame=2, dtype="uint8", shape=(2**64 - 1, 0)), "is missing"),
        (TensorRef(frame=0, dtype="x" * 99_999, shape=(1,)), "is unknown"),
    ]:
        with pytest.raises(MalformedMessage, match=words) as raised:
            binary_frame(ref, frames)
        assert len(str(raised.value)) < 500
    with pytest.raises(MalformedMessage, match="has 0 bytes"):
        binary_frame(TensorRef(frame=0, dtype="uint8", shape=(2**64 - 1, 0)), [b""])
