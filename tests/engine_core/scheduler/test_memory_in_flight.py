"""Blocks with a step in flight: who gives way, what can be found, what a fault leaves behind.

Proves S092.
"""

import pytest
from driving import make_request
from oracle import beam_answer
from paged_device import PagedDevice
from paged_model import PagedModel
from steps_driver import EMPTY, EOS, Flight, batch_of

from engine_core.kv_cache import KVCacheGroupSpec, KVCacheManager
from engine_core.scheduler import (
    ModelRunnerOutput,
    SchedulerConfig,
)
from engine_core.scheduler.preemption import PreemptionMode, PreemptionRule
from engine_core.startup.scheduler import build_scheduler
from protocol.sampling import BeamSearchParams, SamplingParams
from tests.engine_core.new_request import new_request
from tests.protocol.all_outputs import all_outputs


@pytest.mark.parametrize("mode", PreemptionMode)
def test_a_request_preempted_in_flight_loses_that_token_and_samples_it_again(mode):
    flight = Flight(
        make_request("a", 4, max_tokens=4),
        b := make_request("b", 2, max_tokens=5),
        num_blocks=2,
        num_host_blocks=4,
        preemption_rule=PreemptionRule(mode),
    )
    first, second = flight.plan(), flight.plan()
    assert batch_of(second) == {"b": (2, 1)}  # for the other there is no block
    flight.update(first, b=50)
    third = flight.plan()
    assert (batch_of(third), third.preempted_req_ids) == ({"a": (4, 1)}, ["b"])
    assert b.num_computed_tokens == (2 if mode is PreemptionMode.SWAP else 0)
    flight.update(second, b=51)
    assert b.output_token_ids == [50]
    plans = [third]
    while not b.is_finished:
        plans.append(flight.plan())
        flight.update(plans.pop(0), b=50 + b.num_output_tokens)
    assert b.output_token_ids == [50, 51, 52, 53, 54]
    assert flight.scheduler.statistics().num_preemptions_by_swap == (mode is PreemptionMode.SWAP)


def test_beams_that_come_back_apart_go_on_together():
    """Computed again under prefill-first, one beam has a token left and the others several: they
    are planned in different steps, and none goes on before all have a result."""
    max_model_len, max_num_seqs = 40, 3
    config = SchedulerConfig(
        max_num_batched_tokens=16,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        scheduling_policy="priority",
        batching="prefill-first",
        max_steps_in_flight=2,
    )
    groups = (KVCacheGroupSpec(),)
    model = PagedModel(groups, 40, 4)
    device = PagedDevice(model, 2, has_columns=True)
    scheduler = build_scheduler(config, KVCacheManager(num_blocks=40, block_size=4))
    beam_search = BeamSearchParams(beam_width=max_num_seqs, early_stopping=True)
    beams = new_request(
        request_id="beams",
        prompt_token_ids=[1, 2, 3, 4, 1],
        sampling_params=SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True),
        num_sequences=max_num_seqs,
        beam_search=beam_search,
        priority=3,
    )
    expected = beam_answer(beams, beam_search, max_model_len)
    received = {}
    model.salts = {"beams": None, "urgent": None}
    scheduler.add_request(beams)
    for number in range(80):
        if number == 12:
            scheduler.add_request(make_request("urgent", [2, 2], max_tokens=2))
        device.launch(scheduler.schedule(float(number)))
        scheduler.check()
        for (plan,), sampled in device.collect():
            for outputs in scheduler.update_from_output(plan, sampled).values():
                received |= {(o.request_id, o.index): o.new_token_ids for o in all_outputs(outputs)}
            scheduler.check()
    assert beams.account.preemptions
    assert [received["beams", index] for index in range(max_num_seqs)] == expected
    assert not scheduler.has_work()


def test_a_block_is_found_from_the_moment_that_its_tokens_are_known():
    """Block 0 is full with the first output token, which the first step samples and the second
    computes."""
    flight = Flight(make_request("a", [1, 2, 3], max_tokens=20))
    first = flight.plan()
    flight.add(make_request("b", [1, 2, 3, 7, 5]))
    second = flight.plan()
    assert batch_of(second) == {"a": (3, 1), "b": (0, 5)}
    flight.update(first, a=7)
    flight.add(make_request("c", [1, 2, 3, 7, 5]))
    third = flight.plan()
    # the step that fills it still runs, and this one runs behind it
    assert batch_of(third)["c"] == (4, 1)
    flight.update(second)
    flight.update(third)


def test_what_is_computed_in_vain_is_never_found():
    flight = Flight(make_request("a", [1, 2, 3], eos_token_ids=[EOS], max_tokens=20))
    first, second = flight.plan(), flight.plan()  # the second one fills block 0 with EOS
    flight.update(first, a=EOS)
    assert flight.scheduler.statistics().num_blocks_cached == 0
    flight.add(make_request("b", [1, 2, 3, EOS, 5]))
    assert batch_of(flight.plan()) == {"b": (0, 5)}
    flight.update(second)


# ---------------------------------------------------------------------- faults


def test_a_discarded_step_voids_those_behind_it_too_and_nothing_of_them_is_found():
    prompt = list(range(10, 22))
    flight = Flight(make_request("a", prompt), make_request("waits", 30), budget=8, max_num_seqs=2)
    first = flight.plan()
    flight.add(make_request("c", prompt))
    second = flight.plan()
    assert (list(batch_of(first)), list(batch_of(second))) == (["a"], ["a", "waits"])
    flight.scheduler.discard_step(first, "the device is gone")
    for plan in (first, second):
        flight.collect(flight.scheduler.update_from_output(plan, EMPTY))
        assert flight.outputs == []
    assert flight.scheduler.get_request_counts() == (0, 3)
    assert batch_of(flight.plan()) == {"a": (0, 8)}, "the suspect, from its beginning"


def test_a_failed_request_ends_alone_while_its_next_token_is_in_flight():
    flight = Flight(make_request("a", 3), make_request("b", 3))
    first, second = flight.plan(), flight.plan()
    output = ModelRunnerOutput(
        req_ids=["a", "b"], sampled_token_ids=[[], [5]], failures={"a": "logits are NaN"}
    )
    flight.collect(flight.scheduler.update_from_output(first, output))
    assert [(o.request_id, o.detail) for o in flight.outputs] == [
        ("a", "logits are NaN"),
        ("b", None),
    ]
    output = ModelRunnerOutput(
        req_ids=["a", "b"], sampled_token_ids=[[], [6]], failures={"a": "logits are NaN"}
    )
    flight.collect(flight.scheduler.update_from_output(second, output))
    assert [(o.request_id, o.new_token_ids) for o in flight.outputs] == [("b", [6])]
