"""What the inbox takes in at a time, what it refuses, and what the log says of it."""

import contextlib
import itertools
import logging
import time

import msgspec
import pytest
import zmq

from engine_core.server.clients import ClientRegistry
from engine_core.server.inbox import Inbox
from engine_core.server.limited_log import LimitedLog
from engine_core.server.outbox import Outbox
from engine_core.server.transport import ZmqTransport
from protocol.base import WIRE_VERSION
from protocol.calls import Ping, Pong
from protocol.codec import decode_engine_message, encode
from protocol.errors import ErrorCode
from protocol.outputs import CallResult, ErrorMessage, Heartbeat
from protocol.requests import Call, Goodbye, Hello

HELLO = encode(Hello(wire_version=WIRE_VERSION))
PING = encode(Call(call_id=1, call=Ping()))
PONG = CallResult(call_id=1, result=Pong(uptime_s=1.0, step_id=0, progress_age_s=0.0))


class ScriptedTransport:
    """Has these frames of one client."""

    def __init__(self, frames):
        self.frames = list(frames)
        self.sent = []

    def wait(self, timeout_s):
        assert self.frames, "waits though there is something to read"
        return True

    def receive_all(self):
        while self.frames:
            yield b"client", [self.frames.pop(0)]

    def send(self, identity, frames):
        self.sent.append(decode_engine_message(frames[0]))


def make_inbox(transport, clock=lambda: 0.0, **options):
    clients = ClientRegistry()
    outbox = Outbox(transport, clients, heartbeat_s=1e9, clock=clock)
    inbox = Inbox(
        transport,
        clients,
        outbox,
        idle_wait_s=1.0,
        welcome=lambda hello: (Heartbeat(), []),  # any message will do
        clock=clock,
        **options,
    )
    return inbox, clients


@pytest.mark.parametrize("block", [False, True])
def test_a_pass_takes_so_many_messages_and_leaves_the_others_for_the_next(block):
    transport = ScriptedTransport([HELLO, *[PING] * 999])
    inbox, _ = make_inbox(transport)
    counts = [len(list(inbox.drain(block=block))) for _ in range(4)]
    assert counts == [255, 256, 256, 232]
    assert not transport.frames


def test_work_ahead_is_done_when_nothing_comes_for_a_while_and_not_before():
    transport, done = ScriptedTransport([HELLO]), []
    inbox, _ = make_inbox(transport, while_quiet=lambda: done.append(len(transport.frames)))
    list(inbox.drain(block=True))
    assert not done
    transport.wait = lambda timeout_s: False
    list(inbox.drain(block=False))
    assert not done
    list(inbox.drain(block=True))
    assert done == [0]


NESTED = b"\x95\1\1\xa0\xc3" + b"\x91" * 5000 + b"\0"


def test_messages_that_nest_are_answered_and_counted_before_and_after_hello():
    request = b"\x94\2\xa1r" + b"\x91" * 5000 + b"\0"
    transport = ScriptedTransport([NESTED, HELLO, NESTED, request, PING])
    inbox, _ = make_inbox(transport)
    assert len(list(inbox.drain(block=False))) == 1
    codes = [getattr(each, "code", None) for each in transport.sent]
    malformed = ErrorCode.MALFORMED_MESSAGE
    assert codes == [malformed, None, malformed, malformed]
    assert inbox.num_refused_messages == 3


def test_a_clients_name_begins_no_line_of_the_log_and_colours_no_terminal(caplog):
    hello = Hello(wire_version=WIRE_VERSION, client_name="a\n12:00:00 ERROR x\r\x1b[31m\u2028b")
    inbox, _ = make_inbox(ScriptedTransport([encode(hello)]))
    with caplog.at_level(logging.INFO):
        list(inbox.drain(block=False))
    assert r"(a\n12:00:00 ERROR x\r\x1b[31m\u2028b)" in caplog.messages[-1]


def test_so_many_clients_are_taken_and_one_that_says_hello_again_is_no_other():
    name = "n" * 200
    hello = encode(Hello(wire_version=WIRE_VERSION, client_name=name))
    transport = ScriptedTransport([])
    said = [(b"a", [hello]), (b"b", [HELLO]), (b"a", [HELLO]), (b"c", [HELLO])]
    transport.receive_all = lambda: iter(said)
    inbox, clients = make_inbox(transport, max_clients=2)
    assert not list(inbox.drain(block=False))
    assert [each.identity for each in clients] == [b"a", b"b"]
    *welcomed, refused = transport.sent
    assert welcomed == [Heartbeat()] * 3
    assert refused.code == ErrorCode.TOO_MANY_CLIENTS
    assert "2 clients are connected, the limit is 2" in refused.message
    said[:] = [(b"b", [hello])]
    list(inbox.drain(block=False))
    assert [len(each.name) for each in clients] == [0, 100]


def test_garbage_counts_as_messages_do():
    transport = ScriptedTransport([b"\xc1"] * 300)
    inbox, _ = make_inbox(transport)
    assert not list(inbox.drain(block=False))
    assert len(transport.frames) == 300 - 256


def test_a_pass_has_so_much_time_the_callers_included():
    """A message takes the caller 0.3 ms."""
    now_s = itertools.count(0.0, 0.0001)
    transport = ScriptedTransport([HELLO, *[PING] * 100])
    inbox, _ = make_inbox(transport, lambda: next(now_s))
    num_taken = 0
    for _ in inbox.drain(block=False):
        num_taken += 1
        next(now_s), next(now_s), next(now_s)
    assert 3 <= num_taken <= 7
    assert len(transport.frames) == 100 - num_taken


@pytest.mark.parametrize("version", [0, WIRE_VERSION - 1, WIRE_VERSION + 1])
def test_a_client_of_another_wire_version_is_not_let_in(version):
    """Also an older one, whose HELLO decodes as ours."""
    transport = ScriptedTransport([encode(Hello(wire_version=version)), PING])
    inbox, clients = make_inbox(transport)
    assert not list(inbox.drain(block=False))
    assert not len(clients)
    refused, stranger = transport.sent
    assert isinstance(refused, ErrorMessage)
    assert refused.code == ErrorCode.WIRE_VERSION
    assert f"wire version {version}, this side speaks {WIRE_VERSION}" in refused.message
    assert stranger.code == ErrorCode.HELLO_REQUIRED


def test_garbage_is_counted_and_logged_once_a_second_of_each_kind(caplog):
    now_s = 0.0
    transport = ScriptedTransport([])
    inbox, _ = make_inbox(transport, lambda: now_s)
    bad_request = msgspec.msgpack.encode([2, "r" * 9000, []])

    def receive(*frames):
        nonlocal now_s
        now_s += 0.5
        transport.frames += frames
        list(inbox.drain(block=False))
        lines = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return lines

    assert ["not a client message" in line for line in receive(*[b"\xc1"] * 30)] == [True]
    assert receive(*[b"\xc1"] * 20) == []
    [garbage, stranger] = receive(b"\xc1", PING, PING)
    assert garbage.endswith("(and 49 more like it before)")
    assert "HELLO" in stranger
    [invalid] = receive(HELLO, bad_request, bad_request)
    assert "invalid request 'rrr" in invalid
    assert len(invalid) < 600
    assert inbox.num_refused_messages == 30 + 20 + 3 + 2
    assert len(transport.sent) == 30 + 20 + 3 + 3, "each sender is answered"


def test_a_goodbye_that_comes_after_the_client_was_found_dead_is_no_fault():
    transport = ScriptedTransport([HELLO, encode(Goodbye()), encode(Goodbye())])
    inbox, clients = make_inbox(transport)
    assert list(inbox.drain(block=False)) == []
    assert not list(clients)
    assert (inbox.num_refused_messages, len(transport.sent)) == (0, 1)


def test_a_line_that_is_not_limited_says_nothing_of_others(caplog):
    now_s = 0.0
    log = LimitedLog(logging.getLogger("test"), logging.WARNING, lambda: now_s)
    for now_s in (0.0, 1.0, 2.0):
        log.log("kind", f"at {now_s:g}")
    log.log("another kind", "x" * 10_000)
    assert caplog.messages == ["at 0", "at 1", "at 2", "x" * 500]


@contextlib.contextmanager
def connected_slow_reader(folder):
    """An inbox, its clients, and the socket of the only one, which takes in few messages unread."""
    address = f"ipc://{folder}/s"
    with (
        ZmqTransport(address) as transport,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as client,
    ):
        inbox, clients = make_inbox(transport)
        client.setsockopt(zmq.RCVHWM, 10)
        client.connect(address)
        client.send(HELLO)
        while not len(clients):
            list(inbox.drain(block=True))
        yield inbox, clients, client


def test_a_client_that_does_not_read_is_dropped_and_told_so_when_it_reads(tmp_path, monkeypatch):
    """Not blocked by it, the engine goes on."""
    monkeypatch.setattr("engine_core.server.outbox._MAX_BACKLOG_BYTES", 1_000_000)
    with connected_slow_reader(tmp_path) as (inbox, clients, client):
        [slow] = clients
        outbox = inbox.outbox
        padding = b"x" * 10_000
        num_sent = 0
        while len(clients):
            outbox.post(slow, PONG, [padding])
            num_sent += 1
            assert num_sent < 10_000, "all that the client does not read is kept"
        assert clients.take_departed() == [slow]
        outbox.send({})  # it still does not read
        client.send(PING)
        end = None
        deadline = time.monotonic() + 30
        while not isinstance(end, ErrorMessage):
            assert time.monotonic() < deadline
            list(inbox.drain(block=False))
            outbox.send({})
            if client.poll(10):
                end = decode_engine_message(client.recv_multipart()[0])
        assert end.code == ErrorCode.SLOW_CONSUMER
        assert "was dropped, and its requests with it: it let 10" in end.message
        assert "bytes of outputs pile up, the limit is 1000000" in end.message
        outbox.send({})
        while client.poll(100):
            again = decode_engine_message(client.recv_multipart()[0])
            assert again.code == ErrorCode.HELLO_REQUIRED  # to its ping


def test_garbage_of_a_client_whose_queue_is_full_is_answered_when_there_is_room(tmp_path):
    """Without an answer its requests would wait for ever."""
    with connected_slow_reader(tmp_path) as (inbox, clients, client):
        [slow] = clients
        outbox = inbox.outbox
        while not outbox.has_backlogs:
            outbox.post(slow, PONG, [b"x" * 10_000])
        client.send(b"garbage")
        while not inbox.num_refused_messages:
            list(inbox.drain(block=True))
        codes = []
        deadline = time.monotonic() + 30
        while ErrorCode.MALFORMED_MESSAGE not in codes:
            assert time.monotonic() < deadline
            outbox.send({})
            while client.poll(10):
                answer = decode_engine_message(client.recv_multipart()[0])
                codes += [answer.code] if isinstance(answer, ErrorMessage) else []
        assert codes == [ErrorCode.MALFORMED_MESSAGE]
