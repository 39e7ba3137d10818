"""Which engine a prompt is sent to."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.fleet.router import ROUTING_POLICIES, Router, home_of
from protocol.cache_events import load_of

LOAD = st.one_of(st.integers(0, 5000), st.just(inf))
NAMES = [f"ipc:///run/{number}.sock" for number in range(5)]


@st.composite
def asked(draw):
    """Loads of some engines, what of a prompt each has, and its session's engine."""
    loads = draw(st.lists(LOAD, min_size=1, max_size=6))
    usable = [number for number, load in enumerate(loads) if load < inf]
    if not usable:
        return loads, {}, None
    matched = draw(st.dictionaries(st.sampled_from(usable), st.integers(1, 1000)))
    return loads, matched, draw(st.sampled_from([None, *usable]))


@pytest.mark.parametrize("policy", ROUTING_POLICIES)
@given(questions=st.lists(asked(), max_size=10))
def test_each_policy_chooses_what_it_promises_and_never_who_must_not_be_chosen(policy, questions):
    router = Router(policy)
    for loads, matched, home in questions:
        choice = router.choose(matched, 1000, loads, home)
        if min(loads) == inf:
            assert choice is None
            continue
        assert loads[choice.engine] < inf
        assert choice.num_matched == matched.get(choice.engine, 0)
        if policy == "session-sticky" and home is not None:
            assert choice.engine == home
        elif policy == "least-loaded":
            assert loads[choice.engine] == min(loads)
        else:
            costs = [load - 2 * matched.get(number, 0) for number, load in enumerate(loads)]
            assert costs[choice.engine] == min(costs)


def test_equal_engines_share_prompts_out():
    router = Router()
    chosen = [router.choose({}, 32, [0] * 4).engine for _ in range(8)]
    assert chosen == [0, 1, 2, 3, 0, 1, 2, 3]


def test_of_equal_engines_that_of_the_session_is_taken():
    router = Router()
    assert [router.choose({}, 32, [0] * 4, home=2).engine for _ in range(3)] == [2, 2, 2]
    assert router.choose({1: 16}, 32, [0] * 4, home=2).engine == 1


def test_requests_with_a_common_beginning_do_not_all_go_to_one_engine():
    router, loads, held = Router(), [0, 0], {}
    for _ in range(40):
        engine, num_matched = router.choose(held, 532, loads)
        loads[engine] += load_of(532 - num_matched)
        held[engine] = 512
    assert abs(loads[0] - loads[1]) < 1500


def test_a_session_has_one_engine_and_only_those_of_a_lost_engine_move():
    homes = {str(number): NAMES[home_of(str(number), NAMES)] for number in range(500)}
    assert set(homes.values()) == set(NAMES)
    left = NAMES[:2] + NAMES[3:]
    for session, name in homes.items():
        now = left[home_of(session, left)]
        assert now == name if name in left else now in left


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_each_sequence_counts_as_well_as_the_prompt(num_sequences):
    assert load_of(100, num_sequences) == 100 + 128 * num_sequences
