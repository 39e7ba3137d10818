"""Grammars beside the loop: compiled once, bounded, and in turn over clients."""

import threading
import time

import msgspec
import pytest

from engine_core.errors import RequestRefused
from engine_core.kv_cache import KVCacheManager
from engine_core.process.suspects import Suspects
from engine_core.scheduler import (
    ModelRunnerOutput,
    RequestStatus,
    SchedulerConfig,
)
from engine_core.startup.scheduler import build_scheduler
from engine_core.structured_output import manager
from engine_core.structured_output.grammar_error import GrammarError
from engine_core.structured_output.manager import StructuredOutputs, fingerprint_of
from protocol.errors import ErrorCode
from protocol.explanations import WaitReason
from protocol.sampling import SamplingParams
from protocol.structured_output import StructuredOutput, StructuredOutputKind
from tests.engine_core.new_request import new_request


class Compiler:
    """Notes what it compiles. Texts that begin with `slow` wait for `gate`; `bad` ones fail."""

    def __init__(self):
        self.compiled = []
        self.gate = threading.Event()

    def compile(self, asked, is_begun):
        is_begun()
        self.compiled.append(asked.text)
        if asked.text.startswith("slow"):
            self.gate.wait(30)
        if "bad" in asked.text:
            raise GrammarError(f"{asked.text} is bad", is_lasting="today" not in asked.text)
        return object()

    def start(self):
        pass

    def close(self):
        self.gate.set()


@pytest.fixture
def compiler():
    made = Compiler()
    yield made
    made.gate.set()


@pytest.fixture
def clock():
    return [0.0]


@pytest.fixture
def outputs(compiler, clock):
    return StructuredOutputs(lambda: compiler, vocab_size=32, clock=lambda: clock[0])


def request(text, client_index=0):
    asked = StructuredOutput(kind=StructuredOutputKind.REGEX, text=text)
    params = SamplingParams(max_tokens=9, structured_output=asked)
    return new_request(
        request_id=f"{client_index}-{text}",
        prompt_token_ids=[1],
        sampling_params=params,
        client_index=client_index,
        tenant=f"tenant {client_index}",
    )


def admitted(outputs, *args):
    made = request(*args)
    outputs.admit(None, made)
    return made


def wait_until(outputs, is_so):
    """Returns who was refused meanwhile, and why."""
    refused = []
    until = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < until
        refused += outputs.take_compiled()
        time.sleep(0.001)
    refused += outputs.take_compiled()
    return [(each, why) for each, why in refused if why is not None]


def test_equal_contents_are_compiled_once(outputs, compiler):
    first, second = admitted(outputs, "a"), admitted(outputs, "a")
    assert first.grammar is second.grammar
    wait_until(outputs, lambda: first.grammar.is_ready)
    assert admitted(outputs, "a").grammar.is_ready
    assert compiler.compiled == ["a"]


def test_a_request_without_structured_output_has_no_grammar(outputs):
    plain = new_request(
        request_id="p", prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=1)
    )
    outputs.admit(None, plain)
    assert plain.grammar is None


def test_a_grammar_that_cannot_be_compiled_refuses_who_waits_and_who_comes(outputs, compiler):
    waiting = [admitted(outputs, "slow bad"), admitted(outputs, "slow bad")]
    compiler.gate.set()
    refused = []

    def all_are_refused():
        refused.extend(outputs.take_compiled())
        return len(refused) == 2

    wait_until(outputs, all_are_refused)
    assert refused == [(each, "slow bad is bad") for each in waiting]
    with pytest.raises(RequestRefused, match="slow bad is bad") as error:
        outputs.admit(None, request("slow bad"))
    assert error.value.code is ErrorCode.INVALID_REQUEST
    assert compiler.compiled == ["slow bad"]


def test_the_cache_drops_what_was_used_longest_ago(outputs, compiler, monkeypatch):
    monkeypatch.setattr(manager, "_MAX_CACHED", 2)
    for text in ("a", "b", "a", "c", "a", "b"):
        made = admitted(outputs, text)
        wait_until(outputs, lambda made=made: made.grammar.is_ready)
    assert compiler.compiled == ["a", "b", "c", "b"]


def test_what_takes_too_long_ends_alone_and_gives_its_place_to_others(outputs, compiler, clock):
    slow = [admitted(outputs, f"slow {number}") for number in range(2)]
    other = admitted(outputs, "a")
    wait_until(outputs, lambda: len(compiler.compiled) == 2)
    clock[0] = 29.0
    assert all(why is None for _, why in outputs.take_compiled())
    clock[0] = 31.0
    refused = wait_until(outputs, lambda: other.grammar.is_ready)
    assert {each for each, _ in refused} == set(slow)
    assert all("takes longer than 30 s" in why for _, why in refused)


def test_clients_are_served_in_turn(outputs, compiler, monkeypatch):
    monkeypatch.setattr(manager, "_MAX_COMPILING", 1)
    for number in range(2):
        admitted(outputs, f"slow {number}")
    many = [admitted(outputs, f"{number}", 1) for number in range(5)]
    one = admitted(outputs, "one", 2)
    compiler.gate.set()
    wait_until(outputs, lambda: all(each.grammar.is_ready for each in (*many, one)))
    assert compiler.compiled[:5] == ["slow 0", "slow 1", "0", "one", "1"]


def test_too_many_of_one_client_are_refused_and_another_client_is_not(outputs, monkeypatch):
    monkeypatch.setattr(manager, "_MAX_QUEUED_BY_CLIENT", 3)
    for number in range(2 + 3):
        admitted(outputs, f"slow {number}")
    with pytest.raises(RequestRefused, match="try again later") as error:
        outputs.admit(None, request("slow 9"))
    assert error.value.code is ErrorCode.QUEUE_FULL
    assert admitted(outputs, "slow 9", 1).grammar is not None


def test_the_compiler_is_made_once_and_not_before_it_is_asked_for(compiler):
    made = []
    outputs = StructuredOutputs(lambda: made.append(1) or compiler, vocab_size=32)
    assert not outputs._has_compiler.wait(0.05)
    outputs.prepare()
    assert outputs._has_compiler.wait(30)
    outputs.prepare()
    wait_until(outputs, lambda: admitted(outputs, "a").grammar.is_ready)
    assert made == [1]


def test_a_tokenizer_that_cannot_be_read_refuses_every_grammar():
    def fail():
        raise ValueError("no such decoder")

    outputs = StructuredOutputs(fail, vocab_size=32)
    waiting, refused = admitted(outputs, "a"), []

    def is_refused():
        refused.extend(outputs.take_compiled())
        return bool(refused)

    wait_until(outputs, is_refused)
    assert refused == [(waiting, "no such decoder")]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_a_request_ends_while_it_waits_for_its_grammar(outputs, compiler, policy, is_aborted):
    config = SchedulerConfig(
        max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64, scheduling_policy=policy
    )
    cache = KVCacheManager(num_blocks=8, block_size=4)
    scheduler = build_scheduler(config, cache, constraints=outputs)
    waiting = admitted(outputs, "slow bad")
    scheduler.add_request(waiting)
    scheduler.check()
    assert scheduler.explain(waiting.request_id).waits_for is WaitReason.GRAMMAR
    if is_aborted:
        scheduler.finish_requests(waiting.request_id, RequestStatus.FINISHED_ABORTED)
    compiler.gate.set()
    until = time.monotonic() + 20
    while not waiting.is_finished or scheduler.has_work():
        assert time.monotonic() < until
        plan = scheduler.schedule()
        scheduler.update_from_output(plan, ModelRunnerOutput(req_ids=[], sampled_token_ids=[]))
    scheduler.check()
    ended = RequestStatus.FINISHED_ABORTED if is_aborted else RequestStatus.FINISHED_REFUSED
    assert waiting.status is ended


def test_no_more_are_compiled_while_too_many_take_too_long(outputs, compiler, clock, monkeypatch):
    monkeypatch.setattr(manager, "_MAX_ABANDONED", 2)
    for number in range(2):
        admitted(outputs, f"slow {number}")
    wait_until(outputs, lambda: len(compiler.compiled) == 2)
    clock[0] = 31.0
    outputs.take_compiled()
    with pytest.raises(RequestRefused, match="2 take longer than 30 s; try again later"):
        outputs.admit(None, request("a"))
    compiler.gate.set()
    wait_until(outputs, lambda: not outputs._num_abandoned)
    made = admitted(outputs, "a")
    wait_until(outputs, lambda: made.grammar.is_ready)


def test_a_suspect_is_compiled_alone_and_refused_when_it_has_died_so(compiler):
    suspects = Suspects()
    outputs = StructuredOutputs(lambda: compiler, vocab_size=32, suspects=suspects)
    guilty = request("slow guilty")
    for _ in range(2):
        suspects.begin_compile(fingerprint_of(guilty.sampling_params.structured_output))
        suspects.count_death(-11)
    first = admitted(outputs, "slow first")
    outputs.admit(None, guilty)
    third = admitted(outputs, "third")
    time.sleep(0.02)
    outputs.take_compiled()
    assert compiler.compiled == ["slow first"], "it waits until nothing else is compiled"
    compiler.gate.set()
    wait_until(outputs, lambda: all(each.grammar.is_ready for each in (first, guilty, third)))
    assert compiler.compiled == ["slow first", "slow guilty", "third"]
    suspects.begin_compile(fingerprint_of(guilty.sampling_params.structured_output))
    suspects.count_death(-11)
    outputs._grammars.clear()
    with pytest.raises(
        RequestRefused, match=r"each time it compiled structured_outputs\.regex"
    ) as e:
        outputs.admit(None, guilty)
    assert e.value.code is ErrorCode.KILLED_ENGINE
    admitted(outputs, "another")


def test_a_failure_that_may_not_come_again_is_not_kept(outputs, compiler):
    for _ in range(2):
        made = admitted(outputs, "bad today")
        assert wait_until(outputs, lambda made=made: made.grammar.is_done) == [
            (made, "bad today is bad")
        ]
    assert compiler.compiled == ["bad today"] * 2


def test_tenants_of_one_client_are_served_in_turn(outputs, compiler, monkeypatch):
    monkeypatch.setattr(manager, "_MAX_COMPILING", 1)
    admitted(outputs, "slow")
    many = [admitted(outputs, f"{number}") for number in range(5)]
    one = request("one")
    one.message = msgspec.structs.replace(one.message, tenant="another")
    outputs.admit(None, one)
    compiler.gate.set()
    wait_until(outputs, lambda: all(each.grammar.is_ready for each in (*many, one)))
    assert compiler.compiled.index("one") <= 2
