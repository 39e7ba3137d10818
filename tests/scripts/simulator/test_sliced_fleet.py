"""A fleet that is simulated an engine at a time gives what the fleet of one heap gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_parts import ListedTrace, request

from engine_core.scheduler import SchedulerConfig
from scripts.simulator import sliced_fleet
from scripts.simulator.engine import CacheSize, SimulatedEngine
from scripts.simulator.errors import SimulationError
from scripts.simulator.fleet import Fleet
from scripts.simulator.request_metrics import RequestMetrics, ServiceTargets
from scripts.simulator.router_view import RouterView
from scripts.simulator.routing import make_router
from scripts.simulator.sliced_fleet import SlicedFleet
from scripts.simulator.step_work import LinearStepModel
from scripts.simulator.trace import shared_segment


def engines_of(num_engines, metrics, **config):
    model = LinearStepModel(0.1, 0.001)
    return [
        SimulatedEngine(
            SchedulerConfig(
                max_num_batched_tokens=100, max_num_seqs=4, max_model_len=1000, **config
            ),
            CacheSize(num_blocks=40, block_size=16).make(),
            model,
            metrics,
        )
        for _ in range(num_engines)
    ]


def outcome(make_fleet, requests, num_engines, router, **config):
    """All that a document is made of, in the order in which sums are added up."""
    metrics = RequestMetrics()
    engines = engines_of(num_engines, metrics, **config)
    fleet = make_fleet(engines, make_router(router, 3), metrics)
    fleet.run(ListedTrace(tuple(requests)))
    columns = metrics.figures("arrival", "ttft", "tpot", "longest_gap", "end_to_end")
    return (
        fleet.num_requests,
        fleet.finished_s,
        [column.tobytes() for column in columns],
        metrics.summary(1.0, ServiceTargets(ttft_s=1.0)),
        [engine.counters for engine in engines],
        [engine.statistics() for engine in engines],
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(1, 150),
            st.integers(1, 30),
            st.sampled_from([0.0, 0.0, 0.01, 0.1, 0.101, 0.7, 5.0]),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=40,
    ),
    num_engines=st.integers(1, 4),
    router_and_view=st.sampled_from(
        [("round-robin", 0.0), ("random", 0.0), ("sticky", 0.0)]
        + [(router, view) for router in ("least-loaded", "cache-aware") for view in (0.1, 0.33, 7)]
    ),
    routed_ahead=st.integers(1, 5),
    max_queued=st.sampled_from([None, 1]),
)
def test_slices_change_nothing(rows, num_engines, router_and_view, routed_ahead, max_queued):
    requests, arrival_s = [], 0.0
    for index, (num_prompt, num_output, gap_s, prefix) in enumerate(rows):
        arrival_s += gap_s
        context = (shared_segment(prefix, 40),) if prefix else ()
        requests.append(request(index, arrival_s, num_prompt, num_output, context=context))
    router, view_s = router_and_view

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliced_fleet, "_ROUTED_AN_ENGINE", routed_ahead)
        sliced = outcome(
            lambda engines, router, metrics: SlicedFleet(engines, router, metrics, view_s=view_s),
            requests,
            num_engines,
            router,
            max_queued_requests=max_queued,
        )
    whole = outcome(
        lambda engines, router, metrics: Fleet(engines, router, view_s=view_s),
        requests,
        num_engines,
        router,
        max_queued_requests=max_queued,
    )
    assert sliced == whole


@pytest.mark.parametrize("num_more", [0, 3])
def test_a_run_that_does_not_end_in_time_is_broken_off(num_more):
    def run(fleet_of):
        metrics = RequestMetrics()
        fleet = fleet_of(engines_of(2, metrics), make_router("round-robin", 0), metrics)
        late = [request(2 + index, 4.0, 10, 1) for index in range(num_more)]
        with pytest.raises(SimulationError) as caught:
            fleet.run(ListedTrace((request(0, 0.0, 10, 1), request(1, 0.0, 10, 50), *late)))
        return str(caught.value)

    sliced = run(
        lambda engines, router, metrics: SlicedFleet(engines, router, metrics, max_duration_s=3.0)
    )
    assert sliced == run(lambda engines, router, _: Fleet(engines, router, max_duration_s=3.0))
    assert "not over after 3.0 s" in sliced
    assert "1 requests live" in sliced


def test_a_router_knows_what_it_sent_and_what_it_saw_when_it_looked_last():
    view = RouterView(2, period_s=1.0)
    view.sent(0, 10)
    view.left(0, 10)
    view.look(0.9)
    assert view.loads == [10, 0]
    view.look(1.0)
    assert view.loads == [0, 0]
    view.sent(1, 5)
    assert view.loads == [0, 5]
    assert view.next_look_s == 2.0
    view.look(7.5)
    assert (view.last_look_s(7.5), view.next_look_s) == (7.0, 8.0)


def test_without_a_period_a_router_knows_all_at_once():
    view = RouterView(2)
    view.sent(0, 10)
    view.left(0, 4)
    assert view.loads == [6, 0]
    assert view.last_look_s(3.3) == 3.3


@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.05, 1 / 3, 0.007]))
def test_a_look_is_never_behind_the_moment_that_it_is_for(count, period_s):
    view = RouterView(1, period_s)
    for now_s in (count * period_s, count * period_s + period_s / 2):
        view.look(now_s)
        assert view.last_look_s(now_s) <= now_s < view.next_look_s
    assert view.last_look_s(count * period_s) == count * period_s
