"""Pause, sleep and new weights in virtual time, over a model whose memory shows which weights wrote
it: the calls' answers, and what becomes of requests meanwhile."""

import msgspec
import pytest

from engine_core.executor import InProcessExecutor
from engine_core.kv_cache import KVCacheGroupSpec, KVCacheManager
from engine_core.lifecycle import Lifecycle
from engine_core.scheduler import SchedulerConfig
from engine_core.startup.scheduler import build_scheduler
from protocol import calls
from protocol.errors import ErrorCode
from protocol.outputs import (
    CallFailed,
    CallResult,
    EngineCoreOutputs,
    FinishReason,
    WeightsUpdated,
)
from protocol.requests import Abort, Call, EngineRequest
from protocol.sampling import SamplingParams
from tests.engine_core.fake_host import FakeHost
from tests.engine_core.made_core import limits, mailboxes, make_core
from tests.engine_core.scheduler.paged_model import VOCAB, PagedModel, next_token
from tests.engine_core.test_virtual_time import HELLO, Clock, MemoryTransport

STEP_S = 1.0
PROMPT = [1, 2, 3, 4, 0, 1, 2, 3, 4]
WHOLE = (KVCacheGroupSpec(),)


class Runner:
    """A step of tokens takes STEP_S."""

    def __init__(self, clock, depth):
        self.max_steps_in_flight = depth
        self.model = PagedModel(WHOLE, 32, 4)
        self._clock = clock
        self._results = []

    def submit(self, plan):
        self._results.append((plan, self.model.execute(plan)))

    def collect(self):
        plan, result = self._results.pop(0)
        if plan.total_num_scheduled_tokens:
            self._clock.now_s += STEP_S
        return result


class Engine:
    """Runs arrivals (seconds since the start, message) to their end, which is a drain."""

    def __init__(self, *arrivals, depth=1, has_host=True, drain_at_s=500.0, abort_at_s=1e9):
        clock = Clock()
        arrivals = [(0.0, HELLO), *arrivals, (drain_at_s, call(calls.Drain(), 99))]
        self.transport = MemoryTransport(
            clock, [(1000 + at_s, message) for at_s, message in arrivals]
        )
        inbox, outbox = mailboxes(self.transport, clock=clock)
        executor = InProcessExecutor(Runner(clock, depth), clock=clock)
        lifecycle = Lifecycle(drain_timeout_s=1e6, clock=clock)
        self.host = FakeHost(executor, lambda: Runner(clock, depth), "files")
        config = SchedulerConfig(
            max_num_batched_tokens=16, max_num_seqs=4, max_model_len=64, max_steps_in_flight=depth
        )
        self.scheduler = build_scheduler(config, KVCacheManager(num_blocks=32, block_size=4))
        self.core = make_core(
            inbox, outbox, self.scheduler, executor, lifecycle, limits(config, VOCAB),
            host=self.host if has_host else None, clock=clock,
        )  # fmt: skip
        lifecycle.poll = lambda: clock.now_s >= 1000 + abort_at_s and lifecycle.abort("twice")
        self.core.run()
        self.core.close()
        self.scheduler.check()

    def answer(self, call_id):
        """(seconds since the start, result or failure)."""
        [(at_s, message)] = [
            (at_s - 1000, message)
            for at_s, message in self.transport.sent
            if isinstance(message, CallResult | CallFailed) and message.call_id == call_id
        ]
        return at_s, message.result if isinstance(message, CallResult) else message

    def outputs(self, request_id):
        """(seconds, tokens, weights version, finish reason) of each."""
        found = []
        for at_s, message in self.transport.sent:
            if not isinstance(message, EngineCoreOutputs):
                continue
            for output in message.other_outputs:
                if output.request_id == request_id:
                    end = output.finish_reason
                    found.append((at_s - 1000, output.new_token_ids, message.weights_version, end))
            if message.decoded is not None and request_id in message.decoded.request_ids:
                place = message.decoded.request_ids.index(request_id)
                token = memoryview(message.decoded.token_ids).cast("i")[place]
                found.append((at_s - 1000, [token], message.weights_version, None))
        return found

    def tokens(self, request_id):
        return [token for _, tokens, _, _ in self.outputs(request_id) for token in tokens]

    def reason(self, request_id):
        return self.outputs(request_id)[-1][3]


def call(what, call_id):
    return Call(call_id=call_id, call=what)


def request(request_id="r", max_tokens=12, **more):
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT,
        sampling_params=SamplingParams(max_tokens=max_tokens, seed=1),
        **more,
    )


def right_tokens(num_tokens=12):
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, None, 1))
    return tokens[len(PROMPT) :]


PAUSE, RESUME = calls.PauseGeneration(mode="keep"), calls.ResumeGeneration()
SLEEP, WAKE_UP = calls.Sleep(level=1), calls.WakeUp()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("change", "undo"),
    [(PAUSE, RESUME), (SLEEP, WAKE_UP), (calls.Sleep(level=2), WAKE_UP)],
)
def test_requests_stand_still_and_then_go_on_with_the_same_tokens(change, undo, depth):
    engine = Engine(
        (1, request()), (4.5, call(change, 1)), (50, request("late")), (100, call(calls.Ping(), 2)),
        (200, call(undo, 3)), depth=depth,
    )  # fmt: skip
    for request_id in ("r", "late"):
        assert engine.tokens(request_id) == right_tokens()
        assert engine.reason(request_id) is FinishReason.LENGTH
    begun_s, status = engine.answer(1)
    state = "paused" if change is PAUSE else "asleep"
    assert status == calls.EngineStatus(state=state, weights_version=0, num_requests=1)
    assert not [at_s for at_s, *_ in engine.outputs("r") if begun_s < at_s < 200]
    _, pong = engine.answer(2)
    assert pong.state == state
    assert pong.progress_age_s < 1, "a pause is no hang"
    assert engine.answer(3)[1].state == "running"


def test_while_paused_requests_end_by_abort_and_by_their_time_and_say_what_they_wait_for():
    engine = Engine(
        (1, request("runs")), (2, request("in time", timeout_s=60.0)), (4, call(PAUSE, 1)),
        (10, request("late")), (15, call(calls.GetRequestInfo(request_id="late"), 2)),
        (15, call(calls.GetRequestInfo(request_id="runs"), 3)),
        (20, Abort(request_ids=("runs",))), (200, call(RESUME, 4)),
    )  # fmt: skip
    [aborted] = [each for each in engine.outputs("runs") if each[3] is not None]
    assert aborted[0] == pytest.approx(20, abs=0.3)
    [expired] = [each for each in engine.outputs("in time") if each[3] is not None]
    assert (expired[0], expired[3]) == (pytest.approx(62, abs=0.3), FinishReason.TIMEOUT)
    late, runs = engine.answer(2)[1], engine.answer(3)[1]
    assert (late.status, late.waits_for) == ("waiting", "paused")
    assert "resume_generation" in late.why
    assert (runs.status, runs.waits_for) == ("running", "paused")
    assert engine.tokens("late") == right_tokens()


@pytest.mark.parametrize("depth", [1, 2])
def test_mode_wait_lets_those_end_that_have_started_and_no_others_start(depth):
    engine = Engine(
        (1, request("first")), (4, call(calls.PauseGeneration(mode="wait"), 1)),
        (5, request("second")), (100, call(RESUME, 2)), depth=depth,
    )  # fmt: skip
    paused_s, status = engine.answer(1)
    assert (status.state, status.num_requests) == ("paused", 1)
    assert paused_s >= engine.outputs("first")[-1][0]
    assert engine.tokens("first") == engine.tokens("second") == right_tokens()
    assert engine.outputs("second")[0][0] > 100


def test_mode_wait_that_is_ended_too_soon_says_so():
    engine = Engine(
        (1, request()), (3, call(calls.PauseGeneration(mode="wait"), 1)), (5, call(RESUME, 2)),
    )  # fmt: skip
    assert engine.answer(1)[1].code == ErrorCode.WRONG_STATE
    assert engine.tokens("r") == right_tokens()


@pytest.mark.parametrize("other", [PAUSE, SLEEP])
def test_mode_wait_that_another_operator_cuts_short_says_so(other):
    engine = Engine(
        (1, request()), (3, call(calls.PauseGeneration(mode="wait"), 1)), (5, call(other, 2)),
        (20, call(WAKE_UP, 3)), (30, call(RESUME, 4)),
    )  # fmt: skip
    failed_s, failure = engine.answer(1)
    assert (failure.code, failed_s < 15) == (ErrorCode.WRONG_STATE, True)
    assert engine.tokens("r") == right_tokens()


def test_two_operators_wait_for_the_same_pause_also_across_new_weights():
    wait = calls.PauseGeneration(mode="wait")
    engine = Engine(
        (1, request()), (3, call(wait, 1)), (4, call(calls.UpdateWeights(model="new"), 2)),
        (5, call(wait, 3)), (50, call(RESUME, 4)),
    )  # fmt: skip
    for number in (1, 3):
        answered_s, status = engine.answer(number)
        assert (status.state, status.num_requests) == ("paused", 0)
        assert answered_s >= engine.outputs("r")[-1][0]
    assert engine.tokens("r") == right_tokens()


@pytest.mark.parametrize("change", [PAUSE, SLEEP, calls.UpdateWeights(model="new")])
def test_nothing_holds_up_a_drain(change):
    engine = Engine((1, request()), (6, call(change, 1)), drain_at_s=4.0)
    assert engine.answer(1)[1].code == ErrorCode.WRONG_STATE
    assert engine.tokens("r") == right_tokens()


@pytest.mark.parametrize("change", [PAUSE, SLEEP, calls.UpdateWeights(model="new")])
def test_a_call_that_comes_when_the_engine_aborts_answers_no_request_again(change):
    """With a step in flight, which has no result any more."""
    engine = Engine((1, request()), (5, call(change, 1)), depth=2, abort_at_s=5.0)
    assert engine.answer(1)[1].code == ErrorCode.WRONG_STATE
    assert [end for *_, end in engine.outputs("r") if end is not None] == [FinishReason.ABORT]
    assert engine.outputs("r")[-1][3] is FinishReason.ABORT


def test_mode_abort_ends_all_requests():
    engine = Engine(
        (1, request()), (3, call(calls.PauseGeneration(mode="abort"), 1)), (5, request("s")),
        (20, call(RESUME, 2)),
    )  # fmt: skip
    assert engine.reason("r") is FinishReason.ABORT
    assert engine.tokens("s") == right_tokens()


@pytest.mark.parametrize("depth", [1, 2])
def test_new_weights_find_no_block_of_the_old_ones_and_outputs_say_whose_they_are(depth):
    """The model asserts that all keys and values that it reads were written by its weights."""
    engine = Engine(
        (1, request("done", 1)), (5, request()), (9, call(calls.UpdateWeights(model="new"), 1)),
        (12, request("later")), (60, call(calls.UpdateWeights(model="newer", version=4), 2)),
        (61, request("last")), depth=depth,
    )  # fmt: skip
    assert engine.answer(1)[1].weights_version == 1
    assert engine.answer(2)[1].weights_version == 4
    assert engine.tokens("r") == engine.tokens("later") == engine.tokens("last") == right_tokens()
    versions = [version for _, tokens, version, _ in engine.outputs("r") if tokens]
    assert set(versions) == {0, 1}
    assert versions == sorted(versions)
    assert {version for _, _, version, _ in engine.outputs("last")} == {4}
    told = [m.weights_version for _, m in engine.transport.sent if isinstance(m, WeightsUpdated)]
    assert told == [1, 4]
    assert engine.core.statistics().weights_version == 4


def test_what_is_refused_changes_nothing():
    engine = Engine(
        (1, request()),
        (3, call(calls.UpdateWeights(model="broken"), 1)),
        (4, call(calls.PauseGeneration(mode="never"), 2)),
        (5, call(calls.Sleep(level=0), 3)),
        (6, call(calls.UpdateWeights(model="new", version=-1), 4)),
        (7, call(SLEEP, 5)), (8, call(RESUME, 6)), (9, call(WAKE_UP, 7)),
    )  # fmt: skip
    codes = [engine.answer(number)[1].code for number in (1, 2, 3, 4, 6)]
    refused, invalid = ErrorCode.WEIGHTS_REFUSED, ErrorCode.INVALID_REQUEST
    assert codes == [refused, invalid, invalid, refused, ErrorCode.WRONG_STATE]
    assert engine.tokens("r") == right_tokens()
    assert {version for _, _, version, _ in engine.outputs("r")} == {0}


def test_a_pause_outlasts_a_sleep():
    engine = Engine(
        (1, request()), (3, call(PAUSE, 1)), (5, call(SLEEP, 2)), (7, call(WAKE_UP, 3)),
        (90, call(RESUME, 4)),
    )  # fmt: skip
    assert [engine.answer(n)[1].state for n in (1, 2, 3, 4)] == [
        "paused", "asleep", "paused", "running",
    ]  # fmt: skip
    assert not [at_s for at_s, *_ in engine.outputs("r") if 4 < at_s < 90]
    assert engine.tokens("r") == right_tokens()


def test_an_engine_that_sleeps_aborts_requests_and_does_not_promise_that_they_end():
    engine = Engine(
        (1, request()), (3, call(SLEEP, 1)), (4, call(calls.PauseGeneration(mode="wait"), 2)),
        (5, call(calls.PauseGeneration(mode="abort"), 3)), (9, call(WAKE_UP, 4)),
        (10, call(RESUME, 5)), (11, request("later")),
    )  # fmt: skip
    assert engine.answer(2)[1].code == ErrorCode.WRONG_STATE
    assert [engine.answer(n)[1].state for n in (3, 4, 5)] == ["asleep", "paused", "running"]
    assert engine.reason("r") is FinishReason.ABORT
    assert engine.outputs("r")[-1][0] < 9
    assert engine.tokens("later") == right_tokens()


def test_a_version_that_has_no_next_one_is_the_last():
    largest = calls.UpdateWeights(model="new", version=2**53 - 1)
    engine = Engine(
        (1, request()), (2, call(calls.UpdateWeights(model="new", version=2**64 - 1), 1)),
        (3, call(largest, 2)), (4, call(calls.UpdateWeights(model="newer"), 3)),
    )  # fmt: skip
    assert engine.answer(2)[1].weights_version == 2**53 - 1
    assert [engine.answer(n)[1].code for n in (1, 3)] == [ErrorCode.WEIGHTS_REFUSED] * 2
    assert engine.tokens("r") == right_tokens()


@pytest.mark.parametrize("change", [PAUSE, SLEEP])
def test_a_drain_ends_a_pause(change):
    engine = Engine((1, request()), (3, call(change, 1)), drain_at_s=50.0)
    assert engine.tokens("r") == right_tokens()


def test_an_engine_without_a_host_pauses_and_refuses_the_rest():
    engine = Engine(
        (1, request()), (2, call(SLEEP, 1)), (3, call(calls.UpdateWeights(model="new"), 2)),
        (4, call(PAUSE, 3)), (5, call(RESUME, 4)), has_host=False,
    )  # fmt: skip
    assert [engine.answer(n)[1].code for n in (1, 2)] == [ErrorCode.NOT_SUPPORTED] * 2
    assert engine.tokens("r") == right_tokens()


def test_every_change_is_a_call_of_operators():
    changes = {calls.PauseGeneration, calls.ResumeGeneration, calls.Sleep, calls.WakeUp}
    assert {*changes, calls.UpdateWeights} < set(calls.ADMIN_CALLS)
    assert msgspec.msgpack.decode(
        msgspec.msgpack.encode(calls.Sleep(level=2)), type=calls.AnyCall
    ) == calls.Sleep(level=2)
