"""Models whose layers keep a state: each pool is asked, and requests start from common states."""

import random

import hypothesis.strategies as st
import pytest
from driving import Drive, make_request, make_scheduler
from hypothesis import given, settings
from paged_device import PagedDevice
from paged_model import PagedModel

from engine_core.kv_cache import KVCacheGroupSpec
from engine_core.scheduler import RequestStatus
from protocol.explanations import LookupEnd, WaitReason
from tests.profiles import examples

STATE = KVCacheGroupSpec(2, is_sparse=True, pool=1)
GROUPS = (KVCacheGroupSpec(), STATE)


@pytest.mark.parametrize(("num_states", "is_admitted"), [(4, False), (8, True)])
def test_a_request_waits_for_the_pool_that_lacks_blocks(num_states, is_admitted):
    """Each of two prompts of 16 tokens holds at most four states."""
    a, b = make_request("a", 16), make_request("b", 16)
    scheduler = make_scheduler(num_blocks=[40, num_states], groups=GROUPS)
    drive = Drive(scheduler, a, b)
    drive.step()
    assert a.status is RequestStatus.RUNNING
    assert (b.status is RequestStatus.RUNNING) == is_admitted
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    drive.step()
    assert b.status is RequestStatus.RUNNING
    scheduler.check()


def test_a_request_that_no_pool_alone_holds_is_refused_with_its_numbers():
    request = make_request("a", 60)
    drive = Drive(make_scheduler(num_blocks=[4, 40], groups=GROUPS), request)
    drive.step()
    assert request.status is RequestStatus.FINISHED_IGNORED
    assert "shorten the prompt or raise --num-blocks" in drive.outputs[0].detail


COMMON = list(range(1, 1001))


def found_by(drive, steps=12):
    """Tokens that each request found, by name, and the step in which it started."""
    found = {}
    for step in range(steps):
        for new in drive.step().scheduled_new_reqs:
            found[new.req_id] = (new.num_computed_tokens, step)
        drive.scheduler.check()
    return found


def prompts(common=COMMON, number=8):
    return [
        make_request(f"r{n}", [*common, *range(9000 + 50 * n, 9030 + n)]) for n in range(number)
    ]


def roomy(**options):
    sizes = {"num_blocks": [900, 80], "block_size": 16, "max_model_len": 2048, "max_num_seqs": 16}
    return make_scheduler(groups=GROUPS, **sizes | options)


@pytest.mark.parametrize("chunk", [None, 512, 100])
def test_of_prompts_that_come_at_once_one_computes_what_they_share(chunk):
    """The others start in the very step that has its last chunk of that."""
    drive = Drive(roomy(budget=4096, max_chunk_size=chunk), *prompts())
    found, last = found_by(drive), -(-992 // (chunk or 4096)) - 1
    assert found.pop("r0") == (0, 0)
    assert found == {f"r{n}": (992, last) for n in range(1, 8)}
    assert drive.scheduler.explain("r3").waits_for is None


@pytest.mark.parametrize("chunk", [None, 512, 100])
def test_on_a_device_without_order_they_start_a_step_later_and_others_pass(chunk):
    scheduler = roomy(budget=4096, max_chunk_size=chunk, computes_in_order=False)
    drive = Drive(scheduler, *prompts(number=4), make_request("other", [5] * 40))
    found, last = found_by(drive), -(-992 // (chunk or 4096)) - 1
    assert (found.pop("r0"), found.pop("other")) == ((0, 0), (0, 0))
    assert found == {f"r{n}": (992, last + 1) for n in range(1, 4)}


@pytest.mark.parametrize("depth", [1, 2])
@settings(deadline=None, max_examples=examples(40))
@given(seed=st.integers(0, 2**32 - 1))
def test_on_a_device_without_order_none_starts_from_what_its_own_step_computes(depth, seed):
    """Prompts of common beginnings, some with samples, in few blocks; the model asserts each read.
    Swapped, preempted and forked sequences are among them, and prompts in chunks."""
    draw = random.Random(seed)
    size, groups = draw.choice([1, 2, 4]), [KVCacheGroupSpec(), STATE]
    sizes, host = [draw.randint(90, 300) // size, draw.randint(14, 60)], draw.choice([0, 40])
    scheduler = make_scheduler(
        num_blocks=sizes,
        block_size=size,
        groups=groups,
        num_host_blocks=host,
        budget=draw.choice([16, 40, 90]),
        max_chunk_size=draw.choice([None, 5, 16]),
        preemption_mode=draw.choice(["recompute", "swap" if host else "recompute"]),
        max_steps_in_flight=depth,
        computes_in_order=False,
    )
    model = PagedModel(groups, sum(sizes), size, 2 * host, computes_in_order=False)
    device, stems, names = PagedDevice(model, depth), [[1] * 30, [1] * 17 + [2] * 20], range(14)
    for name in map(str, names):
        stem = draw.choice(stems)[: draw.choice([8, 16, 17, 20, 30, 37])]
        tokens = stem + [draw.randint(1, 4) for _ in range(draw.randint(1, 9))]
        number, model.salts[name] = draw.choice([1, 1, 1, 3]), None
        options = {"temperature": 1.0, "seed": 3} if number > 1 else {}
        request = make_request(name, tokens, max_tokens=9, num_sequences=number, **options)
        scheduler.add_request(request)
        for _ in range(draw.choice([0, 0, 0, 1, 3])):
            take_a_step(scheduler, device)
    for _ in range(2000):
        if not scheduler.has_work() and not device:
            break
        take_a_step(scheduler, device)
    assert sum(scheduler.statistics().num_finished.values()) == len(names)


def take_a_step(scheduler, device):
    device.launch(scheduler.schedule(now=0.0))
    for (plan,), sampled in device.collect():
        scheduler.update_from_output(plan, sampled, now=0.0)
    scheduler.check()


def test_of_prompts_that_wait_each_says_for_whom():
    drive = Drive(roomy(budget=512), *prompts())
    drive.step()
    info = drive.scheduler.explain("r5")
    assert info.waits_for is WaitReason.STATE or "'r1'" in info.why
    found = found_by(drive)
    assert {num_tokens for num_tokens, _ in found.values()} == {992}


def test_prompts_one_after_another_find_a_prompt_of_the_common_part():
    drive = Drive(roomy(budget=4096), make_request("common", COMMON, max_tokens=1))
    found_by(drive, 2)
    for request in prompts():
        drive.add(request)
        assert found_by(drive, 2)[request.request_id] == (992, 0)
        drive.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)


def test_groups_that_part_ways_at_several_places_each_find_their_state():
    """As few as are alike wait for the deeper state."""
    deep = [*COMMON, *range(2000, 2500)]
    drive = Drive(roomy(budget=4096), *prompts(deep, 3))
    drive.add(*(make_request(f"s{n}", [*COMMON, *[8000 + n] * 40]) for n in range(3)))
    found = {name: num_tokens for name, (num_tokens, _) in found_by(drive).items()}
    assert found == {"r0": 0, "r1": 1488, "r2": 1488, "s0": 992, "s1": 992, "s2": 992}


def test_a_request_whose_computer_leaves_computes_for_itself():
    first, *others = prompts(number=3)
    drive = Drive(roomy(budget=4096, max_chunk_size=100), first, *others)
    drive.step()
    assert drive.scheduler.explain("r1").waits_for is WaitReason.STATE
    drive.scheduler.finish_requests("r0", RequestStatus.FINISHED_ABORTED)
    found = {name: num_tokens for name, (num_tokens, _) in found_by(drive).items()}
    assert found == {"r1": 96, "r2": 992}


def test_two_equal_prompts_share_all_but_their_last_block():
    for length in (992, 993, 1007):
        a, b = (make_request(name, COMMON[:length]) for name in "ab")
        found = found_by(Drive(roomy(budget=4096), a, b), 3)
        num_found = (length - 1) // 16 * 16
        assert found == {"a": (0, 0), "b": (num_found, int(length - num_found == 1))}


def test_what_was_found_of_keys_and_of_states_is_told_and_counted():
    drive = Drive(roomy(budget=4096), make_request("a", COMMON, max_tokens=1))
    found_by(drive, 2)
    drive.add(make_request("b", [*COMMON[:500], 1]), make_request("c", [*COMMON[:700], 1]))
    drive.step()
    lookups = [drive.scheduler.explain(name).cache_lookup for name in "bc"]
    assert [(each.num_tokens, each.num_key_tokens) for each in lookups] == [(0, 496), (496, 688)]
    assert {each.ended for each in lookups} == {LookupEnd.NO_STATE}
    numbers = drive.scheduler.statistics()
    assert (numbers.num_lookups_by_end["no state"], numbers.num_lookup_hits_by_end["no state"]) == (
        2,
        1,
    )


def test_a_crowd_that_arrives_behind_its_first_prompt_finds_what_it_shares_with_that():
    """The first one's first step is short, so that it can still keep the state."""
    drive, (first, *others) = Drive(roomy(budget=4096)), prompts()
    drive.add(first)
    assert drive.step().num_scheduled_tokens == {"r0": 16}
    drive.add(*others)
    found = found_by(drive)
    assert found == {f"r{n}": (992, 0) for n in range(1, 8)}


@pytest.mark.parametrize(("length", "others", "num_tokens"), [(511, 0, 511), (512, 1, 512)])
def test_a_prompt_that_is_short_or_not_alone_is_not_cut(length, others, num_tokens):
    requests = [make_request(f"r{n}", [*range(n, n + length)]) for n in range(1 + others)]
    step = Drive(roomy(budget=4096), *requests).step()
    assert step.num_scheduled_tokens["r0"] == num_tokens


def test_a_prompt_that_is_computed_keeps_a_state_for_each_that_arrives():
    """Where they part ways behind what is planned already; before that there is none to keep."""
    drive = Drive(roomy(budget=256), *prompts(number=1))
    drive.step(), drive.step()
    for name, length in (("near", 100), ("far", 600), ("farther", 900)):
        drive.add(make_request(name, [*COMMON[:length], *range(5000, 5100 + length)]))
    found = {name: number for name, (number, _) in found_by(drive, 30).items()}
    assert found == {"near": 0, "far": 592, "farther": 896}
