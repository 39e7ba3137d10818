"""The wire: what goes in comes out, and nothing else does."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.base import WIRE_VERSION
from protocol.calls import Drain, GetStatistics, Ping, Pong, ResetPrefixCache
from protocol.codec import (
    binary_frame,
    check_wire_version,
    decode_client_message,
    decode_engine_message,
    encode,
    request_id_of,
)
from protocol.errors import MalformedMessage, WireVersionMismatch
from protocol.outputs import (
    CallResult,
    EngineCoreOutput,
    EngineCoreOutputs,
    ErrorMessage,
    FinishReason,
    Heartbeat,
    Logprobs,
    ModelInfo,
    Rejected,
    RequestTimings,
    TokenizerInfo,
    Welcome,
)
from protocol.requests import Abort, Call, EngineRequest, Goodbye, Hello, MultiModalInput, TensorRef
from protocol.sampling import SamplingParams

REQUEST = EngineRequest(
    request_id="r",
    prompt_token_ids=[1, 2, 3],
    sampling_params=SamplingParams(max_tokens=5, seed=2**64 - 1, logit_bias={7: -3.5}),
    output_token_ids=[9],
    prompt_embeds=TensorRef(frame=0, dtype="float32", shape=(3, 4)),
    multimodal_inputs=(
        MultiModalInput(
            modality="image",
            start=0,
            stop=2,
            content_hash=b"h",
            data=TensorRef(frame=1, dtype="uint8", shape=(2, 2, 3)),
        ),
    ),
)

CLIENT_MESSAGES = [
    Hello(wire_version=WIRE_VERSION, client_name="test"),
    REQUEST,
    Abort(request_ids=("a", "b")),
    *(
        Call(call_id=index, call=call)
        for index, call in enumerate([Ping(), GetStatistics(), ResetPrefixCache(), Drain()])
    ),
    Goodbye(),
]

ENGINE_MESSAGES = [
    Welcome(
        wire_version=WIRE_VERSION,
        engine_id="e",
        heartbeat_s=0.25,
        model=ModelInfo(
            name="m",
            architecture="A",
            fingerprint="f",
            max_model_len=8,
            vocab_size=4,
            dtype="float32",
            num_blocks=2,
            block_size=16,
            eos_token_ids=(1,),
            max_logprobs=-1,
            tokenizer=TokenizerInfo(fingerprint="t", tokenizer_json=None),
        ),
    ),
    EngineCoreOutputs(
        outputs=[
            EngineCoreOutput(
                request_id="r",
                new_token_ids=[4],
                finish_reason=FinishReason.STOP,
                stop_reason=4,
                logprobs=Logprobs(
                    num_positions=1, width=1, token_ids=b"\0" * 4, logprobs=b"\0" * 4, ranks=[1]
                ),
                timings=RequestTimings(
                    first_scheduled_s=0.1, first_token_s=0.2, finished_s=0.3, num_preemptions=0
                ),
            )
        ],
        finished_req_ids=["r"],
        step_id=3,
    ),
    CallResult(call_id=1, result=Pong(uptime_s=1.0)),
    Rejected(request_id="r", code="draining", message="no"),
    ErrorMessage(code="wire_version", message="no"),
    Heartbeat(),
]


@pytest.mark.parametrize("message", CLIENT_MESSAGES, ids=lambda m: type(m).__name__)
def test_client_messages_survive_the_wire(message):
    assert decode_client_message(encode(message)) == message


@pytest.mark.parametrize("message", ENGINE_MESSAGES, ids=lambda m: type(m).__name__)
def test_engine_messages_survive_the_wire(message):
    assert decode_engine_message(encode(message)) == message


@given(st.binary(max_size=200))
def test_garbage_is_a_malformed_message_or_another_version_and_nothing_else(frame):
    with contextlib.suppress(MalformedMessage, WireVersionMismatch):
        decode_client_message(frame)


@given(st.integers(0, len(encode(REQUEST)) - 1))
def test_a_truncated_message_is_malformed(length):
    with pytest.raises(MalformedMessage):
        decode_client_message(encode(REQUEST)[:length])


def test_a_hello_of_another_version_is_told_apart_from_garbage_whatever_its_other_fields():
    for fields in ([1, 99], [1, 99, 7, 8, {"new": "field"}], [1, 99, "name", True, "more"]):
        with pytest.raises(
            WireVersionMismatch, match=f"version 99, this side speaks {WIRE_VERSION}"
        ):
            message = decode_client_message(msgspec.msgpack.encode(fields))
            check_wire_version(message.wire_version)


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
    ]:
        with pytest.raises(MalformedMessage, match=words):
            binary_frame(ref, frames)
