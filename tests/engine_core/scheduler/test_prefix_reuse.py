"""The decided rules of shared blocks as plans show them: the last token of a cached prompt, blocks
in common, samples that copy before they write, equal blocks that become one."""

import pytest
from scenario_help import Scenario, blocks_of, fresh_tokens, make_request, num_found

from tests.engine_core.scheduler.vllm_names import num_common_prefix_blocks


@pytest.mark.parametrize(("num_prompt", "num_reused"), [(31, 16), (32, 16), (33, 32)])
def test_at_least_one_token_of_a_cached_prompt_is_computed(num_prompt, num_reused):
    """Its logits give the first new one. Proves S088, S180."""
    prompt = fresh_tokens(num_prompt)
    scenario = Scenario(make_request("a", prompt, max_tokens=20))
    scenario.run_to_end()
    scenario.add(make_request("b", prompt))
    plan = scenario.step()
    assert num_found(plan, "b") == num_reused
    assert plan.num_scheduled_tokens == {"b": num_prompt - num_reused}
    assert scenario.outputs["b"].new_token_ids == [7]


def num_common(scenario):
    return num_common_prefix_blocks(scenario.kv_cache, scenario.requests.values())


def test_blocks_in_common_are_those_that_every_running_sequence_holds():
    """Computed afresh for each plan. Proves S222."""
    prefix = fresh_tokens(48)
    scenario = Scenario(make_request("a", [*prefix, 1]), make_request("b", [*prefix, 2]))
    scenario.step()
    assert num_common(scenario) == [3]
    scenario.add(make_request("c", [*prefix[:16], *fresh_tokens(20)]))
    scenario.step()
    assert num_common(scenario) == [1]
    scenario.add(make_request("d", 20))
    scenario.step()
    assert num_common(scenario) == [0]
    scenario.abort("c", "d")
    scenario.step()
    assert num_common(scenario) == [3]
    scenario.abort("b")
    scenario.step()
    assert num_common(scenario) == [0]  # one alone shares nothing


@pytest.mark.parametrize("num_sequences", [2, 4])
def test_samples_share_the_whole_prompt_and_copy_its_last_block_before_they_write(num_sequences):
    """20 tokens, blocks of 16: the partly filled block is copied for all writers but one, in the
    step that writes. Proves S130, S163, S181."""
    request = make_request("r", 20, num_sequences=num_sequences)
    scenario = Scenario(request)
    first = scenario.plan()
    head, tail = blocks_of(first, "r")
    scenario.update_with_array(first)
    assert scenario.kv_cache.num_blocks_in_use == 2
    assert scenario.kv_cache.num_shared_references == 2 * (num_sequences - 1)
    plan = scenario.plan()
    tables = [scenario.kv_cache.block_ids(sequence)[0] for sequence in request.sequences]
    assert [table[0] for table in tables] == [head] * num_sequences
    assert len({table[1] for table in tables}) == num_sequences
    targets = {target for _, target in plan.copies.copy}
    assert {source for source, _ in plan.copies.copy} == {tail}
    assert targets | {tail} == {table[1] for table in tables}
    assert scenario.kv_cache.num_blocks_in_use == 1 + num_sequences
    scenario.scheduler.check()


def test_two_requests_of_one_prompt_share_its_full_blocks_only():
    """Proves S163, S180."""
    prompt = fresh_tokens(20)
    scenario = Scenario(make_request("a", prompt), make_request("b", prompt))
    plan = scenario.plan()
    assert plan.num_scheduled_tokens == {"a": 20, "b": 4}
    (head, tail), (other_head, other_tail) = blocks_of(plan, "a"), blocks_of(plan, "b")
    assert head == other_head
    assert tail != other_tail
    assert plan.copies.is_empty


def test_the_runner_gets_the_known_block_in_the_step_that_gives_the_private_one_back():
    """Proves S169."""
    prompt = fresh_tokens(14)
    scenario = Scenario(*[make_request(name, prompt) for name in "ab"], num_blocks=4)
    scenario.step()
    for _ in range(4):
        if scenario.scheduler.statistics().num_deduplicated_blocks:
            break
        (private,) = scenario.kv_cache.block_ids(scenario.requests["b"].sequences[0])[0]
        plan = scenario.plan()
        updates = {update.req_id: update for update in plan.block_updates}
        scenario.update(plan)
    (known, _) = scenario.kv_cache.block_ids(scenario.requests["a"].sequences[0])[0]
    assert updates["b"].start == 0
    assert updates["b"].block_ids[0][0] == known != private
    assert scenario.kv_cache.num_blocks_in_use == 3
    scenario.kv_cache.check()
