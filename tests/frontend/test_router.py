"""Which engine a prompt is sent to."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.router import PREFIX_TOKENS, CacheAwareRouter, load_of, prefixes_of

LOADS = st.lists(st.one_of(st.integers(0, 5000), st.just(inf)), min_size=1, max_size=6)
PROMPTS = st.lists(
    st.builds(
        lambda begin, end: [begin] * 64 + end,
        st.integers(0, 3),
        st.lists(st.integers(0, 3), max_size=80),
    ),
    min_size=1,
    max_size=20,
)


def send(router, tokens, loads):
    return router.choose(list(prefixes_of(tokens)), len(tokens), loads)


def whole_runs(one, other):
    """Of their common beginning, the tokens in whole runs."""
    pairs = zip(one, other, strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    return same - same % PREFIX_TOKENS


@given(prompts=PROMPTS, data=st.data())
def test_the_least_load_less_twice_what_was_sent_wins(prompts, data):
    num_engines = data.draw(st.integers(1, 5))
    router, sent = CacheAwareRouter(), [[] for _ in range(num_engines)]
    for tokens in prompts:
        loads = data.draw(st.lists(LOADS.map(max), min_size=num_engines, max_size=num_engines))
        if data.draw(st.booleans()):
            lost = data.draw(st.integers(0, num_engines - 1))
            router.forget(lost)
            sent[lost].clear()
        known = [max((whole_runs(tokens, each) for each in one), default=0) for one in sent]
        costs = [load - 2 * num for load, num in zip(loads, known, strict=True)]
        choice = send(router, tokens, loads)
        if min(loads) == inf:
            assert choice is None
            continue
        assert costs[choice.engine] == min(costs)
        assert choice.num_matched == known[choice.engine]
        sent[choice.engine].append(tokens)


@given(loads=LOADS, tokens=st.lists(st.integers(0, 5), max_size=100))
def test_an_engine_that_must_not_be_chosen_is_not_even_with_the_whole_prompt(loads, tokens):
    router = CacheAwareRouter()
    for number in range(len(loads)):
        send(router, tokens, [0 if each == number else inf for each in range(len(loads))])
    choice = send(router, tokens, loads)
    assert (choice is None) == (min(loads) == inf)
    assert choice is None or loads[choice.engine] < inf


@given(
    prompts=st.lists(st.lists(st.integers(0, 9), max_size=200), max_size=30),
    max_prefixes=st.integers(1, 20),
)
def test_no_more_prefixes_are_kept_than_allowed_and_the_last_prompts_longest(prompts, max_prefixes):
    router = CacheAwareRouter(max_prefixes=max_prefixes)
    for tokens in prompts:
        send(router, tokens, [0])
        assert len(router._engines_by_prefix) <= max_prefixes
        again = send(router, tokens, [0])
        kept = min(len(tokens) // PREFIX_TOKENS, max_prefixes)
        assert again.num_matched == kept * PREFIX_TOKENS


def test_equal_engines_share_prompts_out():
    router = CacheAwareRouter()
    chosen = [send(router, [number] * 32, [0] * 4).engine for number in range(8)]
    assert chosen == [0, 1, 2, 3, 0, 1, 2, 3]


def test_requests_with_a_common_beginning_do_not_all_go_to_one_engine():
    router, loads = CacheAwareRouter(), [0, 0]
    for number in range(40):
        tokens = [7] * 512 + [number] * 20
        engine, num_matched = send(router, tokens, loads)
        loads[engine] += load_of(len(tokens) - num_matched)
    assert abs(loads[0] - loads[1]) < 1500


def test_prefixes_differ_by_all_tokens_before_and_by_the_salt():
    one, other = list(range(64)), [1, *range(1, 64)]
    assert [end for _, end in prefixes_of(one)] == [16, 32, 48, 64]
    assert list(prefixes_of(one)) == list(prefixes_of(one[:])) != list(prefixes_of(other))
    assert not {p for p, _ in prefixes_of(one)} & {p for p, _ in prefixes_of(other)}
    assert not {p for p, _ in prefixes_of(one)} & {p for p, _ in prefixes_of(one, "salt")}
    assert list(prefixes_of(one[:15])) == []


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_each_sequence_counts_as_well_as_the_prompt(num_sequences):
    assert load_of(100, num_sequences) == 100 + 128 * num_sequences
