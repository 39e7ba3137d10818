"""A bounded queue: what it refuses, and what it takes in any case."""

import pytest
from scenario_help import Scenario, make_request

from engine_core.scheduler import QueueFull


def prompts(*names, **fields):
    return [make_request(name, 10, **fields) for name in names]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_queued_requests": 2}, r"2 requests of 20 tokens wait and 0 run, the limit is 2 req"),
        ({"max_queued_tokens": 29}, r"the limit is 29 tokens \(--max-queued-tokens\); try again"),
    ],
)
def test_a_full_queue_refuses_a_new_request_and_counts_it(settings, words):
    scenario = Scenario(*prompts("a", "b"), **settings)
    with pytest.raises(QueueFull, match=words):
        scenario.add(*prompts("c"))
    assert scenario.scheduler.statistics().num_refused == 1
    assert scenario.counts == (0, 2)
    scenario.step()
    scenario.add(*prompts("d"))


@pytest.mark.parametrize("settings", [{"max_queued_requests": 3}, {"max_queued_tokens": 30}])
def test_a_queue_is_filled_up_to_its_limit(settings):
    scenario = Scenario(*prompts("a", "b", "c"), **settings)
    assert scenario.counts == (0, 3)


@pytest.mark.parametrize("settings", [{"max_queued_requests": 2}, {"max_queued_tokens": 29}])
def test_a_resumed_request_is_taken_by_a_full_queue_and_counts_for_new_ones(settings):
    """Streams that an engine had taken go on after its restart, however many they are."""
    scenario = Scenario(*prompts("a", "b", "c", "d", is_resumed=True), **settings)
    assert scenario.counts == (0, 4)
    with pytest.raises(QueueFull, match="4 requests of 40 tokens wait"):
        scenario.add(*prompts("new"))


def test_an_empty_queue_takes_a_prompt_longer_than_its_limit():
    scenario = Scenario(*prompts("a"), max_queued_tokens=5)
    assert scenario.counts == (0, 1)
