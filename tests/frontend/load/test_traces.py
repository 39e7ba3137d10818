"""Traces: the public formats, synthetic ones, and parts of them."""

import functools
import itertools
import math

import numpy as np
import pytest

from frontend.load.traces import TraceError, arrivals
from frontend.load.traces.synthetic import (
    Chats,
    SharedPrefixes,
    SyntheticTrace,
    independent,
    parse_lengths,
    read_pairs,
)
from frontend.load.traces.trace import TraceFile, TraceRequest, Turn, take_part

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:16:04.7809560,879,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
"""
MOONCAKE = """{"timestamp": 0, "input_length": 1200, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 3000, "input_length": 1300, "output_length": 20, "hash_ids": [46, 47, 2354]}
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""


def read(tmp_path, file_format, text):
    path = tmp_path / "trace"
    path.write_text(text)
    trace = TraceFile(path, file_format)
    return list(trace), trace


def lengths(requests):
    return [(request.num_prompt_tokens, request.num_output_tokens) for request in requests]


# ---------------------------------------------------------------------- files


def test_an_azure_trace_is_read_with_seven_digits_of_a_second(tmp_path):
    requests, _ = read(tmp_path, "azure", AZURE)

    assert lengths(requests) == [(374, 44), (396, 109), (879, 55)]
    times = [request.arrival_s for request in requests]
    assert times == pytest.approx([0.0, 4.314579, 18.100366], abs=1e-5)
    with_zones, _ = read(tmp_path, "azure", AZURE_2024)
    assert with_zones[1].arrival_s == pytest.approx(0.007405, abs=1e-5)


def test_mooncake_prompts_share_the_blocks_whose_hash_ids_are_equal(tmp_path):
    (first, second), _ = read(tmp_path, "mooncake", MOONCAKE)

    assert (first.num_prompt_tokens, second.num_prompt_tokens) == (1200, 1300)
    assert second.arrival_s == 3.0
    one, other = first.prompt().tolist(), second.prompt().tolist()
    assert (len(one), len(other)) == (1200, 1300)
    assert one[:1024] == other[:1024]
    assert one[1024] != other[1024]


def test_burstgpt_rows_without_an_answer_are_skipped_and_counted(tmp_path):
    requests, trace = read(tmp_path, "burstgpt", BURSTGPT)

    assert lengths(requests) == [(472, 18), (417, 276)]
    assert [request.arrival_s for request in requests] == [0.0, 113.5]
    assert trace.num_skipped == 1


@pytest.mark.parametrize(
    ("file_format", "text", "message"),
    [
        ("azure", AZURE + "2023-11-16 18:16:05,-1,3\n", r"line 5: .*>= 0 .*ContextTokens"),
        ("azure", AZURE + "yesterday,1,3\n", r"line 5: .*'yesterday'.*TIMESTAMP"),
        ("azure", AZURE + "2022-11-16 18:16:05,1,3\n", r"line 5: .* sort the file by time"),
        ("azure", BURSTGPT, r"line 2: .*`TIMESTAMP`; choose another format"),
        ("burstgpt", BURSTGPT + "nan,a,1,1,2,b\n", r"line 5: the time is nan"),
        ("mooncake", MOONCAKE + "{]\n", r"line 3: '\{\]'"),
        ("mooncake", '{"timestamp": 1, "input_length": 9}', r"line 1: .*output_length"),
        (
            "mooncake",
            '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1, 2]}',
            r"line 1: 2 hash ids for a prompt of 512 tokens, 1 blocks",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_value(tmp_path, file_format, text, message):
    with pytest.raises(TraceError, match=message) as raised:
        read(tmp_path, file_format, text)
    assert str(tmp_path / "trace") in str(raised.value)


def test_a_missing_file_and_an_unknown_format_are_named(tmp_path):
    with pytest.raises(TraceError, match=r"cannot read .*absent"):
        list(TraceFile(tmp_path / "absent", "azure"))
    with pytest.raises(TraceError, match="'csv', it must be one of azure, mooncake, burst"):
        TraceFile(tmp_path / "absent", "csv")


# ---------------------------------------------------------------------- synthetic


LENGTHS = independent(
    parse_lengths("--prompt-len", "log-uniform:32:512"),
    parse_lengths("--output-len", "uniform:10:20"),
)


def synthetic(seed=1, num_requests=4000, lengths=LENGTHS, **more):
    return SyntheticTrace(
        arrivals=functools.partial(arrivals.poisson, 10.0),
        lengths=lengths,
        num_requests=num_requests,
        seed=seed,
        **more,
    )


def test_lengths_stay_in_their_ranges_and_times_rise():
    requests = list(synthetic())

    prompts, outputs = zip(*lengths(requests), strict=True)
    assert (min(prompts), max(prompts)) == (32, 512)
    assert sum(length < 128 for length in prompts) / 4000 == pytest.approx(0.5, abs=0.03)
    assert (min(outputs), max(outputs)) == (10, 20)
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400, rel=0.1)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, math.inf])
def test_gamma_arrivals_have_the_rate_and_burstiness_that_were_asked_for(burstiness):
    times = itertools.islice(arrivals.gamma(5.0, burstiness, np.random.default_rng(0)), 100_000)
    gaps = np.diff(list(times))

    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    # the coefficient of variation of a gamma distribution of this shape
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.03, abs=1e-6)


@pytest.mark.parametrize("burstiness", [0.0, -1.0, math.nan])
def test_a_burstiness_that_is_no_shape_is_refused(burstiness):
    with pytest.raises(ValueError, match="must be above 0"):
        next(arrivals.gamma(5.0, burstiness, np.random.default_rng(0)))


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 11.0), ("exponential", 20**0.5)])
def test_a_ramp_goes_from_the_first_rate_to_the_last(strategy, middle):
    ramp = arrivals.ramp(1.0, 21.0 if strategy == "linear" else 20.0, strategy, 2001, math.inf)
    gaps = np.diff([0.0, *ramp(np.random.default_rng(0))])
    assert len(gaps) == 2001
    assert 1 / gaps[0] == pytest.approx(1.0)
    assert 1 / gaps[1000] == pytest.approx(middle)
    assert 1 / gaps[-1] == pytest.approx(21.0 if strategy == "linear" else 20.0)


def test_diurnal_arrivals_rise_and_fall_with_the_sine():
    stream = arrivals.diurnal(10.0, 0.8, 1000.0, np.random.default_rng(0))
    times = np.array(list(itertools.takewhile(lambda time_s: time_s < 10_000, stream)))

    assert len(times) == pytest.approx(100_000, rel=0.02)
    phase = (times % 1000) // 250  # quarters: rising, falling, below, below
    day, night = (phase < 2).sum(), (phase >= 2).sum()
    # mean of 1 + 0.8 sin over half a period is 1 + 1.6 / pi
    assert day / night == pytest.approx((1 + 1.6 / np.pi) / (1 - 1.6 / np.pi), rel=0.03)


def test_prefixes_are_popular_by_zipf():
    trace = synthetic(prefixes=SharedPrefixes(4, 64, 1.0))
    chosen = [request.context[0] for request in trace]

    shares = sorted((chosen.count(prefix) / 4000 for prefix in set(chosen)), reverse=True)
    assert shares == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.03)


def test_chats_have_their_mean_number_of_turns_and_end_before_the_longest_prompt():
    trace = synthetic(chats=Chats(3.0, 5.0, 1000), num_requests=3000)
    requests = list(trace)

    assert sum(1 + len(request.later_turns) for request in requests) == 3000
    thinks = [turn.think_s for request in requests for turn in request.later_turns]
    assert np.mean(thinks) == pytest.approx(5.0, rel=0.1)
    for request in requests:
        while request.later_turns:
            request = request.next_turn(10.0)
            assert request.num_prompt_tokens <= 1000


def test_a_later_turn_says_all_that_was_said_before_it():
    first = TraceRequest(
        index=4,
        arrival_s=0.0,
        num_text_tokens=2,
        num_output_tokens=3,
        later_turns=(Turn(1.5, 1, 9),),
    )
    second = first.next_turn(10.0)

    assert second is not None
    assert second.arrival_s == 11.5
    assert second.prompt().tolist() == [8, 8, 9, 9, 9, 10]
    assert (second.index, second.next_turn(0.0)) == (5, None)


def test_length_pairs_are_drawn_together(tmp_path):
    path = tmp_path / "pairs"
    path.write_text("100,7\n200,9\n")

    assert set(lengths(synthetic(lengths=read_pairs(path)))) == {(100, 7), (200, 9)}
    path.write_text("100,7\n200;9\n")
    with pytest.raises(TraceError, match="line 2: '200;9'"):
        read_pairs(path)


@pytest.mark.parametrize(
    "text", ["0", "-3", "uniform:5", "uniform:9:3", "log-uniform:0:4", "lognormal:0:1:5", "x", ""]
)
def test_bad_lengths_are_refused_by_name(text):
    with pytest.raises(TraceError, match="--prompt-len is"):
        parse_lengths("--prompt-len", text)


def test_lognormal_lengths_have_their_median_and_their_limit():
    drawn = parse_lengths("x", "lognormal:300:1.0:2000")(np.random.default_rng(0), 20_000)

    assert np.median(drawn) == pytest.approx(300, rel=0.03)
    assert (drawn.min() >= 1, drawn.max()) == (True, 2000)


# ---------------------------------------------------------------------- parts of traces


def test_a_trace_is_cut_shifted_and_sped_up():
    whole = list(synthetic())
    part = list(take_part(synthetic(), rate_scale=4.0, skip_s=100.0, duration_s=50.0, delay_s=3.0))

    chosen = [request for request in whole if 100 <= request.arrival_s < 150]
    assert [request.index for request in part] == [request.index for request in chosen]
    assert part[0].arrival_s == pytest.approx((chosen[0].arrival_s - 100) / 4 + 3)
    assert len(list(take_part(synthetic(), max_requests=7))) == 7
