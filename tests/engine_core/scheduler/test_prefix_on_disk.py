"""Prompts that go on in blocks on disk: what plans ask of the disk, and who waits for it."""

from scenario_help import Scenario, blocks_of, fresh_tokens, make_request, num_found

from engine_core.kv_cache import DiskTier, KVCacheGroupSpec
from protocol.explanations import WaitReason


def make_tier(**limits):
    return DiskTier(**{"max_staged_blocks": 100, "max_saves": 100} | limits)


def computed(prompt, **options):
    """The tier after a request of this prompt was computed, and its blocks written."""
    tier = make_tier()
    scenario = Scenario(make_request("first", prompt, max_tokens=2, **options), disk=tier)
    scenario.step()
    plan = scenario.step()
    for key, _, _ in plan.copies.disk.save:
        tier.on_written(key, is_there=True)
    return tier


def restarted(tier, *requests, **options):
    """Another engine that finds the same blocks on its disk."""
    again = make_tier(max_staged_blocks=tier.max_staged_blocks)
    again.on_found(tier.known)
    return again, Scenario(*requests, disk=again, **options)


def asked_of(tier):
    keys, tier.to_read = tier.to_read, []
    return keys


def read(tier):
    for key in asked_of(tier):
        tier.on_read(key, b"contents")


def test_full_blocks_of_a_prompt_are_saved_in_the_step_after_the_one_that_computes_them():
    tier = make_tier()
    scenario = Scenario(make_request("a", 100), disk=tier)
    first = scenario.step()
    assert first.copies.disk is None
    save = scenario.step().copies.disk.save
    assert [index for _, index, _ in save] == list(range(6))
    assert [block for *_, block in save] == blocks_of(first, "a")[:6]
    assert scenario.step().copies.disk is None
    scenario.scheduler.check()


def test_of_the_states_of_a_prompt_only_checkpoints_are_saved():
    """Not the one that its second chunk starts from."""
    groups = (KVCacheGroupSpec(), KVCacheGroupSpec(2, is_sparse=True, pool=1))
    scenario = Scenario(
        make_request("a", 100),
        disk=make_tier(),
        groups=groups,
        num_blocks=[100, 20],
        max_num_batched_tokens=64,
    )
    saved = [scenario.step().copies.disk for _ in range(4)]
    moved = [(key[0], index) for moves in saved if moves for key, index, _ in moves.save]
    assert moved == [*((0, index) for index in range(6)), (1, 5)]


def test_short_prompts_and_blocks_filled_by_single_tokens_are_not_written():
    scenario = Scenario(make_request("a", 63), make_request("b", 79), disk=make_tier())
    scenario.step()
    assert len(scenario.step().copies.disk.save) == 4
    for _ in range(40):
        assert scenario.step().copies.disk is None


def test_an_answer_is_written_once_a_prompt_finds_it():
    tier = make_tier()
    prompt = fresh_tokens(64)
    scenario = Scenario(make_request("a", prompt, max_tokens=40), disk=tier)
    scenario.run_to_end()
    num_before = len(tier.saving)
    scenario.add(make_request("b", [*prompt, *[7] * 40, *fresh_tokens(10)]))
    scenario.step()
    scenario.step()
    assert (num_before, len(tier.saving)) == (4, 7)


def test_a_request_waits_for_the_disk_says_so_and_starts_with_what_was_read():
    prompt = fresh_tokens(100)
    tier, scenario = restarted(computed(prompt), make_request("a", prompt, max_tokens=3))
    plan = scenario.step()
    assert not plan.num_scheduled_tokens
    assert len(tier.to_read) == 6
    info = scenario.scheduler.explain("a")
    assert info.waits_for is WaitReason.DISK
    assert info.why == "6 blocks of its prompt are being read from disk"
    scenario.step()
    assert len(tier.to_read) == 6  # asked for once
    read(tier)
    plan = scenario.step()
    assert num_found(plan, "a") == 96
    assert plan.num_scheduled_tokens == {"a": 4}
    assert [block for _, block in plan.copies.disk.load] == blocks_of(plan, "a")[:6]
    assert scenario.scheduler.explain("a").cache_lookup.num_disk_tokens == 96
    statistics = scenario.scheduler.statistics()
    assert statistics.num_disk_cached_prompt_tokens == statistics.num_cached_prompt_tokens == 96
    assert statistics.num_disk_blocks == 6
    scenario.scheduler.check()


def test_running_requests_go_on_meanwhile():
    prompt = fresh_tokens(100)
    _, scenario = restarted(computed(prompt), make_request("other", 10))
    scenario.step()
    scenario.add(make_request("a", prompt))
    assert scenario.step().num_scheduled_tokens == {"other": 1}
    assert scenario.step().num_scheduled_tokens == {"other": 1}


def test_what_cannot_be_read_is_computed():
    prompt = fresh_tokens(100)
    tier, scenario = restarted(computed(prompt), make_request("a", prompt))
    scenario.step()
    for number, key in enumerate(asked_of(tier)):
        tier.on_read(key, None if number == 2 else b"contents")
    plan = scenario.step()
    assert num_found(plan, "a") == 32
    tier, scenario = restarted(computed(prompt), make_request("a", prompt))
    scenario.step()
    tier.give_up_reads()
    assert num_found(scenario.step(), "a") == 0


def test_a_request_has_no_more_from_disk_than_may_be_read_at_once():
    prompt = fresh_tokens(100)
    known = computed(prompt)
    known.max_staged_blocks = 4
    tier, scenario = restarted(known, make_request("a", prompt))
    scenario.step()
    read(tier)
    assert num_found(scenario.step(), "a") == 64


def test_another_salt_finds_nothing_on_disk():
    prompt = fresh_tokens(100)
    tier = computed(prompt, cache_salt="mine")
    _, scenario = restarted(tier, make_request("a", prompt))
    assert scenario.step().num_scheduled_tokens == {"a": 100}
    again, scenario = restarted(tier, make_request("a", prompt, cache_salt="mine"))
    scenario.step()
    assert len(again.to_read) == 6


def test_a_reset_forgets_the_disk_and_what_was_read():
    prompt = fresh_tokens(100)
    tier, scenario = restarted(computed(prompt), make_request("a", prompt))
    scenario.step()
    read(tier)
    assert scenario.scheduler.reset_prefix_cache() == 6
    plan = scenario.step()
    assert len(tier.to_delete) == 6
    assert num_found(plan, "a") == 0
    assert not tier.staged


def test_a_failed_step_that_loads_leaves_nothing_of_it_in_memory():
    prompt = fresh_tokens(100)
    tier, scenario = restarted(computed(prompt), make_request("a", prompt))
    scenario.step()
    read(tier)
    plan = scenario.plan()
    assert plan.copies.disk.load
    scenario.scheduler.discard_step(plan, "the step failed")
    assert scenario.kv_cache.num_blocks_cached == 0
    scenario.scheduler.check()


def test_a_request_that_leaves_while_it_waits_leaves_no_contents_behind():
    prompt = fresh_tokens(100)
    tier, scenario = restarted(computed(prompt), make_request("a", prompt))
    scenario.step()
    read(tier)
    scenario.abort("a")
    for _ in range(20):
        scenario.step()
    assert not tier.staged
    assert scenario.kv_cache.num_blocks_in_use == 0
