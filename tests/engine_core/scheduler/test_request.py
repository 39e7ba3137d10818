"""What a request accepts, and how it is made from a message."""

import pytest

from engine_core.scheduler import Request, RequestStatus
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

PARAMS = SamplingParams(max_tokens=4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": ""}, "request_id is empty"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ({"prompt_token_ids": [3, -1]}, "from -1 to 3"),
        ({"prompt_token_ids": [2**31]}, "2147483648"),
        ({"output_token_ids": [-5]}, "output_token_ids"),
        ({"sampling_params": None}, "sampling_params is None"),
    ],
)
def test_a_field_outside_its_limits_is_a_value_error(fields, message):
    """Proves S019, S022, S029."""
    good = {"request_id": "a", "prompt_token_ids": [1], "sampling_params": PARAMS}
    with pytest.raises(ValueError, match=message):
        Request(**{**good, **fields})


def test_a_request_is_made_from_a_message():
    """Proves S001, S030, S033."""
    message = EngineRequest(
        request_id="a",
        prompt_token_ids=[1, 2],
        sampling_params=PARAMS,
        output_token_ids=[3],
        cache_salt="s",
    )
    request = Request.from_engine_core_request(
        message, client_index=3, arrival_time=1.5, eos_token_ids=(9,)
    )
    assert request.all_token_ids == [1, 2, 3]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (2, 1)
    assert (request.client_index, request.arrival_time, request.cache_salt) == (3, 1.5, "s")
    assert request.status is RequestStatus.WAITING
    assert request.eos_token_ids == {9}
    request.sequences[0].append_output_token(5)
    assert request.all_token_ids == [1, 2, 3, 5]
    assert request.output_token_ids == [3, 5]
    assert message.output_token_ids == [3]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"num_sequences": 0}, "num_sequences"),
        ({"num_sequences": 2, "output_token_ids": [1]}, "output_token_ids"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, name):
    message = EngineRequest(request_id="a", prompt_token_ids=[1], sampling_params=PARAMS, **fields)
    with pytest.raises(ValueError, match=name):
        Request.from_engine_core_request(
            message, client_index=0, arrival_time=0.0, eos_token_ids=()
        )


def test_exactly_the_finished_states_are_finished():
    """Proves S010, S012, S013."""
    finished = {status.name for status in RequestStatus if status.is_finished}
    assert finished == {name for name in RequestStatus.__members__ if name.startswith("FINISHED")}
