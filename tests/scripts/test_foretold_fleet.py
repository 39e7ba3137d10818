"""A load test's requests, simulated on several engines with step times of a recorded one."""

import pytest

from frontend.load.workload import Arrivals, DatasetOptions, Workload
from scripts.benchmarks.fleet import foretold_run
from tests.frontend.simulator.recorded_runs import Asked, record_run


def test_the_same_requests_are_simulated_with_the_recorded_engines_settings(tmp_path):
    path = tmp_path / "steps.trace"
    record_run(path, [Asked(0.3 * number, 40, 10, shared=16) for number in range(30)])
    load = DatasetOptions(prefixes=4, prefix_len=128, input_len="16", output_len="8", seed=1)
    workload = Workload(
        options=load, units=range(100, 200), arrivals=Arrivals(rate=3.0), num_requests=60
    )
    aware, at_random = (foretold_run(path, workload, 2, name) for name in ("cache-aware", "random"))
    assert aware == foretold_run(path, workload, 2, "cache-aware")
    assert aware["num_requests"] == sum(aware["requests_an_engine"]) == 60
    # of 144 tokens 128 are shared
    assert 0.4 < aware["hit_rate"] <= (60 - 4) * 128 / (60 * 144)
    assert at_random["hit_rate"] < aware["hit_rate"]
    assert 0 < aware["ttft_p50_s"] <= aware["ttft_p99_s"]
    span_s = max(one.arrival_s for one in workload)
    assert aware["output_tokens_per_s"] == pytest.approx(60 * 8 / span_s, rel=0.2)
