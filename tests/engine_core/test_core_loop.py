"""The engine's loop: the order of things, and what a fault reaches, at one and two steps in flight.

A made-up executor takes the runner's place: the token behind n tokens is n. Its log says what
happened when.
"""

import dataclasses
import itertools
import logging
import time
from collections import deque
from functools import partial

import msgspec
import numpy as np
import pytest

from engine_core.executor import InProcessExecutor
from engine_core.kv_cache import KVCacheManager
from engine_core.lifecycle import Lifecycle
from engine_core.observers.base import EnginePart, RequestLog
from engine_core.pooler_config import PoolerConfig
from engine_core.scheduler import (
    DeviceFault,
    DuplicateRequestId,
    ModelRunnerOutput,
    QueueFull,
    Scheduler,
    SchedulerConfig,
)
from engine_core.server.clients import ClientRegistry, Rights
from engine_core.server.inbox import Inbox
from engine_core.server.limited_log import LimitedLog
from engine_core.server.prompt_embeds import PromptEmbedsReader
from engine_core.server.request_reader import RequestReader
from engine_core.startup.scheduler import build_scheduler
from protocol.calls import GetRequests, ResetPrefixCache
from protocol.errors import ErrorCode
from protocol.multimodal import TensorRef
from protocol.outputs import CallFailed, FinishReason, Rejected
from protocol.pooling import POOLING_SAMPLING, PoolingParams, PoolingTask
from protocol.prompt_embeds import EmbeddedSpan, PromptEmbedsInfo
from protocol.requests import Abort, Call, EngineRequest
from protocol.sampling import BeamSearchParams, SamplingParams
from tests.engine_core.made_core import limits, make_core
from tests.protocol.all_outputs import all_outputs


class Runner:
    """Steps fail on the device (`fails`) or when they are launched (`fails_at_once`); so do those
    that hold a request in `poison`. The device that `is_lost` takes no more work."""

    is_lost = False

    def __init__(self, depth, log, fails=(), fails_at_once=(), poison=()):
        self.max_steps_in_flight = depth
        self.log = log
        self.fails = set(fails)
        self.fails_at_once = set(fails_at_once)
        self.poison = set(poison)
        self.plans = deque()

    def submit(self, plan):
        self.log.append(f"launch {plan.step_id}")
        assert len(self.plans) < self.max_steps_in_flight
        if plan.step_id in self.fails_at_once:
            raise RuntimeError(f"no launch of {plan.step_id}")
        self.plans.append(plan)

    def collect(self):
        plan = self.plans.popleft()
        self.log.append(f"collect {plan.step_id}")
        if plan.step_id in self.fails or self.poison.intersection(plan.batch.req_ids):
            raise RuntimeError(f"no result of {plan.step_id}")
        batch = plan.batch
        return ModelRunnerOutput(
            req_ids=batch.req_ids,
            sampled_token_ids=(batch.num_computed_tokens + batch.num_scheduled_tokens).astype(
                np.int32
            ),
        )

    def check_device(self):
        if self.is_lost:
            raise OSError("an illegal access")


class Script:
    """Stands where the inbox stands: what arrives before each step, then nothing but the end."""

    num_refused_messages = 0
    refuse_unanswerable = Inbox.refuse_unanswerable

    def __init__(self, arrivals, lifecycle, log):
        self.arrivals = deque(arrivals)
        self.lifecycle = lifecycle
        self.log = log
        self.runner = None
        self._refusals = LimitedLog(logging.getLogger(), logging.WARNING, time.monotonic)

    def drain(self, *, block):
        if block:
            assert not self.runner.plans, "waits for clients while a step is in flight"
        if self.arrivals:
            arrived = self.arrivals.popleft()
            return arrived() or [] if callable(arrived) else arrived
        if block:
            self.lifecycle.drain("the script is over")
        return []


class RecordingOutbox:
    """Stands where the outbox stands."""

    def __init__(self, clients, log):
        self.clients = clients
        self.log = log
        self.tokens = {}
        self.ends = {}
        self.engine_ends = False

    def tell_state(self, *, draining, paused):
        pass

    def close(self):
        pass

    def send(self, outputs):
        if any(outputs.values()):
            self.log.append(f"send {next(iter(outputs.values())).step_id}")
        for index, per_client in outputs.items():
            client = self.clients.by_index(index)
            client.request_ids.difference_update(per_client.finished_req_ids)
            assert not self.engine_ends, "a message behind the last one"
            self.engine_ends = per_client.engine_ends
            for output in all_outputs(per_client):
                assert output.request_id not in self.ends, "an output behind the terminal one"
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finished:
                    self.ends[output.request_id] = (output.finish_reason, output.detail)

    def post(self, client, message, frames=()):
        raise AssertionError(f"refused: {message}")


class Served:
    """An engine that has served a script."""

    def __init__(
        self,
        depth,
        *arrivals,
        eos=(),
        max_num_seqs=8,
        fails=(),
        fails_at_once=(),
        poison=(),
        runs=True,
        runner_depth=None,
        clock=time.monotonic,
        parts=(),
        prompt_embeds=None,
        **validated,
    ):
        self.log = []
        self.lifecycle = Lifecycle(drain_timeout_s=60.0, clock=clock)
        clients = ClientRegistry()
        self.client = clients.add(b"client", "test", Rights())
        self.sent = RecordingOutbox(clients, self.log)
        self.runner = Runner(runner_depth or depth, self.log, fails, fails_at_once, poison)
        steps = [
            arrived if callable(arrived) else [(self.client, message) for message in arrived]
            for arrived in arrivals
        ]
        self.inbox = script = Script(steps, self.lifecycle, self.log)
        script.runner = self.runner
        config = SchedulerConfig(
            max_num_batched_tokens=16,
            max_num_seqs=max_num_seqs,
            max_model_len=64,
            max_steps_in_flight=depth,
        )
        self.scheduler = build_scheduler(config, KVCacheManager(num_blocks=64, block_size=4))
        self.core = make_core(
            script,
            self.sent,
            self.scheduler,
            InProcessExecutor(self.runner, clock=clock),
            self.lifecycle,
            dataclasses.replace(limits(config, 10_000), **validated),
            eos_token_ids=eos,
            parts=parts,
            prompt_embeds=prompt_embeds,
            clock=clock,
        )
        if runs:
            self.core.run()
            self.core.close()
            assert not self.client.request_ids
            assert not self.runner.plans


def ask(name, num_prompt, max_tokens):
    """Prompts that have nothing in common."""
    base = 100 * (1 + sum(map(ord, name)))
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[base % 9000 + index for index in range(num_prompt)],
        sampling_params=SamplingParams(max_tokens=max_tokens),
    )


@pytest.fixture(params=[1, 2])
def depth(request):
    return request.param


def test_with_one_step_at_a_time_each_is_sent_before_the_next_is_launched():
    log = Served(1, [ask("a", 3, 3)]).log
    assert log[:9] == [f"{what} {n}" for n in range(3) for what in ("launch", "collect", "send")]


def test_outputs_of_a_step_leave_while_the_next_one_runs():
    """Proves S092, S200."""
    log = Served(2, [ask("a", 3, 4)]).log
    assert log[:8] == [
        "launch 0", "launch 1", "collect 0", "send 0", "launch 2", "collect 1", "send 1", "launch 3"
    ]  # fmt: skip


def test_every_request_gets_its_tokens_and_one_end(depth):
    """By length, by end-of-sequence at token 11, with prompts of several steps. The loop steps
    while a request is unfinished; each step appends, checks, ends. Proves S192, S199."""
    served = Served(
        depth,
        [ask("a", 3, 5), ask("b", 9, 50)],
        [ask("c", 40, 4)],
        [],
        [ask("d", 1, 1), ask("e", 10, 9)],
        eos=(11,),
    )
    assert served.sent.tokens == {
        "a": [3, 4, 5, 6, 7],
        "b": [9, 10, 11],
        "c": [40, 41, 42, 43],
        "d": [1],
        "e": [10, 11],
    }
    assert {name: reason for name, (reason, _) in served.sent.ends.items()} == {
        "a": FinishReason.LENGTH,
        "b": FinishReason.STOP,
        "c": FinishReason.LENGTH,
        "d": FinishReason.LENGTH,
        "e": FinishReason.STOP,
    }


def test_two_depths_give_the_same_tokens_whatever_arrives_when():
    """One token in 7 ends a sequence."""
    asked = [ask(f"r{n}", 1 + 5 * n % 13, 1 + 7 * n % 11) for n in range(30)]
    arrivals = [asked[n : n + 2] if n % 3 else [] for n in range(-2, 40, 2)]
    sent = [Served(d, *arrivals, eos=range(0, 64, 7), max_num_seqs=4).sent for d in (1, 2)]
    assert sent[0].tokens == sent[1].tokens
    assert sent[0].ends == sent[1].ends
    assert len(sent[0].ends) == 20


def test_a_request_given_up_in_flight_ends_once_and_its_late_token_is_dropped(depth):
    served = Served(depth, [ask("a", 3, 20), ask("b", 3, 4)], [], [Abort(request_ids=["a"])])
    assert served.sent.ends["a"][0] is FinishReason.ABORT
    assert served.sent.tokens["a"] == [3, 4, 5][: len(served.sent.tokens["a"])]
    assert served.sent.tokens["b"] == [3, 4, 5, 6]


def test_one_sample_is_given_up_and_its_request_goes_on(depth):
    """An abort of a request that the client does not have changes nothing."""
    asked = msgspec.structs.replace(ask("a", 3, 12), num_sequences=2)
    abort = Abort(request_ids=(), samples=(("a", 1), ("b", 0)))
    served = Served(depth, [asked], [], [], [], [abort], runs=False)
    indexes = []
    send = served.sent.send

    def recording(outputs):
        ends = [each for client in outputs.values() for each in client.other_outputs]
        indexes.extend((each.index, each.finish_reason) for each in ends if each.finished)
        send(outputs)

    served.sent.send = recording
    served.sent.ends = Unchecked()
    served.core.run()
    assert indexes == [(1, FinishReason.ABORT), (0, FinishReason.LENGTH)]


class Unchecked(dict):
    """For requests of several sequences, each of which has an end."""

    def __contains__(self, name):
        return False


def failing_for(name, original):
    def check(self, request):
        if request.request_id == name:
            raise KeyError("a defect of ours")
        return original(self, request)

    return check


def test_a_fault_over_one_message_is_its_answer_and_the_loop_goes_on(depth, monkeypatch, caplog):
    monkeypatch.setattr(RequestReader, "check", failing_for("bad", RequestReader.check))
    monkeypatch.setattr(Scheduler, "explain_all", lambda self, tenant: {}["another"])
    served = Served(
        depth,
        [ask("bad", 3, 9), Call(call_id=7, call=GetRequests()), ask("good", 3, 2)],
        runs=False,
    )
    posted = []
    served.sent.post = lambda client, message, frames=(): posted.append(message)
    served.core.run()
    rejected, failed = posted
    assert isinstance(rejected, Rejected) and isinstance(failed, CallFailed)
    assert (rejected.request_id, failed.call_id) == ("bad", 7)
    assert {rejected.code, failed.code} == {ErrorCode.INTERNAL}
    assert "a defect of ours" in rejected.message and "GetRequests" in failed.message
    assert served.sent.tokens == {"good": [3, 4]}
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("message", [ask("bad", 3, 9), Call(call_id=1, call=ResetPrefixCache())])
def test_a_fault_that_may_have_left_the_scheduler_wrong_ends_the_loop(message, monkeypatch):
    monkeypatch.setattr(Scheduler, "add_request", failing_for("bad", Scheduler.add_request))
    monkeypatch.setattr(Scheduler, "reset_prefix_cache", lambda self: {}["books"])
    with pytest.raises(KeyError):
        Served(1, [message])


def test_a_fault_that_comes_once_ends_nobody(depth, caplog):
    """On the device or at the launch; "c" waited, "d" comes behind it."""
    for fault in ({"fails": {1}}, {"fails_at_once": {1}}):
        asked = [ask("a", 3, 9), ask("b", 3, 9), ask("c", 3, 2)]
        served = Served(depth, asked, [], [], [ask("d", 5, 2)], max_num_seqs=2, **fault)
        assert served.sent.tokens == {
            "a": list(range(3, 12)),
            "b": list(range(3, 12)),
            "c": [3, 4],
            "d": [5, 6],
        }
        assert set(served.sent.ends.values()) == {(FinishReason.LENGTH, None)}
        assert "step 1 failed" in caplog.text


def test_only_the_request_whose_steps_fail_ends_with_the_faults_text(depth):
    asked = [ask(name, 3, 9) for name in "abcdefg"]
    served = Served(depth, [ask("early", 3, 9)], asked, poison={"c", "f"})
    for name in "cf":
        reason, detail = served.sent.ends[name]
        assert reason is FinishReason.ERROR
        assert detail.startswith("the step failed: RuntimeError: no result of ")
        assert not served.sent.tokens[name]
    for name in ["early", *"abdeg"]:
        assert served.sent.ends[name] == (FinishReason.LENGTH, None)
        assert served.sent.tokens[name] == list(range(3, 12))


def test_steps_that_all_fail_end_the_loop_and_no_request(depth):
    served = Served(depth, [ask("a", 3, 9), ask("b", 3, 9)], fails=range(3, 100), runs=False)
    with pytest.raises(DeviceFault, match="steps fail whatever they hold"):
        served.core.run()
    assert not served.sent.ends
    assert sum(line.startswith("collect") for line in served.log) < 20
    served.core.end_all(FinishReason.ERROR, "the engine failed")
    served.core.close()
    assert not served.client.request_ids
    assert not served.runner.plans


def test_a_device_that_is_lost_ends_the_loop_at_the_first_fault(depth):
    """No request is tried on it once more."""
    served = Served(depth, [ask("a", 3, 9)], fails=range(1, 100), runs=False)
    served.runner.is_lost = True
    with pytest.raises(DeviceFault, match="the device is lost: OSError: an illegal access"):
        served.core.run()
    assert not served.sent.ends
    assert served.log[-1] == "collect 1"


def test_an_abort_of_the_daemon_tells_everybody_and_waits_for_the_device(depth):
    served = Served(depth, [ask("a", 3, 50)], [], [], runs=False)
    served.inbox.arrivals.append(lambda: served.lifecycle.abort("now"))
    served.core.run()
    assert served.sent.ends["a"] == (FinishReason.ABORT, "the engine is stopping")
    assert served.sent.engine_ends
    assert len(served.runner.plans) == depth - 1
    served.core.close()
    assert not served.runner.plans


def test_a_drain_takes_in_every_step(depth):
    served = Served(depth, [ask("a", 3, 50)], [], runs=False)
    served.inbox.arrivals.append(lambda: served.lifecycle.drain("enough") or [])
    served.core.run()
    assert served.sent.tokens["a"] == list(range(3, 53))
    assert not served.runner.plans


def test_times_of_steps_that_overlap_are_counted_once(depth):
    """A clock that ticks at every look: the loop's seconds are at most those that went by."""
    ticks = itertools.count()
    served = Served(depth, [ask("a", 3, 20), ask("b", 30, 20)], clock=lambda: float(next(ticks)))
    numbers = served.core.statistics()
    assert 0 < numbers.model_time_s < numbers.step_time_s < next(ticks)


def test_a_scheduler_that_plans_further_than_the_executor_runs_is_refused():
    with pytest.raises(ValueError, match=r"plans 2 steps ahead, the executor runs 1"):
        Served(2, runner_depth=1)


POOLER = PoolerConfig(tasks=tuple(PoolingTask), hidden_size=3, vector_size=3)


class ByFingerprint(EnginePart):
    """Stands where adapters stand."""

    def resolve(self, message):
        return msgspec.structs.replace(message, adapter=message.adapter_fingerprint)


def test_the_engine_makes_a_request_of_a_message_and_gives_it_to_the_scheduler():
    """With every field that it serves. Proves S234."""
    added = []
    fields = {
        "request_id": "mine",
        "prompt_token_ids": [4, 5],
        "sampling_params": SamplingParams(max_tokens=9, temperature=0.5),
        "output_token_ids": [6],
        "priority": 3,
        "tenant": "team",
        "cache_salt": "salt",
        "adapter": "lora",
        "adapter_fingerprint": "its weights",
        "is_resumed": True,
        "timeout_s": 4.5,
    }
    several = {
        "num_sequences": 2,
        "beam_search": BeamSearchParams(beam_width=2),
        "sampling_params": SamplingParams(max_tokens=9, temperature=0.0),
    }
    message = EngineRequest(**fields)
    beams = msgspec.structs.replace(message, request_id="b", output_token_ids=[], **several)
    pooled = {
        "pooling_params": PoolingParams(task=PoolingTask.TOKEN_EMBED),
        "sampling_params": POOLING_SAMPLING,
    }
    vectors = msgspec.structs.replace(message, request_id="v", output_token_ids=[], **pooled)
    not_served = {"prompt_embeds", "multimodal_inputs"}
    checked_before = {"weights_fingerprint"}
    moved = {"kv_source": "tcp://10.0.0.1:5700"}
    beams = msgspec.structs.replace(beams, **moved)
    known = {*fields, *several, *pooled, *not_served, *moved, *checked_before}
    assert known == {*EngineRequest.__struct_fields__}
    served = Served(
        1, [message, beams, vectors], eos=(7,), runs=False, clock=lambda: 12.5,
        parts=[ByFingerprint()], pooler=POOLER, fetches_blocks=True, serves_adapters=True,
        scheduling_policy="priority",
    )  # fmt: skip
    served.scheduler.add_request = added.append
    served.core.run()
    request, of_beams, of_vectors = added
    assert request.adapter == fields.pop("adapter_fingerprint")
    del fields["adapter"]
    assert request.prompt.tolist() == fields.pop("prompt_token_ids")
    assert request.output_token_ids == fields.pop("output_token_ids")
    for name, value in fields.items():
        assert getattr(request.message, name) == value
    assert (request.client_index, request.arrival_time) == (served.client.index, 12.5)
    assert request.eos_token_ids == {7}
    assert (of_beams.num_sequences, of_beams.beam_search is not None) == (2, True)
    assert (of_beams.message.kv_source, request.message.kv_source) == (moved["kv_source"], None)
    assert of_vectors.message.pooling_params == pooled["pooling_params"]
    assert (of_vectors.report.pools_all_states, of_vectors.num_reported_values) == (True, 6)
    assert served.client.request_ids == {"mine", "b", "v"}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QueueFull("full"), ErrorCode.QUEUE_FULL),
        (DuplicateRequestId("twice"), ErrorCode.DUPLICATE_REQUEST_ID),
        (ValueError("wrong"), ErrorCode.INVALID_REQUEST),
    ],
)
def test_what_the_scheduler_refuses_is_answered_with_its_reason(error, code):
    """And is not its client's. Proves S234."""
    served = Served(1, [ask("a", 3, 3)], runs=False)
    answers = []

    def refuse(request):
        raise error

    served.scheduler.add_request = refuse
    served.sent.post = lambda client, message: answers.append((client, message))
    served.core.run()
    assert answers == [(served.client, Rejected(request_id="a", code=code, message=str(error)))]
    assert not served.client.request_ids


def test_prompts_with_rows_are_known_again_by_what_these_hold():
    """A trace, and what remembers requests that killed the engine, see other ids. Proves S020."""
    kept, seen = [], RequestLog()
    seen.prompts = []
    seen.on_arrival = lambda message, *_: seen.prompts.append(message.prompt_token_ids)
    info = PromptEmbedsInfo(hidden_size=2, max_bytes=99)
    data = TensorRef(frame=0, dtype="float32", shape=(2, 2))
    served = Served(
        1, runs=False, parts=[seen],
        prompt_embeds=PromptEmbedsReader(info, block_size=4, largest_number=1e9),
    )  # fmt: skip
    served.scheduler.add_request = kept.append

    def arrive(number, frame):
        served.client.frames = [frame]
        message = msgspec.structs.replace(
            ask(str(number), 3, 3),
            prompt_token_ids=[5, 0, 0],
            prompt_embeds=(EmbeddedSpan(start=1, data=data),),
        )
        return [(served.client, message)]

    for number, frame in enumerate((b"\0" * 16, b"\0" * 16, b"\1" * 16)):
        served.inbox.arrivals.append(partial(arrive, number, frame))
    served.core.run()
    assert [each.prompt.tolist() for each in kept] == [[5, 0, 0]] * 3
    first, same, other = seen.prompts
    assert first == same
    assert first[0] == other[0] == 5
    assert all(one != another for one, another in zip(first[1:], other[1:], strict=True))
