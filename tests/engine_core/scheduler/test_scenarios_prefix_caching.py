"""The scenarios of vLLM's tests/v1/core/test_prefix_caching.py, through the scheduler."""

import pytest
from scenario_help import Scenario, blocks_of, fresh_tokens, make_request, new_ids, num_found

BLOCK = 16


def run_alone(scenario: Scenario, request_id: str, prompt, **options):
    """One prompt that ends with its first token; the plan that started it."""
    scenario.add(make_request(request_id, prompt, max_tokens=1, **options))
    plan = scenario.plan()
    assert new_ids(plan) == [request_id]
    scenario.update(plan)
    scenario.kv_cache.check()
    return plan


def test_a_common_prefix_is_shared_while_its_first_holder_runs():
    """Three full blocks in common, different ends. Proves S151, S158, S166, S167, S180."""
    common = fresh_tokens(3 * BLOCK)
    scenario = Scenario(make_request("first", common + fresh_tokens(7)))
    first = scenario.step()
    scenario.add(make_request("second", common + fresh_tokens(5)))
    second = scenario.step()
    assert num_found(first, "first") == 0
    assert num_found(second, "second") == 3 * BLOCK
    assert second.num_scheduled_tokens == {"first": 1, "second": 5}
    assert blocks_of(second, "second")[:3] == blocks_of(first, "first")[:3]
    assert blocks_of(second, "second")[3] != blocks_of(first, "first")[3]
    assert scenario.kv_cache.num_blocks_in_use == 5
    scenario.abort("first")
    assert scenario.kv_cache.num_blocks_in_use == 4
    assert scenario.step().num_scheduled_tokens == {"second": 1}


def test_a_prefix_outlives_its_holder_until_the_cache_is_reset():
    """Proves S160, S164, S167."""
    prompt = fresh_tokens(3 * BLOCK + 2)
    scenario = Scenario()
    first = run_alone(scenario, "first", prompt)
    assert scenario.kv_cache.num_blocks_in_use == 0
    assert scenario.kv_cache.num_blocks_cached == 3
    second = run_alone(scenario, "second", prompt)
    assert num_found(second, "second") == 3 * BLOCK
    assert blocks_of(second, "second")[:3] == blocks_of(first, "first")[:3]
    assert scenario.requests["second"].account.num_cached_tokens == 3 * BLOCK
    assert scenario.outputs["second"].num_cached_tokens == 3 * BLOCK
    assert scenario.scheduler.reset_prefix_cache() == 3
    assert num_found(run_alone(scenario, "third", prompt), "third") == 0


def test_a_conversation_finds_its_own_answer():
    """Blocks that filled while decoding. Proves S028, S161."""
    scenario = Scenario(make_request("turn1", 20, max_tokens=30))
    scenario.run_to_end()
    said = scenario.requests["turn1"].all_token_ids
    assert len(said) == 50
    # the last token was sampled and never computed: blocks 0..2 hold tokens 0..47
    plan = run_alone(scenario, "turn2", said + fresh_tokens(5))
    assert num_found(plan, "turn2") == 3 * BLOCK


def test_the_same_tokens_behind_others_are_not_the_same_block():
    """Proves S162."""
    block, other = fresh_tokens(BLOCK), fresh_tokens(BLOCK)
    scenario = Scenario()
    run_alone(scenario, "first", [*block, *other, 1])
    assert num_found(run_alone(scenario, "moved", [*other, *block, 1]), "moved") == 0
    assert num_found(run_alone(scenario, "repeated", [*block, *block, 1]), "repeated") == BLOCK


@pytest.mark.parametrize(
    ("first", "second", "num_expected"),
    [
        ({}, {}, 32),
        ({"cache_salt": "x"}, {"cache_salt": "x"}, 32),
        ({"cache_salt": "x"}, {"cache_salt": "y"}, 0),
        ({"cache_salt": "x"}, {}, 0),
        ({}, {"cache_salt": ""}, 0),
        ({"priority": 0, "client_index": 1}, {"client_index": 2}, 32),
    ],
)
def test_only_requests_of_the_same_salt_share(first, second, num_expected):
    """For any client. Proves S027, S152."""
    prompt = fresh_tokens(2 * BLOCK + 1)
    scenario = Scenario()
    run_alone(scenario, "first", prompt, **first)
    assert num_found(run_alone(scenario, "second", prompt, **second), "second") == num_expected


def test_empty_blocks_go_first_then_the_tail_of_what_was_released_longest_ago():
    """Ten blocks: five cached ones of `a` and five empty, seven wanted. Proves S165, S166."""
    prompt = fresh_tokens(5 * BLOCK + 1)
    scenario = Scenario(num_blocks=10)
    run_alone(scenario, "a", prompt)
    assert scenario.kv_cache.num_blocks_cached == 5
    run_alone(scenario, "b", 7 * BLOCK)
    # the two last blocks of `a` had to go; `b` leaves seven behind
    assert scenario.kv_cache.num_blocks_cached == 10
    plan = run_alone(scenario, "a again", prompt)
    assert num_found(plan, "a again") == 3 * BLOCK


def test_cached_blocks_that_a_prompt_finds_are_not_evicted_to_make_room_for_it():
    """All blocks are cached, three of them are the prompt's: the other three must go."""
    prompt = fresh_tokens(3 * BLOCK)
    scenario = Scenario(num_blocks=6)
    run_alone(scenario, "first", prompt)
    run_alone(scenario, "other", 3 * BLOCK)
    plan = run_alone(scenario, "long", prompt + fresh_tokens(3 * BLOCK))
    assert num_found(plan, "long") == 3 * BLOCK
    assert len(set(blocks_of(plan, "long"))) == 6


def test_a_prefix_is_found_in_part_when_its_tail_is_gone():
    """Longest prefix, no holes. Proves S162."""
    prompt = fresh_tokens(4 * BLOCK)
    scenario = Scenario()
    run_alone(scenario, "first", prompt)
    changed = [*prompt[: 2 * BLOCK], 1, *prompt[2 * BLOCK + 1 :], 9]
    assert num_found(run_alone(scenario, "changed", changed), "changed") == 2 * BLOCK
