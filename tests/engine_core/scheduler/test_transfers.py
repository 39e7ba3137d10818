"""Requests whose prompts another engine has computed: who waits for the blocks, and what is
computed in the end."""

import pytest
from scenario_help import Scenario, fresh_tokens, make_request

from engine_core.kv_cache import DiskTier, Transfers
from protocol.explanations import WaitReason

SOURCE = "tcp://10.0.0.1:5700"


def make_tier():
    return DiskTier(max_staged_blocks=100, max_saves=0)


def scenario_of(*requests, **options):
    tier, transfers = make_tier(), Transfers()
    return Scenario(*requests, disk=tier, transfers=transfers, **options), tier, transfers


def arrive(tier, transfer, num_blocks):
    """The first of its blocks."""
    tier.on_found(transfer.keys[:num_blocks])


def read(tier):
    for key in tier.to_read:
        tier.on_read(key, b"contents")
    tier.to_read = []


def waits_for(scenario, name):
    return scenario.scheduler.explain(name).waits_for


@pytest.mark.parametrize("num_arrived", [0, 1, 5, 6])
def test_a_request_waits_for_its_blocks_and_computes_what_did_not_come(num_arrived):
    scenario, tier, transfers = scenario_of(make_request("a", 100, kv_source=SOURCE))
    assert not scenario.step().num_scheduled_tokens
    assert waits_for(scenario, "a") is WaitReason.TRANSFER
    (transfer,) = transfers.to_begin
    assert (transfer.source, len(transfer.keys)) == (SOURCE, 6)
    transfers.to_begin = []
    arrive(tier, transfer, num_arrived)
    assert not scenario.step().num_scheduled_tokens  # it waits for the rest
    transfers.end(transfer)
    if num_arrived:
        assert not scenario.step().num_scheduled_tokens
        read(tier)
    plan = scenario.step()
    assert plan.num_scheduled_tokens == {"a": 100 - 16 * num_arrived}
    moves = plan.copies.disk
    loaded = [] if moves is None else [key for key, _ in moves.load]
    assert loaded == transfer.keys[:num_arrived]
    assert not transfers.to_begin
    scenario.scheduler.check()
    scenario.run_to_end()


def test_others_pass_a_request_that_waits():
    first, second = (make_request(name, 100, kv_source=SOURCE) for name in "ab")
    scenario, _, transfers = scenario_of(first, second, make_request("c", 40))
    assert scenario.step().num_scheduled_tokens == {"c": 40}
    assert len(transfers.to_begin) == transfers.num_under_way == 2
    of_a, of_b = transfers.to_begin
    transfers.end(of_b)
    assert scenario.step().num_scheduled_tokens == {"c": 1, "b": 100}
    transfers.end(of_a)
    assert scenario.step().num_scheduled_tokens == {"c": 1, "b": 1, "a": 100}
    assert transfers.num_under_way == 0


def test_what_is_cached_is_not_fetched():
    prompt = fresh_tokens(100)
    scenario, _, transfers = scenario_of(make_request("a", prompt))
    scenario.step()
    longer = prompt + fresh_tokens(60)
    scenario.add(
        make_request("same", prompt, kv_source=SOURCE),
        make_request("longer", longer, kv_source=SOURCE),
    )
    assert scenario.step().num_scheduled_tokens == {"a": 1, "same": 4}
    assert [len(each.keys) for each in transfers.to_begin] == [3]


def test_only_blocks_of_the_prompt_are_fetched_when_a_stream_is_resumed():
    request = make_request("a", 50, kv_source=SOURCE)
    request.sequences[0].set_output([7] * 40)
    scenario, _, transfers = scenario_of(request)
    scenario.step()
    assert [len(each.keys) for each in transfers.to_begin] == [3]


def test_a_request_that_was_aborted_or_is_out_of_time_does_not_hold_up_its_transfer():
    scenario, tier, transfers = scenario_of(
        make_request("a", 100, kv_source=SOURCE), make_request("b", 100, kv_source=SOURCE)
    )
    scenario.step()
    of_a, of_b = transfers.to_begin
    scenario.abort("a")
    arrive(tier, of_a, 6)
    transfers.end(of_a)
    transfers.end(of_b)
    assert scenario.step().num_scheduled_tokens == {"b": 100}
    scenario.scheduler.check()


def test_other_salts_have_other_blocks():
    prompt = fresh_tokens(100)
    scenario, _, transfers = scenario_of(
        *(
            make_request(name, prompt, kv_source=SOURCE, cache_salt=salt)
            for name, salt in (("a", None), ("b", "red"), ("c", "blue"))
        )
    )
    scenario.step()
    keys = [key for each in transfers.to_begin for key in each.keys]
    assert len(set(keys)) == len(keys) == 18
