"""Routers: where requests go, and what that does to the hit rate."""

import pytest

from frontend.fleet.router import ROUTING_POLICIES
from frontend.load.traces.trace import Turn
from frontend.simulator.fleet import make_router
from tests.frontend.simulator.simulation_parts import LinearStepModel, request, serve


def engines_of(router, count, num_engines):
    return [router(request(at, 0.0, 10, 1), [0] * num_engines).engine for at in range(count)]


def test_round_robin_takes_turns():
    assert engines_of(make_router("round-robin", 0), 5, 3) == [0, 1, 2, 0, 1]


def test_random_is_a_function_of_the_seed_and_reaches_every_engine():
    chosen, again = (engines_of(make_router("random", 1), 200, 8) for _ in range(2))
    assert chosen == again
    assert set(chosen) == set(range(8))


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
