"""The expected number of SLO violations, against a plain simulation of the same two phases."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.scheduler.token_budget.slo import (
    DecodeOutlook,
    PromptOutlook,
    SLOTargets,
    expected_violations,
)

TARGETS = SLOTargets(tpot_s=0.05, ttft_s=1.0)


def violations_one_by_one(chunk, step_s, decode_step_s, decodes, prompts):
    """Each request's own clock, token by token."""

    def probability(end_s, allowed_s, spread_s):
        return 1 / (1 + math.exp(min(40.0, max(-40.0, (allowed_s - end_s) / spread_s))))

    def output_s(num_tokens, num_mixed_steps):
        return sum(
            step_s if token < num_mixed_steps else decode_step_s for token in range(num_tokens)
        )

    left, ends = list(prompts.num_tokens_until), []
    num_steps = 0
    while len(ends) < len(left):
        num_steps += 1
        ends += [num_steps for until in left[len(ends) :] if until <= num_steps * chunk]
    total = 0.0
    for num_left, allowed_s in zip(decodes.num_left, decodes.allowed_s, strict=True):
        spread = 0.1 * TARGETS.tpot_s * (num_left + 2)
        total += probability(output_s(int(num_left), num_steps), allowed_s, spread)
    for end, allowed_s in zip(ends, prompts.allowed_s, strict=True):
        late = probability(end * step_s, allowed_s, 0.3 * TARGETS.ttft_s)
        num_new = int(prompts.num_output_tokens)
        slow = probability(
            output_s(num_new, num_steps - end),
            TARGETS.tpot_s * num_new,
            0.1 * TARGETS.tpot_s * (num_new + 2),
        )
        total += 1 - (1 - late) * (1 - slow)
    return total


@settings(deadline=None)
@given(
    decodes=st.lists(st.tuples(st.integers(1, 60), st.floats(-1.0, 4.0)), max_size=6),
    prompts=st.lists(st.tuples(st.integers(1, 900), st.floats(-2.0, 3.0)), min_size=1, max_size=5),
    chunks=st.lists(st.tuples(st.integers(1, 1_000), st.floats(0.01, 0.5)), min_size=1, max_size=4),
    num_new=st.integers(1, 40),
)
def test_the_sum_is_that_of_every_requests_own_clock(decodes, prompts, chunks, num_new):
    counted = DecodeOutlook(
        np.array([num for num, _ in decodes], float), np.array([allowed for _, allowed in decodes])
    )
    queue = PromptOutlook(
        np.cumsum([float(num) for num, _ in prompts]),
        np.array([allowed for _, allowed in prompts]),
        float(num_new),
    )
    lengths = np.array([float(length) for length, _ in chunks])
    step_s = np.array([seconds for _, seconds in chunks])
    violations = expected_violations(lengths, step_s, 0.02, counted, queue, TARGETS)
    for index, (length, seconds) in enumerate(chunks):
        expected = violations_one_by_one(length, seconds, 0.02, counted, queue)
        assert violations[index] == pytest.approx(expected, abs=1e-9)


def test_what_is_broken_for_good_weighs_the_same_for_every_chunk():
    lost = DecodeOutlook(np.full(3, 20.0), np.full(3, -30.0))
    late = PromptOutlook(np.array([500.0, 900.0]), np.array([-40.0, -40.0]), 16.0)
    chunks = np.array([800.0, 400.0, 100.0])
    violations = expected_violations(chunks, 0.01 + chunks * 1e-4, 0.01, lost, late, TARGETS)
    assert violations == pytest.approx([5.0] * 3, abs=1e-6)
