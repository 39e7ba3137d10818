"""Caches in bfloat16 and int8 under a float32 model: whatever is done to blocks changes no bit."""

import numpy as np
import pytest
import torch
from plans import Drive
from runners import spoil

from kernels.cpu.operations import CpuOperations
from kernels.interface.operations import AttentionSpec
from kernels.torch.operations import TorchOperations
from protocol.sampling import SamplingParams
from tests.native_kernels import native_library_or_skip

GREEDY = SamplingParams(max_tokens=99, temperature=0.0, logprobs=5)
PROMPT = [5, 9, 100, 3, 77, 42, 8, 1, 60, 12]
STORED = [torch.bfloat16, torch.int8]


@pytest.fixture(scope="session")
def ops():
    return CpuOperations(native_library_or_skip())


@pytest.fixture(params=[*STORED, "int8 in panels"])
def make_stored(make_runner, request):
    options = {"kv_dtype": request.param}
    if request.param == "int8 in panels":
        options = {"kv_dtype": torch.int8, "block_size": 16}
    return lambda **more: make_runner(**options, **more)


def undisturbed(make, steps):
    drive = Drive(make())
    drive.add("a", PROMPT, GREEDY)
    drive.step({"a": len(PROMPT)})
    drive.decode("a", steps=steps)
    return drive


def test_chunks_and_a_crowd_change_no_bit(make_stored):
    drive = Drive(make_stored())
    drive.add("a", PROMPT, GREEDY)
    drive.add("b", PROMPT[::-1], GREEDY)
    drive.add("c", PROMPT * 3, GREEDY)
    for counts in ({"a": 3, "c": 11}, {"b": 10, "a": 1}, {"a": 6, "b": 1, "c": 19}):
        drive.step(counts)
    drive.decode("c", "a", "b", steps=7)
    expected = undisturbed(make_stored, 7)
    assert drive.tokens["a"] == expected.tokens["a"]
    assert drive.logprobs["a"] == expected.logprobs["a"]


def test_a_sequence_swapped_out_and_in_has_the_same_bits(make_stored):
    drive = Drive(make_stored(num_host_blocks=40))
    drive.add("a", PROMPT, GREEDY)
    drive.step({"a": len(PROMPT)})
    drive.decode("a")  # 11 computed: the last block is partly filled
    tables = drive.plans.lines["a"].tables
    old = [block for table in tables for block in table]
    hosts = list(range(151, 191))[::-1][: len(old)]
    drive.plans.swap_out = list(zip(old, hosts, strict=True))
    drive.plans.preempt("a")
    drive.step({})
    spoil(drive.runner.storage.pools[0].device_blocks)
    tables = [drive.plans.take_blocks(len(table)) for table in tables]
    new = [block for table in tables for block in table]
    drive.plans.swap_in = list(zip(hosts, new, strict=True))
    drive.plans.resume("a", drive.tokens["a"], tables=tables, computed=11)
    drive.decode("a", steps=6)
    expected = undisturbed(make_stored, 7)
    assert drive.tokens == expected.tokens
    assert drive.logprobs == expected.logprobs


def test_a_branch_reads_the_blocks_it_shares_and_writes_its_copy(make_stored):
    drive = Drive(make_stored())
    drive.add("a", PROMPT, GREEDY)
    drive.step({"a": len(PROMPT)})
    tables = drive.plans.lines["a"].tables
    copies = [drive.plans.take_blocks(1) for _ in tables]
    drive.plans.copy = [(table[-1], new[0]) for table, new in zip(tables, copies, strict=True)]
    branch = [[*table[:-1], *new] for table, new in zip(tables, copies, strict=True)]
    drive.add("b", PROMPT, GREEDY, output=[33], tables=branch, computed=len(PROMPT))
    drive.decode("b", "a", steps=7)
    expected = undisturbed(make_stored, 7)
    assert drive.tokens["a"] == expected.tokens["a"]
    assert drive.logprobs["a"] == expected.logprobs["a"]
    alone = Drive(make_stored())
    alone.add("b", PROMPT, GREEDY, output=[33])
    alone.step({"b": len(PROMPT) + 1})
    alone.decode("b", steps=6)
    assert drive.tokens["b"] == alone.tokens["b"]


def test_log_probabilities_are_near_those_of_a_float32_cache_and_not_equal(make_runner):
    def first_position(**options):
        columns = undisturbed(lambda: make_runner(**options), 0).logprobs["a"][0]
        ids = np.frombuffer(columns.token_ids, "<i4").tolist()
        return dict(zip(ids, np.frombuffer(columns.logprobs, "<f4").tolist(), strict=True))

    exact = first_position()
    for kv_dtype in STORED:
        stored = first_position(kv_dtype=kv_dtype)
        errors = [abs(stored[token] - exact[token]) for token in stored.keys() & exact.keys()]
        assert len(errors) >= 3
        assert 0 < max(errors) < 0.2


def test_a_block_of_int8_takes_what_the_arithmetic_says(make_runner):
    runner = make_runner(kv_dtype=torch.int8, num_blocks=10)
    layers = runner.config.model.spec.layers
    a_layer = 4 * layers[0].num_kv_heads * 2 * (layers[0].key_size + 4)
    padded = -(-a_layer // 64) * 64
    layers_a_block = max(len(group.layers) for group in runner.config.layout.groups)
    assert runner.storage.pools[0].device_blocks.shape == (11, layers_a_block * padded)


def test_torch_alone_has_no_such_cache():
    with pytest.raises(ValueError, match=r"only the native kernels have that"):
        TorchOperations().make_attention_planner(
            AttentionSpec(
                num_query_heads=2,
                num_kv_heads=1,
                head_size=8,
                block_size=4,
                sliding_window=None,
                max_num_seqs=1,
                max_num_batched_tokens=8,
                max_model_len=8,
                dtype=torch.float32,
                kv_dtype=torch.int8,
            )
        )
