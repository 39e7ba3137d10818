"""What the load test sends: lengths, prefixes, conversations, files, and when."""

import itertools
import json
import math
from pathlib import Path

import pytest

from frontend.load.options import LoadOptions
from frontend.load.requests import PlannedRequest, PlannedTurn
from frontend.load.traces import TraceError
from frontend.load.workload import WORDS, Arrivals, DatasetOptions, Workload


def workload(num_requests=200, **options):
    parts = {
        name: options.pop(name)
        for name in ("units", "is_chat", "arrivals", "max_prompt_tokens")
        if name in options
    }
    asked = DatasetOptions(**options)
    asked.check()
    return Workload(options=asked, num_requests=num_requests, **parts)


def test_requests_are_a_function_of_the_seed_and_prompts_are_others_for_others():
    first, again, other = (list(workload(seed=seed)) for seed in (1, 1, 2))
    assert first == again
    assert len({one.prompt for one in first} | {one.prompt for one in other}) == 400


def test_words_are_as_many_as_tokens_were_asked_for():
    [one] = workload(1, input_len="50", is_chat=True)
    [message] = one.prompt
    assert message["role"] == "user"
    assert len(message["content"].split()) == 50
    assert len(set(WORDS)) == len(WORDS)


def test_shared_prefixes_begin_prompts_and_the_rest_is_their_own():
    requests = list(workload(prefixes=3, prefix_len=20, input_len="5", units=range(5, 9999)))
    prefixes = {tuple(one.prompt[:20]) for one in requests}
    assert len(prefixes) == 3
    assert len({tuple(one.prompt[20:]) for one in requests}) == 200
    assert all(len(one.prompt) == 25 for one in requests)


def test_prompts_from_a_text_are_windows_of_it_that_wrap_around():
    [one] = workload(1, units=list(range(6)), text=Path("a"), input_len="15")
    assert all((later - one_) % 6 == 1 for one_, later in itertools.pairwise(one.prompt))


def test_a_conversation_goes_on_with_what_was_said():
    turns = (PlannedTurn("more", 7), PlannedTurn("last", 8))
    message = {"role": "user", "content": "hi"}
    chat = PlannedRequest(4, [message], 5, later_turns=turns).next_turn(["he", "llo"])
    assert chat.prompt == [
        message,
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "more"},
    ]
    assert (chat.index, chat.num_output_tokens, chat.later_turns) == (5, 7, turns[1:])
    assert PlannedRequest(0, "hi ", 5, later_turns=turns).next_turn(["ho"]).prompt == "hi ho\nmore"
    ids = PlannedRequest(0, [1, 2], 5, later_turns=(PlannedTurn([9], 1),)).next_turn([3, 4])
    assert ids.prompt == [1, 2, 3, 4, 9]


def test_turns_count_as_requests_and_have_indices_of_their_own():
    requests = list(workload(100, turns=3, think=0.5))
    indices = [
        index
        for one in requests
        for index in range(one.index, one.index + 1 + len(one.later_turns))
    ]
    assert indices == list(range(100))
    assert any(one.later_turns for one in requests)


def test_a_duration_ends_the_arrivals():
    arrivals = Arrivals(rate=50, duration_s=2.0)
    times = [one.arrival_s for one in workload(None, arrivals=arrivals)]
    assert max(times) < 2.0
    assert len(times) == pytest.approx(100, rel=0.3)


MOONCAKE = """{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
{"timestamp": 3000, "input_length": 700, "output_length": 6, "hash_ids": [1, 3]}
"""


def test_a_trace_is_sent_at_its_own_times_and_equal_hashes_are_equal_text(tmp_path):
    path = tmp_path / "trace"
    path.write_text(MOONCAKE)
    options = {"dataset_name": "mooncake", "dataset_path": path, "units": range(9999)}
    one, two = workload(None, **options, arrivals=Arrivals(rate_scale=4))
    assert (one.arrival_s, two.arrival_s) == (0.0, 0.5)
    assert (len(one.prompt), len(two.prompt)) == (600, 700)
    assert one.prompt[:512] == two.prompt[:512]
    assert one.prompt[512:] != two.prompt[512:600]
    assert [one.num_output_tokens, two.num_output_tokens] == [5, 6]
    _, two = workload(None, **options, arrivals=Arrivals(rate=1, burstiness=math.inf))
    assert two.arrival_s == 2.0
    path.write_text("{}")
    with pytest.raises(TraceError, match="line 1"):
        list(workload(None, **options))


def test_sharegpt_conversations_begin_with_a_user_and_those_without_an_answer_are_left_out(
    tmp_path,
):
    def said(*pairs):
        return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in pairs]}

    long = said(("system", "s"), ("human", "q1"), ("gpt", "a" * 10), ("human", "q2"), ("gpt", "b"))
    short = said(("gpt", "lost"), ("human", "q3"), ("gpt", "c" * 4))
    path = tmp_path / "s.json"
    path.write_text(json.dumps([long, short, said(("human", "no answer")), said()]))
    options = {"dataset_name": "sharegpt", "dataset_path": path, "is_chat": True}

    def opening(one):
        return one.prompt[0]["content"]

    one, two = sorted(workload(None, **options, turns=9), key=opening)
    assert (opening(one), opening(two)) == ("q1", "q3")
    assert (one.num_output_tokens, two.num_output_tokens) == (3, 1)  # 4 bytes a token
    assert one.later_turns == (PlannedTurn("q2", 1),)
    assert all(not each.later_turns for each in workload(None, **options))
    # more than there are: from the beginning again
    again = list(workload(5, **options, output_len="7"))
    assert len(again) == 5
    assert {each.num_output_tokens for each in again} == {7}


def test_lines_of_json_are_prompts_messages_or_turns(tmp_path):
    path = tmp_path / "c.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    lines = [{"prompt": "p"}, {"messages": messages}, {"turns": ["t1", "t2"]}]
    path.write_text("\n\n".join(json.dumps(line | {"output_tokens": 4, "id": 1}) for line in lines))
    options = {"dataset_name": "custom", "dataset_path": path, "turns": 2}
    sent = list(workload(None, **options, is_chat=True))
    prompts = [one.prompt for one in sent]
    assert messages in prompts
    assert [{"role": "user", "content": "p"}] in prompts
    assert [one.later_turns for one in sent if one.later_turns] == [(PlannedTurn("t2", 4),)]
    with pytest.raises(ValueError, match="only a chat backend takes"):
        list(workload(None, **options))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1"),
        ('{"output_tokens": 3}', "line 1 has none of prompt"),
        ('{"prompt": "x"}', "no output_tokens"),
        ("", "holds no conversation"),
    ],
)
def test_a_bad_line_is_told(tmp_path, line, words):
    path = tmp_path / "c.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=words):
        list(workload(None, dataset_name="custom", dataset_path=path))


@pytest.mark.parametrize(
    ("load", "dataset", "words"),
    [
        ({"ramp_up_strategy": "linear"}, {}, "a ramp needs"),
        ({"ramp_up_strategy": "linear", "ramp_up_start_rps": 1.0}, {}, "a ramp needs"),
        ({"request_rate": (0.0,)}, {}, "must be above 0"),
        ({"max_concurrency": (0,)}, {}, "at least 1"),
        ({"request_rate": (1.0, 2.0), "max_concurrency": (1, 2)}, {}, "not over both"),
        ({"burstiness": 2.0}, {}, "there is no --request-rate"),
        ({"duration": 1.0}, {}, "needs a --request-rate"),
        ({"rate_scale": 2.0}, {}, "--rate-scale is 2.0 and does nothing"),
        ({}, {"prefix_len": 5}, "--prefixes is 0"),
        ({}, {"think": 1.0}, "--turns is 1"),
        ({}, {"dataset_name": "azure"}, "need a file"),
        (
            {},
            {"dataset_name": "azure", "dataset_path": Path("x"), "turns": 2},
            "--turns is 2 and does nothing",
        ),
    ],
)
def test_options_that_contradict_each_other_or_have_no_effect_are_refused(load, dataset, words):
    asked = DatasetOptions(**dataset)
    with pytest.raises(ValueError, match=words):
        asked.check()
        LoadOptions(**load).check(asked)


def test_a_sweep_sends_other_prompts_in_each_run():
    options = LoadOptions(request_rate=(1.0, 2.0), num_prompts=3)
    (first, one), (second, two) = options.loops(DatasetOptions())
    assert (first, second) == ("1 req/s", "2 req/s")
    prompts = [{each.prompt for each in loop.requests} for loop in (one, two)]
    assert not prompts[0] & prompts[1]


def test_a_closed_loop_with_a_duration_sends_a_file_again_and_again(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "x", "output_tokens": 1}')
    dataset = DatasetOptions(dataset_name="custom", dataset_path=path)
    [(_, loop)] = LoadOptions(max_concurrency=(1,), duration=1.0).loops(dataset)
    assert len(list(itertools.islice(loop.requests, 50))) == 50
    [(_, loop)] = LoadOptions(max_concurrency=(1,)).loops(dataset)
    assert len(list(loop.requests)) == 1
