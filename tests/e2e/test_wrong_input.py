"""Whatever one client sends, the daemon and the other clients go on."""

import os
import socket

import msgspec
import pytest
from daemons import running_daemon
from raw_client import RawClient

from protocol.base import WIRE_VERSION
from protocol.codec import encode
from protocol.errors import ErrorCode
from protocol.outputs import ErrorMessage, FinishReason, Rejected
from protocol.requests import EngineRequest, Goodbye, Hello
from protocol.sampling import SamplingParams

PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def daemon(tiny_llama):
    with running_daemon(tiny_llama, "--num-blocks", 64, "--max-num-batched-tokens", 32) as daemon:
        yield daemon


@pytest.fixture
def expected(daemon):
    """A good client's tokens; after the test the same client must get the same again."""
    with RawClient(daemon.address) as good:
        tokens, end = good.complete(PROMPT)
        assert end.finish_reason is FinishReason.LENGTH
        yield tokens
        assert good.complete(PROMPT, request_id="again")[0] == tokens
        assert daemon.process.poll() is None


def raw_request(**changes):
    """A request as bare msgpack, so that it may hold what our own classes refuse."""
    request = EngineRequest(
        request_id="wrong", prompt_token_ids=PROMPT, sampling_params=SamplingParams(max_tokens=4)
    )
    fields = msgspec.msgpack.decode(encode(request))
    names = [field.name for field in msgspec.structs.fields(EngineRequest)]
    params = [field.name for field in msgspec.structs.fields(SamplingParams)]
    for name, value in changes.items():
        if name in params:
            fields[1 + names.index("sampling_params")][params.index(name)] = value
        else:
            fields[1 + names.index(name)] = value
    return msgspec.msgpack.encode(fields)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt_token_ids": []}, "prompt is empty"),
        (
            {"prompt_token_ids": [1] * 256},
            "prompt has 256 tokens, the limit is 255",
        ),
        ({"prompt_token_ids": [97]}, "token id 97, the vocabulary ends at 96"),
        ({"prompt_token_ids": None}, "array"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"min_tokens": 9}, "min_tokens is 9, above max_tokens 4"),
        ({"stop_token_ids": [500]}, "stop_token_ids"),
        (
            {"logprobs": 21},
            "logprobs is 21, the limit is 20; ask for fewer or start the engine with",
        ),
        ({"num_sequences": 129}, "num_sequences is 129, it must be from 1 to max_num_seqs 128"),
        ({"beam_search": [0, 1.0, False]}, "beam_width is 0"),
        ({"adapter": "x"}, "adapter"),
    ],
)
def test_a_wrong_request_is_rejected_by_its_id(daemon, expected, changes, words):
    with RawClient(daemon.address) as client:
        client.socket.send(raw_request(**changes))
        rejected = client.wait_for(Rejected)
        assert rejected.request_id == "wrong"
        assert words in rejected.message


def test_a_second_request_with_a_live_id_is_refused_and_the_first_goes_on(daemon, expected):
    """Proves S016."""
    with RawClient(daemon.address) as client, RawClient(daemon.address) as other:
        client.request("same", PROMPT, max_tokens=40)
        client.request("same", [1, 2, 3])
        rejected = client.wait_for(Rejected)
        assert rejected.code is ErrorCode.DUPLICATE_REQUEST_ID
        tokens, _ = client.collect("same")["same"]
        assert tokens[:8] == expected
        assert len(tokens) == 40
        # ids are the engine's, whichever client sends them; another client's abort touches nothing
        client.request("same", PROMPT, max_tokens=200)
        client.statistics()  # it has arrived
        other.request("same", PROMPT)
        assert other.wait_for(Rejected).code is ErrorCode.DUPLICATE_REQUEST_ID
        assert len(client.collect("same")["same"][0]) == 200


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [os.urandom(300)],
        [b"\x95\1\1\xa0\xc3" + b"\x91" * 5000 + b"\0"],  # nests
        [msgspec.msgpack.encode([99, "unknown message"])],
        [msgspec.msgpack.encode({"type": "request"})],
        [raw_request()[:-7]],
        [b"", b"", b""],
        [b"\x93" + b"\xff" * 2000],
    ],
    ids=["empty", "invalid", "random", "deep", "unknown", "map", "truncated", "three", "nested"],
)
def test_garbage_is_answered_with_an_error_and_the_sender_may_go_on(daemon, expected, frames):
    with RawClient(daemon.address) as client:
        client.socket.send_multipart(frames)
        answer = client.wait_for(ErrorMessage | Rejected)
        assert answer.message
        assert client.complete(PROMPT, request_id="after")[0] == expected


@pytest.mark.parametrize(
    "hello", [[1, WIRE_VERSION + 1, {"new": "layout"}], [1, WIRE_VERSION - 1, "old", True]]
)
def test_a_client_of_another_wire_version_is_told_both_versions(daemon, expected, hello):
    with RawClient(daemon.address, greet=False) as client:
        client.socket.send(msgspec.msgpack.encode(hello))
        answer = client.wait_for(ErrorMessage)
        assert answer.code == ErrorCode.WIRE_VERSION
        assert f"wire version {hello[1]}" in answer.message
        client.request("stranger", PROMPT)
        assert client.wait_for(ErrorMessage).code == ErrorCode.HELLO_REQUIRED


def test_whoever_does_not_say_hello_is_asked_to(daemon, expected):
    with RawClient(daemon.address, greet=False) as client:
        client.request("early", PROMPT)
        assert client.wait_for(ErrorMessage).code == ErrorCode.HELLO_REQUIRED


def test_hello_twice_and_goodbye_in_the_middle_are_fine(daemon, expected):
    with RawClient(daemon.address) as client:
        client.send(Hello(wire_version=WIRE_VERSION))
        assert client.complete(PROMPT, request_id="x")[0] == expected
        client.request("dropped", PROMPT, max_tokens=200)
        client.send(Goodbye())
        client.request("stranger now", PROMPT)
        assert client.wait_for(ErrorMessage).code == ErrorCode.HELLO_REQUIRED


def test_raw_bytes_on_the_unix_socket_are_survived(daemon, expected):
    path = daemon.address.removeprefix("ipc://")
    for garbage in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(2000), b"\xff" + b"\0" * 8 + b"\x01\x7f"):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(path)
            raw.sendall(garbage)


def test_aborting_unknown_and_finished_ids_is_ignored(daemon, expected):
    from protocol.requests import Abort

    with RawClient(daemon.address) as client:
        client.complete(PROMPT, request_id="done")
        client.send(Abort(request_ids=("done", "never")))
        assert client.complete(PROMPT, request_id="next")[0] == expected
