"""Routers: where requests go, and what that does to the hit rate."""

import pytest
from simulation_parts import LinearStepModel, request, serve

from frontend.fleet.router import ROUTING_POLICIES
from scripts.simulator.fleet import make_router, round_robin
from scripts.traces.trace import Turn, shared_segment


def prompt(index, *shared, own=10, **more):
    context = tuple(shared_segment(identity, length) for identity, length in shared)
    return request(index, 0.0, own, 1, context=context, **more)


def test_round_robin_takes_turns():
    router = round_robin()
    assert [router(prompt(index), [0, 0, 0]) for index in range(5)] == [
        (each, 0) for each in (0, 1, 2, 0, 1)
    ]


def test_least_loaded_takes_the_fewest_tokens_wherever_the_prompt_is_cached():
    router = make_router("least-loaded", 0)
    assert router(prompt(0, (1, 500)), [5, 3, 3, 9]).engine == 1
    assert router(prompt(1, (1, 500)), [5, 4, 3, 9]).engine == 2


def test_random_is_a_function_of_the_seed_and_reaches_every_engine():
    chosen = [
        [make_router("random", seed)(prompt(0), [0] * 8) for _ in range(1)] for seed in (1, 1)
    ]
    assert chosen[0] == chosen[1]
    router = make_router("random", 1)
    assert {router(prompt(index), [0] * 8).engine for index in range(200)} == set(range(8))


def test_sticky_sends_a_session_to_one_engine_and_spreads_sessions():
    router, loads = make_router("session-sticky", 0), [0] * 10
    by_session = {
        session: {router(prompt(index, session=session), loads).engine for index in range(5)}
        for session in range(300)
    }
    assert all(len(engines) == 1 for engines in by_session.values())
    counts = [sum(engines == {engine} for engines in by_session.values()) for engine in range(10)]
    assert min(counts) > 10


def test_cache_aware_goes_where_the_prefix_was_sent():
    router = make_router("cache-aware", 0)
    first = router(prompt(0, (1, 500)), [0, 5, 5])
    assert first == (0, 0)
    assert router(prompt(1, (2, 500)), [9, 5, 0]) == (2, 0)

    assert router(prompt(2, (1, 500)), [50, 5, 0]) == (0, 496)  # in whole blocks
    assert router(prompt(3, (2, 500)), [0, 0, 50]) == (2, 496)
    assert router(prompt(4, (3, 500)), [50, 0, 9]) == (1, 0)


def test_routers_that_know_chats_find_their_turns_cached_and_others_do_not():
    chats = [
        request(
            10 * index, 0.1 * index, 64, 16, session=index, later_turns=(Turn(5.0, 16, 16),) * 3
        )
        for index in range(21)  # no multiple of the engines
    ]
    hits = {}
    for name in ("round-robin", "random", "cache-aware", "session-sticky"):
        run = serve(
            *chats,
            num_engines=8,
            router=make_router(name, 0),
            model=LinearStepModel(0.01, 0.0001),
        )
        assert run.metrics.num_finished == 21 * 4
        counts = [engine.statistics() for engine in run.engines]
        hits[name] = sum(one.num_cached_prompt_tokens for one in counts) / sum(
            one.num_prompt_tokens for one in counts
        )
        expected = run.fleet.expected_hit_rate
        knows = name in ROUTING_POLICIES  # answers too, as engines tell of their caches
        assert expected == (pytest.approx(hits[name], abs=0.02) if knows else 0)
    assert hits["session-sticky"] == pytest.approx(hits["cache-aware"], abs=0.1)
    assert min(hits["session-sticky"], hits["cache-aware"]) > 0.5
    assert max(hits["round-robin"], hits["random"]) < 0.6 * hits["cache-aware"]
