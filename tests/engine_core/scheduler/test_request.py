"""What a request accepts, and how it is made from a message."""

import random

import pytest
from scenario_help import Scenario, make_request

from engine_core.scheduler import Request, RequestStatus
from protocol.requests import EngineRequest
from protocol.sampling import BeamSearchParams, SamplingParams
from tests.engine_core.new_request import new_request

PARAMS = SamplingParams(max_tokens=4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": ""}, "request_id is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ({"prompt_token_ids": [3, -1]}, "from -1 to 3"),
        ({"prompt_token_ids": [2**31]}, "2147483648"),
        ({"output_token_ids": [-5]}, "output_token_ids"),
        ({"prompt_token_ids": ["x"]}, "not a token id"),
        ({"num_sequences": 0}, "num_sequences is 0"),
        ({"num_sequences": -1}, "num_sequences is -1"),
        ({"num_sequences": 2, "output_token_ids": [1]}, "output_token_ids"),
        (
            {"num_sequences": 2, "beam_search": BeamSearchParams(beam_width=3)},
            "num_sequences is 2, the beam width 3",
        ),
    ],
)
def test_a_field_outside_its_limits_is_a_value_error(fields, message):
    """Proves S019, S022, S029."""
    good = {"request_id": "a", "prompt_token_ids": [1], "sampling_params": PARAMS}
    with pytest.raises(ValueError, match=message):
        new_request(**{**good, **fields})


def test_a_request_is_made_from_a_message():
    """Proves S001, S030, S033."""
    message = EngineRequest(
        request_id="a",
        prompt_token_ids=[1, 2],
        sampling_params=PARAMS,
        output_token_ids=[3],
        cache_salt="s",
    )
    request = Request(message, client_index=3, arrival_time=1.5, eos_token_ids=(9,))
    assert request.all_token_ids == [1, 2, 3]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (2, 1)
    assert (request.client_index, request.arrival_time, request.message.cache_salt) == (3, 1.5, "s")
    assert request.status is RequestStatus.WAITING
    assert request.eos_token_ids == {9}
    request.sequences[0].append_output_token(5)
    assert request.all_token_ids == [1, 2, 3, 5]
    assert request.output_token_ids == [3, 5]
    assert message.output_token_ids == [3]


def test_exactly_the_finished_states_are_finished():
    """Proves S012, S013."""
    finished = {status.name for status in RequestStatus if status.is_finished}
    assert finished == {name for name in RequestStatus.__members__ if name.startswith("FINISHED")}


UNFINISHED = {
    ("WAITING", "RUNNING"),
    ("RUNNING", "PREEMPTED"),
    ("RUNNING", "SWAPPED"),
    ("PREEMPTED", "RUNNING"),
    ("SWAPPED", "RUNNING"),
    ("SWAPPED", "PREEMPTED"),  # a failed step may have spoiled its copy
}


def test_only_the_legal_changes_of_status_happen_and_each_of_them_does(monkeypatch):
    """Random requests, aborts and failed steps on few blocks. Proves S010."""
    change, seen = Request.status.fset, set()

    def record(request, status):
        seen.add((request.status.name, status.name))
        change(request, status)

    monkeypatch.setattr(Request, "status", Request.status.setter(record))
    for seed in range(60):
        random_life(random.Random(seed), preemption_mode="recompute" if seed % 2 else "swap")
    endings = {(before, after) for before, after in seen if after.startswith("FINISHED")}
    assert seen - endings == UNFINISHED
    assert not {(before, after) for before, after in endings if before.startswith("FINISHED")}
    assert {before for before, _ in endings} == {"WAITING", "RUNNING", "PREEMPTED", "SWAPPED"}
    assert {("RUNNING", "FINISHED_STOPPED"), ("RUNNING", "FINISHED_LENGTH")} <= endings


def random_life(draw, preemption_mode):
    scenario = Scenario(
        num_blocks=14,
        num_host_blocks=14 if preemption_mode == "swap" else 0,
        block_size=4,
        max_num_seqs=5,
        max_model_len=60,
        preemption_mode=preemption_mode,
    )
    for number in range(12):
        scenario.add(
            make_request(
                f"r{number}",
                draw.randint(1, 30),
                max_tokens=draw.randint(1, 25),
                num_sequences=draw.choice([1, 1, 2]),
                eos_token_ids=[9],
            )
        )
    while scenario.scheduler.has_work():
        names = [name for name, each in scenario.requests.items() if not each.is_finished]
        if names and draw.random() < 0.05:
            scenario.abort(draw.choice(names))
        plan = scenario.plan()
        if draw.random() < 0.05:
            scenario.scheduler.discard_step(plan, "it failed")
        scenario.update_with_array(plan, draw.choice([7] * 20 + [9]))
