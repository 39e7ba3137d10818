"""The whole loop (inbox, scheduler, executor, outbox, lifecycle) in virtual time, on a transport in
memory: no socket, no thread, no waiting."""

import itertools
from collections import Counter

import msgspec
import numpy as np
import pytest

from engine_core.executor import InProcessExecutor
from engine_core.kv_cache import KVCacheManager
from engine_core.lifecycle import Lifecycle
from engine_core.scheduler import ModelRunnerOutput, SchedulerConfig
from engine_core.startup.scheduler import build_scheduler
from protocol.base import WIRE_VERSION
from protocol.calls import Drain, ListRequests, Ping
from protocol.codec import decode_engine_message, encode
from protocol.outputs import CallResult, EngineCoreOutputs, FinishReason, Heartbeat
from protocol.requests import Abort, Call, EngineRequest, Goodbye, Hello
from protocol.sampling import SamplingParams
from tests.engine_core.made_core import limits, mailboxes, make_core

STEP_S = 10.0
HEARTBEAT_S = 60.0


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


class MemoryTransport:
    """Messages arrive at their time: (seconds, message), or (seconds, message, client). Waiting
    moves the clock."""

    def __init__(self, clock, arrivals):
        self.clock = clock
        self.arrivals = sorted(arrivals, key=lambda arrival: arrival[0])
        self.sent = []

    def wait(self, timeout_s):
        due_s = self.arrivals[0][0] if self.arrivals else float("inf")
        self.clock.now_s = max(self.clock.now_s, min(due_s, self.clock.now_s + timeout_s))

    def receive_all(self):
        while self.arrivals and self.arrivals[0][0] <= self.clock.now_s:
            _, message, *client = self.arrivals.pop(0)
            yield client[0] if client else b"client", [encode(message)]

    def send(self, identity, frames):
        if identity == b"client":
            self.sent.append((self.clock.now_s, decode_engine_message(frames[0])))


class SlowRunner:
    """Every step with tokens takes STEP_S; the token behind n tokens is n."""

    max_steps_in_flight = 1

    def __init__(self, clock):
        self.clock = clock

    def submit(self, plan):
        self.plan = plan

    def collect(self):
        batch = self.plan.batch
        if batch.req_ids:
            self.clock.now_s += STEP_S
        tokens = (batch.num_computed_tokens + batch.num_scheduled_tokens).astype(np.int32)
        return ModelRunnerOutput(req_ids=batch.req_ids, sampled_token_ids=tokens)


def serve(*arrivals, drain_timeout_s=1e6):
    """(seconds, message) -> what was sent when, and the engine."""
    clock = Clock()
    transport = MemoryTransport(clock, arrivals)
    inbox, outbox = mailboxes(transport, heartbeat_s=HEARTBEAT_S, clock=clock)
    config = SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4, max_model_len=64)
    core = make_core(
        inbox,
        outbox,
        build_scheduler(config, KVCacheManager(num_blocks=64, block_size=4)),
        InProcessExecutor(SlowRunner(clock), clock=clock),
        Lifecycle(drain_timeout_s=drain_timeout_s, clock=clock),
        limits(config, 100),
        clock=clock,
    )
    core.run()
    core.close()
    return transport.sent, core


HELLO = Hello(wire_version=WIRE_VERSION)
REQUEST = EngineRequest(
    request_id="r", prompt_token_ids=[5, 6, 7], sampling_params=SamplingParams(max_tokens=3)
)


def test_a_request_is_served_and_timed_by_the_clock_that_was_given():
    sent, core = serve((1000, HELLO), (1005, REQUEST), (2000, Call(call_id=1, call=Drain())))
    outputs = [(at_s, m) for at_s, m in sent if isinstance(m, EngineCoreOutputs)]
    assert [at_s for at_s, _ in outputs] == [1015, 1025, 1035]
    [last] = outputs[-1][1].other_outputs
    assert last.finish_reason is FinishReason.LENGTH
    assert last.timings == msgspec.structs.replace(
        last.timings, first_scheduled_s=0.0, first_token_s=10.0, finished_s=30.0
    )
    numbers = core.statistics()
    assert numbers.step_time_s == numbers.model_time_s == 3 * STEP_S
    assert numbers.uptime_s == 1000


def test_a_client_hears_something_at_least_once_a_heartbeat():
    sent, _ = serve((1000, HELLO), (1500, Call(call_id=1, call=Drain())))
    assert sum(isinstance(message, Heartbeat) for _, message in sent) == 1 + 8
    times = [at_s for at_s, _ in sent]
    assert max(late - early for early, late in itertools.pairwise(times)) == HEARTBEAT_S


@pytest.mark.parametrize(
    ("timeout_s", "reason"), [(1e6, FinishReason.LENGTH), (5.0, FinishReason.ABORT)]
)
def test_a_drain_has_its_deadline_by_the_same_clock(timeout_s, reason):
    sent, _ = serve(
        (1000, HELLO), (1005, REQUEST), (1012, Call(call_id=1, call=Drain())),
        drain_timeout_s=timeout_s,
    )  # fmt: skip
    [end] = [
        output
        for _, message in sent
        if isinstance(message, EngineCoreOutputs)
        for output in message.other_outputs
        if output.finished
    ]
    assert end.finish_reason is reason


def test_a_call_is_answered_between_two_steps():
    sent, _ = serve(
        (1000, HELLO), (1005, REQUEST), (1007, Call(call_id=4, call=Ping())),
        (1100, Call(call_id=5, call=Drain())),
    )  # fmt: skip
    [(at_s, answer)] = [
        (at_s, m) for at_s, m in sent if isinstance(m, CallResult) and m.call_id == 4
    ]
    assert (at_s, answer.result.uptime_s) == (1015, 15.0)


def test_steps_run_beside_a_flood_of_calls():
    """Of 10,000 that have arrived some are answered before each step; none is lost."""
    flood = [(1006, Call(call_id=n, call=Ping()), b"flood") for n in range(10_000)]
    sent, _ = serve(
        (1000, HELLO, b"flood"), (1000, HELLO), (1005, REQUEST), *flood,
        (1007, Call(call_id=1, call=Ping())), (9000, Call(call_id=2, call=Drain())),
    )  # fmt: skip
    outputs = [at_s for at_s, message in sent if isinstance(message, EngineCoreOutputs)]
    assert outputs == [1015, 1025, 1035]
    [(pong_s, _), _] = [(at_s, m) for at_s, m in sent if isinstance(m, CallResult)]
    assert pong_s == 1035, "messages behind the flood, on a transport without turns"


@pytest.mark.parametrize(
    "abort", [Abort(request_ids=("r",)), Abort(request_ids=(), samples=(("r", 0),))]
)
def test_an_abort_ends_requests_of_its_sender_alone(abort):
    _, core = serve(
        (1000, HELLO), (1000, HELLO, b"other"), (1005, REQUEST),
        (1007, abort, b"other"), (1100, Call(call_id=1, call=Drain())),
    )  # fmt: skip
    assert +Counter(core.statistics().num_finished) == {"length": 1}


@pytest.mark.parametrize(
    "ends", [{"request_ids": ("r",)}, {"request_ids": (), "samples": (("r", 0),)}]
)
@pytest.mark.parametrize(("are_complete", "reason"), [(True, "stop"), (False, "abort")])
def test_a_client_says_whether_what_it_ends_is_complete_or_given_up(ends, are_complete, reason):
    _, core = serve(
        (1000, HELLO), (1005, REQUEST), (1007, Abort(**ends, are_complete=are_complete)),
        (1100, Call(call_id=1, call=Drain())),
    )  # fmt: skip
    assert +Counter(core.statistics().num_finished) == {reason: 1}


def test_the_departure_of_a_client_ends_its_own_requests_alone():
    _, core = serve(
        (1000, HELLO), (1000, HELLO, b"other"), (1005, REQUEST),
        (1005, msgspec.structs.replace(REQUEST, request_id="s"), b"other"),
        (1007, Goodbye(), b"other"), (1100, Call(call_id=1, call=Drain())),
    )  # fmt: skip
    assert +Counter(core.statistics().num_finished) == {"length": 1, "abort": 1}


def test_a_finished_request_is_no_longer_its_clients():
    sent, _ = serve(
        (1000, HELLO), (1005, REQUEST), (1007, Call(call_id=1, call=ListRequests())),
        (1100, Call(call_id=2, call=ListRequests())), (1200, Call(call_id=3, call=Drain())),
    )  # fmt: skip
    answers = [message.result for _, message in sent if isinstance(message, CallResult)]
    assert [answer.request_ids for answer in answers[:2]] == [["r"], []]
