"""Made-up steps: within the limits, decodes first, and between them everything that is compiled."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.model_runner.device.warm_up import (
    largest_step,
    made_up_step,
    steps_of_every_kind,
    steps_of_every_size,
)
from kernels.device_steps import SamplingMode

LIMITS = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 300),
        "max_model_len": st.integers(2, 5000),
        "max_num_batched_tokens": st.integers(1, 9000),
    }
)


@given(LIMITS)
def test_every_step_is_within_the_limits_and_has_its_decodes_first(limits):
    steps = [*steps_of_every_kind(**limits), *steps_of_every_size(**limits), largest_step(**limits)]
    for counts in steps:
        assert 1 <= len(counts) <= limits["max_num_seqs"]
        assert sum(counts) <= limits["max_num_batched_tokens"]
        assert all(1 <= count <= limits["max_model_len"] for count in counts)
        step = made_up_step(counts, SamplingMode.PLAIN)
        assert all(count == 1 for count in counts[: step.num_decodes])
        assert step.num_tokens == sum(counts)


@given(LIMITS)
def test_sizes_at_most_double_up_to_all_that_a_step_can_have(limits):
    sizes = [sum(counts) for counts in steps_of_every_size(**limits)]
    most = limits["max_num_seqs"] * limits["max_model_len"]
    assert sizes[-1] == min(limits["max_num_batched_tokens"], most)
    assert sizes[0] <= 32
    assert all(small < large <= 2 * small for small, large in itertools.pairwise(sizes))


@pytest.mark.parametrize(("max_num_seqs", "tokens"), [(4, 10), (256, 8192), (7, 7), (9, 3)])
def test_the_largest_step_has_most_sequences_and_most_tokens(max_num_seqs, tokens):
    counts = largest_step(
        max_num_seqs=max_num_seqs, max_model_len=4096, max_num_batched_tokens=tokens
    )
    assert len(counts) == min(max_num_seqs, tokens)
    assert sum(counts) == tokens
