"""Blocks that a plan copies before its batch: forks, swaps. The tokens must not notice."""

import pytest
import torch
from plans import Drive
from runners import spoil

from protocol.sampling import SamplingParams

GREEDY = SamplingParams(max_tokens=99, temperature=0.0, logprobs=5)
PROMPT = [5, 9, 100, 3, 77, 42, 8, 1, 60, 12]


def undisturbed(make_runner, steps, params=GREEDY):
    drive = Drive(make_runner())
    drive.add("a", PROMPT, params)
    drive.step({"a": len(PROMPT)})
    drive.decode("a", steps=steps)
    return drive


def test_a_fork_shares_the_prompt_and_copies_the_block_it_writes(make_runner):
    """Proves S181 in the runner: the first divergent write goes to a copy."""
    params = [SamplingParams(max_tokens=99, seed=seed) for seed in (1, 2)]
    drive = Drive(make_runner())
    drive.add("a", PROMPT, params[0])
    drive.step({"a": len(PROMPT)})
    tables = drive.plans.lines["a"].tables
    copies = [drive.plans.take_blocks(1) for _ in tables]
    drive.plans.copy = [(table[-1], new[0]) for table, new in zip(tables, copies, strict=True)]
    forked = [[*table[:-1], *new] for table, new in zip(tables, copies, strict=True)]
    drive.add("a#1", PROMPT, params[1], output=[33], tables=forked, computed=len(PROMPT))
    drive.decode("a#1", "a", steps=8)

    assert drive.tokens["a"] == undisturbed(make_runner, 8, params[0]).tokens["a"]
    alone = Drive(make_runner())
    alone.add("x", PROMPT, params[1], output=[33])
    alone.step({"x": len(PROMPT) + 1})
    alone.decode("x", steps=7)
    assert drive.tokens["a#1"] == alone.tokens["x"]


def test_a_running_sequence_whose_shared_block_is_copied_reads_and_writes_the_copy(make_runner):
    drive = Drive(make_runner())
    drive.add("a", PROMPT, GREEDY)
    drive.step({"a": len(PROMPT)})
    shared = [table[-1] for table in drive.plans.lines["a"].tables]
    copies = [drive.plans.take_blocks(1) for _ in shared]
    drive.plans.copy = [(old, new[0]) for old, new in zip(shared, copies, strict=True)]
    drive.plans.update("a", 2, copies)
    before = drive.runner.storage.pools[0].device_blocks[shared].clone()
    drive.decode("a")
    assert torch.equal(before, drive.runner.storage.pools[0].device_blocks[shared])
    spoil(drive.runner.storage.pools[0].device_blocks, shared)
    drive.decode("a", steps=5)
    expected = undisturbed(make_runner, 6)
    assert drive.tokens == expected.tokens
    assert drive.logprobs == expected.logprobs


@pytest.mark.parametrize("num_host_blocks", [12, 40])
def test_a_sequence_swapped_out_and_in_has_identical_tokens_and_logprobs(
    make_runner, num_host_blocks
):
    """Proves S196, S130: to host memory and back, to other device blocks, bit for bit."""
    drive = Drive(make_runner(num_host_blocks=num_host_blocks))
    drive.add("a", PROMPT, GREEDY)
    drive.step({"a": len(PROMPT)})
    drive.decode("a", steps=1)  # 11 computed: the last block is partly filled
    line = drive.plans.lines["a"]
    old = [block for table in line.tables for block in table]
    hosts = list(range(151, 151 + num_host_blocks))[::-1][: len(old)]
    drive.plans.swap_out = list(zip(old, hosts, strict=True))
    drive.plans.preempt("a")
    drive.step({})
    spoil(drive.runner.storage.pools[0].device_blocks)

    tables = [drive.plans.take_blocks(len(table)) for table in line.tables]
    new = [block for table in tables for block in table]
    drive.plans.swap_in = list(zip(hosts, new, strict=True))
    drive.plans.resume("a", drive.tokens["a"], tables=tables, computed=11)
    drive.decode("a", steps=6)
    expected = undisturbed(make_runner, 7)
    assert drive.tokens == expected.tokens
    assert drive.logprobs == expected.logprobs


def test_a_freed_block_is_saved_before_a_copy_reuses_it(make_runner):
    """Proves S130: swap in, then swap out, then copies, each before the forward pass."""
    drive = Drive(make_runner(num_host_blocks=2))
    device, host = (
        drive.runner.storage.pools[0].device_blocks,
        drive.runner.storage.pools[0].host_blocks,
    )
    device[1], device[2], device[3] = 1, 2, 3
    host[1] = 9
    drive.plans.swap_in = [(152, 3)]
    drive.plans.swap_out = [(1, 151)]
    drive.plans.copy = [(3, 1), (1, 2)]
    drive.step({})
    assert (device[1:4] == 9).all()
    assert (host[0] == 1).all()
