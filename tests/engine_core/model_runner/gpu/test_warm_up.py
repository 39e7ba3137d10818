"""Dummy steps: within the limits, decodes first, and between them everything that is compiled."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_core.model_runner.gpu.warm_up import (
    dummy_step,
    largest_step,
    steps_of_every_kind,
    steps_of_every_size,
)
from kernels.interface.device_steps import SamplingMode
from kernels.triton.linear.experts import choose_tile_rows
from kernels.triton.linear.quantised import MOST_PACKED_ROWS
from kernels.triton.linear.quantised import choose_tile_rows as choose_quantised_rows

LIMITS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 300),
        "max_num_drafts": st.sampled_from([0, 7]),
        "max_model_len": st.integers(2, 5000),
        "max_num_batched_tokens": st.integers(1, 9000),
    }
)


def config_of(limits):
    max_num_logits = limits["max_num_seqs"] + limits.get("max_num_drafts", 0)
    return SimpleNamespace(**limits, max_num_logits=max_num_logits)


@given(LIMITS)
def test_every_step_is_within_the_limits_and_has_its_decodes_first(limits):
    config = config_of(limits)
    steps = [
        *steps_of_every_kind(config),
        *steps_of_every_size(config),
        largest_step(config),
    ]
    for counts in steps:
        assert 1 <= len(counts) <= config.max_num_logits
        assert sum(counts) <= limits["max_num_batched_tokens"]
        assert all(1 <= count <= limits["max_model_len"] for count in counts)
        step = dummy_step(counts, SamplingMode.PLAIN, num_rows=limits["max_num_seqs"])
        assert all(count == 1 for count in counts[: step.num_decodes])
        assert step.num_tokens == sum(counts)


@given(LIMITS)
def test_sizes_at_most_double_up_to_all_that_a_step_can_have(limits):
    sizes = [sum(counts) for counts in steps_of_every_size(config_of(limits))]
    most = limits["max_num_seqs"] * limits["max_model_len"]
    assert sizes[-1] == min(limits["max_num_batched_tokens"], most)
    assert sizes[0] <= 32
    assert all(small < large <= 2 * small for small, large in itertools.pairwise(sizes))


@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 8), (64, 6), (16, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("most_tokens", [1, 33, 700, 8192])
def test_no_step_can_have_tiles_of_experts_that_no_dummy_step_had(
    num_experts, top_k, dtype, most_tokens
):
    limits = {"max_num_seqs": 200, "max_model_len": 900, "max_num_batched_tokens": most_tokens}
    config = config_of(limits)
    steps = [
        *steps_of_every_kind(config),
        *steps_of_every_size(config),
    ]
    warm = {choose_tile_rows(sum(counts), top_k, num_experts, dtype) for counts in steps}
    possible = range(1, most_tokens + 1)
    assert warm == {choose_tile_rows(size, top_k, num_experts, dtype) for size in possible}


@pytest.mark.parametrize("max_num_seqs", [1, 20, 40, 65, 256])
@pytest.mark.parametrize("most_tokens", [1, 33, 700])
def test_no_step_can_have_tiles_of_quantised_products_that_no_dummy_step_had(
    max_num_seqs, most_tokens
):
    limits = {
        "max_num_seqs": max_num_seqs,
        "max_model_len": 900,
        "max_num_batched_tokens": most_tokens,
    }

    def tiles(numbers):
        dtype = torch.bfloat16
        return {
            choose_quantised_rows(n, dtype, most_rows, batch_invariant=False)
            for n in numbers
            for most_rows in MOST_PACKED_ROWS.values()
        }

    config = config_of(limits)
    steps = [
        *steps_of_every_kind(config),
        *steps_of_every_size(config),
    ]
    assert tiles(map(sum, steps)) == tiles(range(1, most_tokens + 1))
    most_due = min(max_num_seqs, most_tokens)  # rows of the head's product
    assert tiles(map(len, steps)) == tiles(range(1, most_due + 1))


@pytest.mark.parametrize(("max_num_seqs", "tokens"), [(4, 10), (256, 8192), (7, 7), (9, 3)])
def test_the_largest_step_has_most_sequences_and_most_tokens(max_num_seqs, tokens):
    limits = {
        "max_num_seqs": max_num_seqs, "max_model_len": 4096, "max_num_batched_tokens": tokens,
    }  # fmt: skip
    counts = largest_step(config_of(limits))
    assert len(counts) == min(max_num_seqs, tokens)
    assert sum(counts) == tokens
