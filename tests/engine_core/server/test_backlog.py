"""Outputs of a client that does not read are merged: it reads the same, in fewer messages."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.server.backlog import Backlog
from engine_core.server.clients import ClientRegistry, Rights
from engine_core.server.outbox import Outbox
from engine_core.server.transport import ClientGone, SlowConsumer
from frontend.logprobs import logprobs_of
from protocol.calls import Pong
from protocol.codec import decode_engine_message
from protocol.errors import ErrorCode
from protocol.outputs import (
    CallResult,
    DecodedTokens,
    EngineCoreOutput,
    EngineCoreOutputs,
    ErrorMessage,
    FinishReason,
    Heartbeat,
    Logprobs,
)
from tests.protocol.all_outputs import all_outputs

PONG = CallResult(call_id=1, result=Pong(uptime_s=1.0, step_id=0, progress_age_s=0.0))
NUM_SEQUENCES = 2


def logprobs(tokens):
    """Of width 2."""
    pairs = [token for token in tokens for token in (token, 7)]
    return Logprobs(
        num_positions=len(tokens),
        width=2,
        token_ids=struct.pack(f"<{len(pairs)}i", *pairs),
        logprobs=struct.pack(f"<{len(pairs)}f", *(-token / 8 for token in pairs)),
        ranks=[1 + token for token in tokens],
    )


def columns(step):
    """{(request id, index): token} as a step's columns."""
    keys, tokens = list(step), list(step.values())
    return DecodedTokens(
        request_ids=[request_id for request_id, _ in keys],
        token_ids=struct.pack(f"<{len(tokens)}i", *tokens),
        indexes=[index for _, index in keys],
    )


@st.composite
def schedules(draw):
    """Steps of two requests, "plain" and "with logprobs", of two sequences each."""
    going = [(name, index) for name in ("plain", "with logprobs") for index in range(NUM_SEQUENCES)]
    started, steps = set(), []
    while going and len(steps) < 20:
        decoded, others, finished = {}, [], []
        for key in list(going):
            tokens = draw(st.lists(st.integers(0, 90), max_size=3), label=f"{key}")
            ends = draw(st.integers(0, 9)) == 0
            if len(tokens) == 1 and key in started and not ends and key[0] == "plain":
                decoded[key] = tokens[0]
            elif tokens or ends:
                is_first = key[0] not in {name for name, _ in started}
                others.append(
                    EngineCoreOutput(
                        request_id=key[0],
                        index=key[1],
                        new_token_ids=tokens,
                        finish_reason=FinishReason.LENGTH if ends else None,
                        logprobs=logprobs(tokens) if tokens and key[0] != "plain" else None,
                        num_cached_tokens=3 if is_first else None,
                    )
                )
                started.add(key)
            if ends:
                going.remove(key)
                if not any(name == key[0] for name, _ in going):
                    finished.append(key[0])
        steps.append(
            EngineCoreOutputs(
                other_outputs=others,
                finished_req_ids=finished,
                step_id=len(steps),
                decoded=columns(decoded) if decoded else None,
            )
        )
    return steps


def read(messages):
    """What a client reads of each sequence, and which requests are over."""
    sequences, over = {}, []
    for message in messages:
        for output in all_outputs(message):
            key = output.request_id, output.index
            known = sequences.setdefault(
                key, {"tokens": [], "entries": [], "cached": [], "end": None}
            )
            assert known["end"] is None, "an output behind the terminal one"
            known["tokens"] += output.new_token_ids
            if output.logprobs is not None:
                known["entries"] += logprobs_of(output.logprobs, None)
            if output.num_cached_tokens is not None:
                known["cached"].append(output.num_cached_tokens)
            if output.finished:
                known["end"] = output.finish_reason, output.detail, output.timings
        over += message.finished_req_ids
    return sequences, over


@given(steps=schedules(), cuts=st.sets(st.integers(0, 20)))
def test_merged_outputs_say_what_the_single_ones_say(steps, cuts):
    """Some steps go out at once, all between them are merged."""
    messages, backlog = [], Backlog()
    for step in steps:
        backlog.add(step)
        if step.step_id in cuts:
            (frame,) = backlog.first()
            messages.append(decode_engine_message(frame))
            backlog.pop_first()
            assert not len(backlog)
            assert backlog.num_bytes == 0
    if len(backlog):
        (frame,) = backlog.first()
        messages.append(decode_engine_message(frame))
    assert read(messages) == read(steps)
    assert len(messages) <= len(cuts) + 1


def test_a_backlog_grows_by_tokens_and_not_by_steps():
    one_step = EngineCoreOutputs(other_outputs=[], decoded=columns({("a", 0): 5, ("b", 1): 6}))
    backlog = Backlog()
    backlog.add(one_step)
    before = backlog.num_bytes
    for _ in range(1000):
        backlog.add(one_step)
        backlog.add(Heartbeat())
    assert backlog.num_bytes == before + 1000 * 2 * 4
    assert len(backlog) == 1


def test_what_is_no_output_keeps_its_place_between_them():
    first, second = (
        EngineCoreOutputs(other_outputs=[], decoded=columns({("a", 0): token})) for token in (5, 6)
    )
    backlog = Backlog()
    for message in (first, PONG, second):
        backlog.add(message)
    kinds = []
    while len(backlog):
        kinds.append(type(decode_engine_message(backlog.first()[0])))
        backlog.pop_first()
    assert kinds == [EngineCoreOutputs, CallResult, EngineCoreOutputs]


def test_what_was_sent_of_a_backlog_does_not_count_any_more():
    """A reader that is always a little late would be dropped for what it has read."""
    backlog, sizes = Backlog(), set()
    for number in range(100):
        backlog.add(token(number))
        backlog.add(PONG)
        if number:
            backlog.pop_first()
            backlog.pop_first()
            sizes.add(backlog.num_bytes)
    assert len(sizes) == 1
    backlog.pop_first()
    backlog.pop_first()
    assert (len(backlog), backlog.num_bytes) == (0, 0)


def test_an_id_that_is_used_again_is_not_merged_with_the_request_that_had_it():
    end = EngineCoreOutput(
        request_id="a", new_token_ids=[5], finish_reason=FinishReason.LENGTH, num_cached_tokens=0
    )
    ended = EngineCoreOutputs(other_outputs=[end], finished_req_ids=["a"])
    backlog = Backlog()
    backlog.add(ended)
    backlog.add(ended)
    assert len(backlog) == 2


def test_tokens_of_other_weights_are_not_merged_with_those_before():
    backlog = Backlog()
    for version in (1, 1, 2):
        backlog.add(
            EngineCoreOutputs(
                other_outputs=[], decoded=columns({("a", 0): 5}), weights_version=version
            )
        )
    versions = []
    while len(backlog):
        message = decode_engine_message(backlog.first()[0])
        versions.append((message.weights_version, len(message.other_outputs[0].new_token_ids)))
        backlog.pop_first()
    assert versions == [(1, 2), (2, 1)]


class NarrowTransport:
    """Has room for so many messages to each client, until they are read."""

    def __init__(self, room):
        self.room = room
        self.queues = {}
        self.gone = set()

    def send(self, identity, frames):
        if identity in self.gone:
            raise ClientGone("its connection closed")
        queue = self.queues.setdefault(identity, [])
        if len(queue) >= self.room:
            raise SlowConsumer("full")
        queue.append(decode_engine_message(frames[0]))

    def read(self, identity):
        """All but heartbeats."""
        messages, self.queues[identity] = self.queues[identity], []
        return [each for each in messages if not isinstance(each, Heartbeat)]


def make_outbox(room, *names):
    transport, clients = NarrowTransport(room), ClientRegistry()
    outbox = Outbox(transport, clients, heartbeat_s=1e9, clock=lambda: 0.0, sleep=lambda _s: None)
    return transport, outbox, clients, [clients.add(name, "", Rights()) for name in names]


def token(number, name="a"):
    return EngineCoreOutputs(other_outputs=[], decoded=columns({(name, 0): number}))


def test_a_slow_reader_gets_every_token_once_and_others_get_theirs_at_once():
    transport, outbox, clients, (slow, fast) = make_outbox(4, b"slow", b"fast")
    for number in range(100):
        outbox.send({slow.index: token(number), fast.index: token(number, "b")})
        assert read(transport.read(b"fast"))[0]["b", 0]["tokens"] == [number]
    messages = transport.read(b"slow")
    outbox.send({})
    messages += transport.read(b"slow")
    assert read(messages)[0]["a", 0]["tokens"] == list(range(100))
    assert len(messages) == 5, "4 had room, the others are one"
    outbox.send({slow.index: token(100)})
    assert len(transport.read(b"slow")) == 1, "it is not slow any more"
    assert list(clients) == [slow, fast]


def test_beyond_its_bound_a_slow_reader_is_dropped_with_a_clear_end(monkeypatch):
    monkeypatch.setattr("engine_core.server.outbox._MAX_BACKLOG_BYTES", 2000)
    transport, outbox, clients, (slow, fast) = make_outbox(4, b"slow", b"fast")
    for number in range(1000):
        outbox.send({slow.index: token(number)})
    assert list(clients) == [fast]
    assert clients.take_departed() == [slow]
    transport.read(b"slow")
    outbox.send({})
    (end,) = transport.read(b"slow")
    assert isinstance(end, ErrorMessage)
    assert end.code == ErrorCode.SLOW_CONSUMER
    assert "the limit is 2000" in end.message


@pytest.mark.parametrize("reads_first", [True, False])
def test_who_was_dropped_and_says_hello_again_hears_of_its_end_before_the_answer(
    monkeypatch, reads_first
):
    monkeypatch.setattr("engine_core.server.outbox._MAX_BACKLOG_BYTES", 2000)
    transport, outbox, clients, (slow,) = make_outbox(4, b"slow")
    for number in range(1000):
        outbox.send({slow.index: token(number)})
    assert not list(clients)
    if reads_first:
        transport.read(b"slow")
    outbox.post(clients.add(b"slow", "", Rights()), PONG)
    if not reads_first:
        transport.read(b"slow")
    outbox.send({})
    end, answer = transport.read(b"slow")
    assert end.code == ErrorCode.SLOW_CONSUMER
    assert answer == PONG


def test_if_all_slow_readers_together_hold_too_much_the_one_with_most_is_dropped(monkeypatch):
    monkeypatch.setattr("engine_core.server.outbox._MAX_TOTAL_BYTES", 3000)
    _, outbox, clients, (one, most) = make_outbox(1, b"one", b"most")
    for number in range(10):
        outbox.send({one.index: token(number), most.index: token(number)})
    for number in range(1000):
        outbox.send({most.index: token(number)})
    assert list(clients) == [one]


def test_what_a_slow_reader_left_behind_does_not_count_for_the_others(monkeypatch):
    monkeypatch.setattr("engine_core.server.outbox._MAX_TOTAL_BYTES", 3000)
    transport, outbox, clients, (dead, other) = make_outbox(1, b"dead", b"other")
    for client in (dead, other):
        while outbox.backlog_bytes < 2000:
            outbox.post(client, PONG)
        if client is dead:
            transport.gone.add(b"dead")
            outbox.send({})
            assert list(clients) == [other]
            assert outbox.backlog_bytes == 0
    assert list(clients) == [other]


def test_at_the_end_a_slow_reader_has_a_moment_to_read():
    transport, outbox, _, (slow,) = make_outbox(4, b"slow")
    for number in range(10):
        outbox.send({slow.index: token(number)})
    read_so_far = []
    outbox._sleep = lambda _s: read_so_far.extend(transport.read(b"slow"))
    outbox.close()
    messages = read_so_far + transport.read(b"slow")
    assert read(messages)[0]["a", 0]["tokens"] == list(range(10))
