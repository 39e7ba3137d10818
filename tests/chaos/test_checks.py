"""What the runs of chaos and soak would find: each kind of wrong answer, lost requests, growth."""

import copy
import dataclasses
import json

import pytest

from frontend import RequestOutputKind
from tests.chaos.cases import KINDS, Case, make_cases
from tests.chaos.faults import client_faults, daemon_faults
from tests.chaos.requests import Answer, Sequence, Use, append_output, compare
from tests.chaos.soak import Sample, growth, slope
from tests.chaos.tally import Tally

CASE = Case(0, "logprobs", "x", {"max_tokens": 4, "logprobs": 0})
LETTERS = {number: chr(97 + number) for number in range(26)}
WANTED = Sequence([0, 1, 2, 3], "abcd", "length", None, [[(n, -1.0)] for n in range(4)])


def decode(token_ids):
    return "".join(LETTERS[token_id] for token_id in token_ids)


def problems_of(use=None, num_ends=1, **changes):
    sequence = dataclasses.replace(copy.deepcopy(WANTED), **changes)
    answer = Answer([sequence], num_ends=num_ends)
    return compare(CASE, use or Use(), answer, [dataclasses.asdict(WANTED)], decode)


def test_the_expected_answer_is_right():
    assert problems_of() == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"token_ids": [0, 1, 2, 4]}, "wrong tokens"),
        ({"token_ids": [0, 1, 2]}, "wrong tokens"),
        ({"token_ids": [0, 1, 1, 2, 3]}, "wrong tokens"),
        ({"text": "abc"}, "wrong text"),
        ({"reason": "abort"}, "ended with abort"),
        ({"reason": None}, "ended with None"),
        ({"stop_reason": "d"}, "ended with length"),
        ({"logprobs": None}, "0 logprobs for 4 tokens"),
        ({"logprobs": WANTED.logprobs[1:]}, "3 logprobs for 4 tokens"),
        ({"logprobs": [[(n, -1.1)] for n in range(4)]}, "off by 0.1"),
        ({"logprobs": [[(9, -1.0)]] * 4}, "other tokens at 0"),
        ({"num_ends": 0}, "0 ends"),
        ({"num_ends": 2}, "2 ends"),
    ],
)
def test_a_wrong_answer_is_found(changes, problem):
    assert problem in "; ".join(problems_of(**changes))


def test_a_request_that_was_ended_early_has_a_prefix():
    use = Use("abort")
    early = {"token_ids": [0, 1], "text": "ab", "logprobs": WANTED.logprobs[:2], "reason": "abort"}
    assert problems_of(use, **early) == []
    assert problems_of(use, **early | {"token_ids": [1, 2]})
    assert problems_of(use, **early | {"text": "b"})
    assert problems_of(use, **early | {"reason": "timeout"})
    assert problems_of(Use("leave"), num_ends=0, **early | {"reason": None}) == []
    assert problems_of(Use("read"), num_ends=0, **early | {"reason": None})


@dataclasses.dataclass
class Part:
    index: int
    text: str
    token_ids: list[int]
    logprobs: None = None
    finish_reason: str | None = None
    stop_reason: None = None


@dataclasses.dataclass
class Output:
    outputs: list[Part]


@pytest.mark.parametrize(
    ("kind", "parts", "problem"),
    [
        (RequestOutputKind.CUMULATIVE, [Part(0, "ab", [0, 1]), Part(0, "a", [0])], "shrank"),
        (RequestOutputKind.CUMULATIVE, [Part(0, "a", [0]), Part(0, "bc", [1, 2])], "changed"),
        (
            RequestOutputKind.DELTA,
            [Part(0, "a", [0], finish_reason="stop"), Part(0, "b", [1])],
            "goes on behind its end",
        ),
    ],
)
def test_a_stream_that_takes_back_or_goes_on_behind_its_end_is_found(kind, parts, problem):
    answer = Answer([Sequence()])
    for part in parts:
        append_output(answer, Output([part]), kind)
    assert problem in "; ".join(answer.problems)


def log_of(folder, name, *entries):
    path = folder / f"{name}.jsonl"
    start = {"at_s": 0.0, "event": "start", "num_descriptors": 5}
    path.write_text("".join(json.dumps(entry) + "\n" for entry in (start, *entries)))
    return path


def begin(request_id):
    return {"at_s": 1.0, "event": "begin", "id": request_id, "kind": "greedy"}


def end(request_id, **more):
    return {
        "at_s": 3.0, "event": "end", "id": request_id, "kind": "greedy", "verdict": "ok",
        "problems": [], "num_ends": 1, "num_tokens": 7, "reasons": ["length"],
    } | more  # fmt: skip


GOOD_BYE = {"at_s": 9.0, "event": "exit", "num_descriptors": 5}


def test_requests_without_an_end_are_lost_unless_their_client_was_killed(tmp_path):
    entries = (begin("a"), end("a"), begin("b"))
    alive = log_of(tmp_path, "client0.0", *entries, GOOD_BYE)
    killed = log_of(tmp_path, "client1.0", *entries)
    fault = {"at_s": 2.0, "kind": "kill plain", "target": "daemon"}
    tally = Tally([(alive, None), (killed, 5.0)], [fault])
    assert (tally.total("finished"), tally.total("lost"), tally.total("cut by a kill")) == (2, 1, 1)
    assert tally.num_tokens == 14
    (failure,) = tally.failures
    assert "client0.0.jsonl: request b never ended" in failure
    assert "2.00 kill plain daemon" in failure


def test_a_second_end_and_a_client_that_does_not_exit_are_found(tmp_path):
    log = log_of(tmp_path, "client0.0", begin("a"), end("a"), end("a"))
    tally = Tally([(log, None)], [])
    assert tally.num_duplicates == 1
    assert any("ended twice" in failure for failure in tally.failures)
    assert any("did not exit" in failure for failure in tally.failures)


def test_descriptors_that_a_client_keeps_are_counted(tmp_path):
    log = log_of(tmp_path, "client0.0", GOOD_BYE | {"num_descriptors": 8})
    assert Tally([(log, None)], []).num_descriptors_kept == 3


def test_work_and_faults_follow_from_their_seeds():
    assert make_cases(1, 50) == make_cases(1, 50) != make_cases(2, 50)
    assert {case.kind for case in make_cases(1, 50)} == set(KINDS)
    for draw in (daemon_faults, client_faults):
        first, again, other = (
            [fault for fault, _ in zip(draw(seed), range(9), strict=False)] for seed in (1, 1, 2)
        )
        assert first == again != other


def test_outliers_do_not_move_the_slope():
    from random import Random

    random = Random(0)
    times = [float(n) for n in range(60)]
    values = [3 * t + random.gauss(0, 1) for t in times]
    assert slope(times, values) == pytest.approx(3, abs=0.05)
    values[10] += 10_000
    assert slope(times, values) == pytest.approx(3, abs=0.05)


def test_growth_is_judged_behind_the_warm_up():
    def samples(name, memory_of):
        return [Sample(name, float(t), memory_of(t), 9 + (t > 90), 4) for t in range(100)]

    grows = samples("grows", lambda t: 10**8 + 10**6 * t)
    settles = samples("settles", lambda t: 10**8 + 10**7 * min(t, 20))
    late = samples("late", lambda t: 10**8 + 3 * 10**7 * (t > 70))
    rows = growth(grows + settles + late, 100.0)
    verdicts = {(row["process"], row["quantity"]): row["is_bounded"] for row in rows}
    assert not verdicts["grows", "memory_bytes"]
    assert verdicts["settles", "memory_bytes"] and verdicts["late", "memory_bytes"]
    assert verdicts["grows", "num_threads"]
    assert verdicts["grows", "num_descriptors"]  # one for a moment is no growth
