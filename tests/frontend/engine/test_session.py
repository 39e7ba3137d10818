"""The session in virtual time on a transport in memory: recovery, its deadline, and silence."""

import asyncio
import heapq
import itertools

import pytest
from fake_model import ids_of, welcome

from frontend.engine.connection import Connection, ConnectionOptions
from frontend.engine.session import EngineSession
from frontend.errors import ClientClosed, EngineDied, EngineUnavailable, RequestRejected
from frontend.event_loop import Clock
from frontend.request_state import RequestState
from frontend.sampling_params import SamplingParams
from protocol.calls import Ping
from protocol.codec import decode_client_message, encode
from protocol.outputs import (
    DecodedTokens,
    EngineCoreOutput,
    EngineCoreOutputs,
    ErrorMessage,
    FinishReason,
)
from protocol.requests import Call, EngineRequest, Hello


class VirtualClock(Clock):
    """Time that passes only in `advance`."""

    def __init__(self):
        self._now_s = 0.0
        self._timers = []
        self._numbers = itertools.count()

    def now(self):
        return self._now_s

    def call_later(self, delay_s, callback):
        timer = VirtualTimer(callback)
        heapq.heappush(self._timers, (self._now_s + delay_s, next(self._numbers), timer))
        return timer

    async def advance(self, seconds):
        """Let time pass, timer by timer; tasks run as far as they can after each."""
        stop_s = self._now_s + seconds
        await settle()
        while self._timers and self._timers[0][0] <= stop_s:
            self._now_s, _, timer = heapq.heappop(self._timers)
            timer.fire()
            await settle()
        self._now_s = stop_s


class VirtualTimer:
    def __init__(self, callback):
        self._callback = callback

    def cancel(self):
        self._callback = None

    def fire(self):
        if self._callback is not None:
            self._callback()


async def settle():
    for _ in range(10):
        await asyncio.sleep(0)


class MemoryTransport:
    """The engine's end is this object: `is_up`, what was `sent` to it, and what it `delivers`."""

    def __init__(self):
        self.is_up = True
        self.sent = []

    def connect(self, on_frames, on_lost):
        if not self.is_up:
            raise EngineUnavailable("no engine answers")
        self.on_frames, self.on_lost = on_frames, on_lost

    def send_frames(self, frames):
        message = decode_client_message(frames[0])
        if isinstance(message, Hello):
            answer, frames = welcome("model-1", with_tokenizer=False)
            self.on_frames([encode(answer), *frames])
        else:
            self.sent.append(message)

    def receive_pending(self):
        pass

    def disconnect(self):
        pass

    def close(self):
        pass

    def lose(self):
        self.is_up = False
        self.on_lost("the cable was cut")

    def deliver(self, *outputs):
        self.on_frames([encode(EngineCoreOutputs(other_outputs=list(outputs)))])


OPTIONS = ConnectionOptions("memory", reconnect_timeout_s=10.0, silence_timeout_s=300.0)


@pytest.fixture
async def parts():
    clock, transport = VirtualClock(), MemoryTransport()
    session = EngineSession(transport=transport, options=OPTIONS, clock=clock)
    await session.ready()
    yield clock, transport, session
    await session.close()


def submitted(session, clock):
    params = SamplingParams(max_tokens=5, seed=1, detokenize=False)
    request = RequestState(
        EngineRequest(
            request_id="mine",
            prompt_token_ids=ids_of("hi"),
            sampling_params=params.to_wire(2, 100, seed=1),
        ),
        params,
        prompt_text=None,
        output_kind=params.output_kind,
        tokenizer=None,
        now=clock.now,
    )
    session.submit(request)
    return request


def output(message, *token_ids, reason=None):
    return EngineCoreOutput(
        request_id=message.request_id, new_token_ids=list(token_ids), finish_reason=reason
    )


async def test_a_request_continues_when_the_engine_is_back_within_the_deadline(parts):
    clock, transport, session = parts
    request = submitted(session, clock)
    await clock.advance(2.0)
    transport.deliver(output(transport.sent[-1], 7, 8))
    transport.lose()
    await clock.advance(9.0)
    assert not request.finished
    transport.is_up = True
    await clock.advance(0.2)
    resumed = transport.sent[-1]
    assert resumed.output_token_ids == [7, 8]
    transport.deliver(output(resumed, 9, reason=FinishReason.STOP))
    last = await request.next_output()
    assert last.outputs[0].token_ids == [7, 8, 9]
    assert last.metrics.first_token_s == 2.0
    assert last.metrics.finished_s == pytest.approx(11.2)


async def test_a_request_ends_when_the_engine_is_not_back_within_the_deadline(parts):
    clock, transport, session = parts
    request = submitted(session, clock)
    transport.lose()
    ready = asyncio.create_task(session.ready())
    await clock.advance(9.8)
    assert not request.finished
    await clock.advance(0.2)
    for waits in (request.next_output(), ready):
        with pytest.raises(EngineDied, match=r"the cable was cut.*did not come back within 10 s"):
            await waits


async def test_a_request_made_while_the_engine_is_away_waits_for_it(parts):
    clock, transport, session = parts
    transport.lose()
    ready = asyncio.create_task(session.ready())
    call = asyncio.create_task(session.call(Ping()))
    await clock.advance(9.0)
    assert not ready.done()
    transport.is_up = True
    await clock.advance(0.2)
    await ready
    await clock.advance(0.1)
    assert [message.call for message in transport.sent if isinstance(message, Call)] == [Ping()]
    call.cancel()


async def test_an_engine_that_was_never_seen_fails_at_once():
    clock, transport = VirtualClock(), MemoryTransport()
    transport.is_up = False
    session = EngineSession(transport=transport, options=OPTIONS, clock=clock)
    with pytest.raises(EngineUnavailable):
        await session.ready()
    await session.close()


async def test_closing_ends_those_that_wait_for_the_engine(parts):
    clock, transport, session = parts
    request = submitted(session, clock)
    transport.lose()
    waiting = [asyncio.create_task(session.ready()) for _ in range(2)]
    await clock.advance(1.0)
    await session.close()
    for each in waiting:
        with pytest.raises(ClientClosed):
            await each
    with pytest.raises(ClientClosed):
        await request.next_output()


async def test_a_request_that_is_answered_with_errors_ends_with_the_third(parts):
    clock, transport, session = parts
    answer = encode(ErrorMessage(code="malformed_message", message="what is this?"))
    keep = transport.send_frames

    def refuse(frames):
        keep(frames)
        if isinstance(decode_client_message(frames[0]), EngineRequest):
            transport.on_frames([answer])

    transport.send_frames = refuse
    request = submitted(session, clock)
    await clock.advance(3.0)
    with pytest.raises(RequestRejected, match=r"3 errors in a row .* what is this\?"):
        await request.next_output()
    assert sum(isinstance(message, EngineRequest) for message in transport.sent) == 3
    session.release(request)


async def test_losses_without_output_are_answered_ever_later_and_not_for_ever(parts):
    clock, transport, session = parts
    request = submitted(session, clock)
    keep = transport.send_frames

    def die(frames):
        keep(frames)
        if isinstance(decode_client_message(frames[0]), EngineRequest):
            asyncio.get_running_loop().call_soon(transport.on_lost, "it died of it")

    transport.send_frames = die
    transport.on_lost("it died of it")
    for _ in range(400):
        await clock.advance(0.1)
    with pytest.raises(EngineDied, match=r"lost \d+ times .* without any output"):
        await request.next_output()
    assert 5 < len(transport.sent) < 15
    session.release(request)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\x91" * 5000 + b"\0",
        b"\x93\2" + b"\x91" * 5000 + b"\0",
        encode(
            EngineCoreOutputs(
                other_outputs=[], decoded=DecodedTokens(request_ids=["a"], token_ids=b"123")
            )
        ),
    ],
    ids=["nests", "a field nests", "columns of no length"],
)
async def test_an_engine_that_sends_nonsense_ends_the_request_and_not_the_client(parts, nonsense):
    clock, transport, session = parts
    keep = transport.send_frames

    def answer(frames):
        keep(frames)
        if isinstance(decode_client_message(frames[0]), EngineRequest):
            asyncio.get_running_loop().call_soon(transport.on_frames, [nonsense])

    transport.send_frames = answer
    request = submitted(session, clock)
    for _ in range(400):
        await clock.advance(0.1)
    with pytest.raises(
        EngineDied, match=r"without any output, the last time: (not an eng|its Eng)"
    ):
        await request.next_output()
    session.release(request)


async def test_silence_is_a_loss_after_its_limit_and_not_before(parts, caplog):
    clock, transport, session = parts
    request = submitted(session, clock)
    await clock.advance(299.0)
    transport.deliver()
    await clock.advance(299.0)
    assert len(transport.sent) == 1
    await clock.advance(101.0)  # silence is looked for at every third of its limit
    assert [type(message) for message in transport.sent[1:]] == [EngineRequest]
    assert "lost the engine at memory: it was silent for 300 s" in caplog.text
    assert request.metrics.num_resumptions == 1


async def test_an_engine_that_does_not_answer_hello_is_unavailable_after_the_time_limit():
    clock, transport = VirtualClock(), MemoryTransport()
    transport.send_frames = lambda frames: None
    connection = Connection(
        transport, OPTIONS, clock=clock, on_message=lambda _: None, on_lost=lambda _: None
    )
    opening = asyncio.create_task(connection.open(timeout_s=60.0))
    await clock.advance(59.0)
    assert not opening.done()
    await clock.advance(1.0)
    with pytest.raises(EngineUnavailable, match="waited 60 s"):
        await opening
