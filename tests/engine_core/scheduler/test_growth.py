"""A step does not get dearer by what it does not change. Counted in lines of Python and in elements
of arrays, not in time. Proves S104."""

import random

import numpy as np
import pytest
from scenario_help import Scenario, make_request
from test_scenarios_cost import decoding, step

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler.batch_state import BatchState
from engine_core.scheduler.in_flight import RowSnapshot
from engine_core.scheduler.outputs import OutputCollector
from engine_core.scheduler.plan_builder import PlanBuilder
from engine_core.scheduler.request import Sequence
from tests.engine_core.lines_run import lines_run


class Counted(np.ndarray):
    """Counts the elements that go into operations on arrays of this kind."""

    num_elements = 0

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        arrays = [np.asarray(each).view(np.ndarray) for each in inputs]
        Counted.num_elements += max(each.size for each in arrays)
        return np.asarray(getattr(ufunc, method)(*arrays, **options)).view(Counted)

    def __getitem__(self, key):
        found = super().__getitem__(key)
        Counted.num_elements += np.size(found)
        return found


def elements_of(work) -> int:
    before = Counted.num_elements
    work()
    return Counted.num_elements - before


def waits_for_blocks(num_cached_blocks: int) -> Scenario:
    """A request of which so many blocks are cached waits beside one that runs."""
    size = num_cached_blocks * 4
    scenario = Scenario(
        make_request("first", [1] * size, max_tokens=1),
        num_blocks=num_cached_blocks + 20,
        block_size=4,
        max_model_len=2 * size + 400,
        max_num_batched_tokens=2 * size + 400,
    )
    scenario.run_to_end()
    scenario.add(make_request("runs", 30, max_tokens=200))
    scenario.step()
    num_free = scenario.scheduler.pool.kv_cache.num_blocks_free
    scenario.add(make_request("waits", [1] * size + [2] * (4 * (num_free + 2) - size)))
    scenario.step()
    scenario.step()
    return scenario


def test_a_request_without_room_is_not_looked_up_in_every_step():
    costs = []
    for num_cached_blocks in (8, 800):
        scenario = waits_for_blocks(num_cached_blocks)
        costs.append(lines_run(scenario.step))
        assert scenario.counts == (1, 1)
    assert costs[0] == costs[1]


def test_it_starts_as_soon_as_there_is_room():
    scenario = waits_for_blocks(16)
    scenario.abort("runs")
    plan = scenario.step()
    assert [new.req_id for new in plan.scheduled_new_reqs] == ["waits"]


@pytest.mark.parametrize("seed", range(6))
def test_plans_are_those_of_a_look_up_in_every_step(seed, monkeypatch):
    """Few tokens in few blocks: prompts share blocks, evict each other's, wait and come back."""

    def plans():
        chance = random.Random(seed)
        scenario = Scenario(num_blocks=24, block_size=2, max_num_seqs=5, max_model_len=60)
        for number in range(120):
            if chance.random() < 0.5:
                prompt = [chance.randrange(2) for _ in range(chance.randint(1, 30))]
                most = chance.randint(1, 12)
                scenario.add(make_request(f"r{number}", prompt, max_tokens=most))
            plan = scenario.plan()
            yield plan.num_scheduled_tokens, [new.req_id for new in plan.scheduled_new_reqs]
            scenario.update_with_array(plan, chance.randrange(2))
            scenario.scheduler.check()

    with_memory = list(plans())
    monkeypatch.setattr(KVCacheManager, "still_lacks_blocks", lambda *_: False)
    assert with_memory == list(plans())
    assert any(started for _, started in with_memory[40:])


def test_a_request_that_comes_and_one_that_ends_cost_no_python_for_each_that_runs():
    costs = []
    for num_running in (8, 64):
        scenario = decoding(num_running)
        scenario.abort("r3")
        costs.append(lines_run(lambda scenario=scenario: step(scenario)))
    assert costs[0] == costs[1]


def test_many_decodes_that_need_blocks_cost_less_than_each_alone():
    costs = {}
    for num_running in (1, 33):
        scenario = decoding(num_running, block_size=16, num_blocks=4 * num_running)
        for _ in range(10):
            step(scenario)
        costs[num_running] = lines_run(lambda scenario=scenario: step(scenario))
        assert scenario.scheduler.pool.kv_cache.num_blocks_in_use == 3 * num_running
    assert (costs[33] - costs[1]) / 32 < 60  # 156 for one by one


def test_outputs_of_many_clients_take_each_row_a_few_times():
    batch = BatchState(max_num_rows=256, max_model_len=8)
    batch.client_index[:] = np.arange(256)
    batch.client_index = batch.client_index.view(Counted)
    rows, tokens = np.arange(256), np.zeros(256, np.int32)
    collector = OutputCollector(batch)
    assert elements_of(lambda: collector.add_tokens(rows, tokens)) < 16 * 256
    outputs = collector.drain(0)
    assert sorted(outputs) == list(range(256))
    assert {len(own.decoded.request_ids) for own in outputs.values()} == {1}


def test_each_client_gets_its_tokens_in_the_order_of_the_batch():
    batch = BatchState(max_num_rows=7, max_model_len=8)
    batch.client_index[:] = [5, 0, 5, 9, 0, 5, 5]
    for row in range(7):
        batch.request_ids[row] = f"r{row}"
    collector = OutputCollector(batch)
    collector.add_tokens(np.array([6, 4, 3, 1, 0, 2]), np.arange(6, dtype=np.int32))
    found = {
        client: (own.decoded.request_ids, np.frombuffer(own.decoded.token_ids, "<i4").tolist())
        for client, own in collector.drain(0).items()
    }
    assert found == {
        0: (["r4", "r1"], [1, 3]),
        5: (["r6", "r0", "r2"], [0, 4, 5]),
        9: (["r3"], [2]),
    }


def sequences_of(num_rows: int) -> list[Sequence]:
    sequences = [make_request(f"r{row}", 4).sequences[0] for row in range(num_rows)]
    for row, sequence in enumerate(sequences):
        sequence.row = row
    return sequences


def test_finding_every_sequence_in_a_step_takes_each_row_a_few_times():
    batch, rows = BatchState(256, 8), np.arange(256)[::-1].copy()
    snapshot = RowSnapshot(batch, rows)
    snapshot.rows = rows.view(Counted)
    sequences = sequences_of(256)
    found = []
    assert elements_of(lambda: found.extend(map(snapshot.position_of, sequences))) < 8 * 256
    assert found == list(range(255, -1, -1))


def test_asking_whether_each_sequence_is_in_the_plan_takes_each_row_a_few_times():
    plan = PlanBuilder(BatchState(512, 8), token_budget=512, step_id=0, now=0.0)
    plan.add_rows(np.arange(256).view(Counted), np.ones(256, np.int32))
    first, *others = sequences_of(512)
    found = []

    def ask():
        for sequence in others[255:]:
            found.append(plan.is_scheduled(sequence))
            plan.add_sequence(sequence, 1)
            found.append(plan.is_scheduled(sequence))

    assert elements_of(ask) < 8 * 256
    assert found == [False, True] * 256
    first.request.sequences[0] = first
    plan.drop(first.request)
    assert not plan.is_scheduled(first)


def test_statistics_cost_the_same_however_many_wait():
    costs = []
    for num_waiting in (3, 300):
        scenario = decoding(4)
        scenario.now += 5.0
        for number in range(num_waiting):
            adapter = "one" if number % 3 else None
            scenario.add(make_request(f"waits{number}", 3, adapter=adapter))
        scenario.now += 2.0
        scenario.scheduler.pool.now = scenario.now
        costs.append(lines_run(scenario.scheduler.statistics))
        found = scenario.scheduler.statistics()
        assert found.num_waiting == num_waiting
        assert found.num_waiting_by_adapter == {"one": num_waiting - (num_waiting + 2) // 3}
    assert abs(costs[0] - costs[1]) < 8
