"""What a step costs, in lines of Python that run: no clock, so that it holds on any machine."""

import numpy as np
import pytest
from scenario_help import Scenario, make_request

from engine_core.scheduler import ModelRunnerOutput
from tests.engine_core.lines_run import lines_run


def decoding(num_running: int, **settings) -> Scenario:
    """That many requests, each some tokens away from its next block."""
    requests = [make_request(f"r{index}", 20) for index in range(num_running)]
    scenario = Scenario(*requests, **{"max_num_seqs": num_running, **settings})
    for _ in range(3):
        scenario.update_with_array(scenario.plan())
    assert scenario.counts[0] == num_running
    return scenario


def step(scenario: Scenario) -> None:
    """All running requests decode. Only the scheduler's calls: the outputs are not read."""
    plan = scenario.scheduler.schedule(now=scenario.now)
    sampled = np.full(len(plan.batch.req_ids), 7, dtype=np.int32)
    assert len(sampled) == scenario.counts[0]
    output = ModelRunnerOutput(req_ids=plan.batch.req_ids, sampled_token_ids=sampled)
    scenario.scheduler.update_from_output(plan, output, now=scenario.now)


@pytest.mark.parametrize("batching", ["mixed", "prefill-first"])
def test_a_step_costs_the_same_however_many_wait(batching):
    """Proves S104."""
    idle, busy = (decoding(4, batching=batching) for _ in range(2))
    busy.add(*[make_request(f"first{index}", 30) for index in range(2)])
    idle.add(*[make_request(f"first{index}", 30) for index in range(2)])
    busy.add(*[make_request(f"waits{index}", 30) for index in range(2000)])
    assert lines_run(lambda: step(busy)) == lines_run(lambda: step(idle))


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_adding_a_request_costs_no_more_than_the_logarithm_of_the_queue(policy):
    """Proves S042, S104."""
    costs = []
    for num_waiting in (10, 2_000):
        scenario = decoding(1, scheduling_policy=policy)
        scenario.add(*[make_request(f"waits{index}", 3) for index in range(num_waiting)])
        late = [make_request(f"late{index}", 3) for index in range(5)]
        costs.append(lines_run(lambda late=late, scenario=scenario: scenario.add(*late)))
    assert costs[1] <= 1.5 * costs[0]


def test_a_steady_decode_step_runs_no_python_a_sequence():
    """Eight times the sequences, the same lines; outputs leave as columns. Proves S104."""
    few, many = decoding(8), decoding(64)
    assert lines_run(lambda: step(many)) - lines_run(lambda: step(few)) < 64 - 8


@pytest.mark.parametrize(("policy", "most"), [("fcfs", 1.0), ("priority", 1.5)])
def test_taking_and_aborting_a_request_costs_no_more_than_the_logarithm_of_the_queue(policy, most):
    """As the advice on tuning says: a heap under priority. Proves S235."""
    costs = []
    for num_waiting in (20, 2_000):
        scenario = decoding(1, scheduling_policy=policy, max_num_seqs=8)
        scenario.add(*[make_request(f"waits{index}", 3) for index in range(num_waiting)])
        some = [f"waits{index}" for index in range(5, 15)]
        aborted = lines_run(lambda some=some, scenario=scenario: scenario.abort(*some))
        costs.append((aborted, lines_run(scenario.plan)))  # takes seven
    (few_aborted, few_taken), (many_aborted, many_taken) = costs
    assert many_aborted <= most * few_aborted
    assert many_taken <= most * few_taken
