"""The fitted line against known lines, with noise, pauses, drift and missing variety."""

import numpy as np
import pytest
from budget_loop import H200, SMALL_CPU, Machine
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.scheduler.token_budget.base import StepLoad
from engine_core.scheduler.token_budget.cost_model import CostModel


def load(num_decodes: int, context: int, chunk: int = 0, computed: int = 0) -> StepLoad:
    """Decodes of that context in all, and one chunk behind what is computed."""
    seen = computed + chunk if chunk else 0
    return StepLoad(
        num_tokens=num_decodes + chunk,
        num_sequences=num_decodes + (chunk > 0),
        num_context_tokens=context + seen,
        num_attention_pairs=context + chunk * seen,
    )


def random_load(rng, *, longest_chunk=512, chunk_share=0.3) -> StepLoad:
    num_decodes = int(rng.integers(1, 65))
    chunk = int(rng.integers(1, longest_chunk)) if rng.random() < chunk_share else 0
    context = int(num_decodes * rng.uniform(50, 1_000))
    return load(num_decodes, context, chunk, int(rng.integers(0, 2_000)))


def relative_errors(model: CostModel, machine: Machine, rng, count=200) -> np.ndarray:
    loads = [random_load(rng) for _ in range(count)]
    return np.array([abs(model.predict(x) / machine.seconds(x) - 1) for x in loads])


@pytest.mark.parametrize("machine", [SMALL_CPU, H200])
def test_a_line_without_noise_is_found(machine):
    rng, model = np.random.default_rng(1), CostModel()
    for _ in range(300):
        step = random_load(rng)
        model.observe(step, machine.seconds(step))
    assert relative_errors(model, machine, rng).max() < 0.01
    assert model.num_observed == 300


@pytest.mark.parametrize("machine", [SMALL_CPU, H200])
@pytest.mark.parametrize("seed", range(5))
def test_noise_pauses_and_a_first_step_that_compiles_are_borne(machine, seed):
    rng, model = np.random.default_rng(seed), CostModel()
    for number in range(300):
        step = random_load(rng)
        duration = machine.seconds(step) * max(0.5, rng.normal(1.0, 0.05))
        if number == 0:
            duration *= 50
        if rng.random() < 0.03:
            duration *= rng.uniform(2, 30)
        model.observe(step, duration)
    errors = relative_errors(model, machine, rng)
    assert errors.mean() < 0.03
    assert errors.max() < 0.10


def test_twenty_steps_suffice_for_a_first_guess():
    for seed in range(10):
        rng, model = np.random.default_rng(seed), CostModel()
        for _ in range(20):
            step = random_load(rng)
            model.observe(step, SMALL_CPU.seconds(step) * rng.normal(1.0, 0.05))
        assert relative_errors(model, SMALL_CPU, rng).mean() < 0.10


def test_what_prompts_cost_is_remembered_through_a_long_time_without_prompts():
    rng, model = np.random.default_rng(3), CostModel()
    for _ in range(100):
        step = random_load(rng)
        model.observe(step, SMALL_CPU.seconds(step) * rng.normal(1.0, 0.05))
    for _ in range(3_000):
        step = random_load(rng, chunk_share=0.0)
        model.observe(step, SMALL_CPU.seconds(step) * rng.normal(1.0, 0.05))
    step = load(8, 2_000, chunk=400)
    assert model.predict(step) == pytest.approx(SMALL_CPU.seconds(step), rel=0.06)
    assert model.num_observed_with_chunks < 60


def test_a_machine_that_becomes_half_as_fast_is_followed():
    rng, model = np.random.default_rng(4), CostModel()
    for number in range(900):
        step = random_load(rng)
        model.observe(step, SMALL_CPU.seconds(step) * (1 if number < 300 else 2))
    errors = [
        abs(model.predict(x) / (2 * SMALL_CPU.seconds(x)) - 1)
        for x in (random_load(rng) for _ in range(100))
    ]
    assert max(errors) < 0.02


@settings(deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 64),
            st.integers(0, 10**6),
            st.integers(0, 8_192),
            st.integers(0, 10**5),
            st.floats(1e-5, 1e3),
        ),
        min_size=1,
        max_size=40,
    )
)
def test_whatever_is_seen_predictions_are_finite_and_more_work_never_takes_less(steps):
    model = CostModel()
    for num_decodes, context, chunk, computed, duration in steps:
        if num_decodes + chunk:
            model.observe(load(num_decodes, context, chunk, computed), duration)
    small, large = load(4, 1_000, 10, 5), load(4, 1_000, 20, 5)
    assert 0.0 <= model.predict(small) <= model.predict(large) < float("inf")
    assert model.predict(load(4, 1_000)) <= model.predict(load(5, 1_500))


@pytest.mark.parametrize("duration", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_are_no_times_are_passed_over(duration):
    model = CostModel()
    model.observe(load(1, 10), duration)
    assert (model.num_observed, model.predict(load(1, 10))) == (0, 0.0)


@pytest.mark.parametrize("computed", [0, 700, 20_000])
@pytest.mark.parametrize("seconds", [0.004, 0.05, 3.0])
def test_the_longest_chunk_is_the_longest_that_the_prediction_allows(computed, seconds):
    rng, model = np.random.default_rng(6), CostModel()
    machine = Machine(0.01, 1e-4, 1e-3, 1e-7, 2e-7, 64)
    for _ in range(300):
        step = random_load(rng)
        model.observe(step, machine.seconds(step))
    chunk = model.num_chunk_tokens(seconds, computed)
    without = model.predict(load(16, 5_000))
    assert model.predict(load(16, 5_000, chunk, computed)) - without <= seconds + 1e-3
    assert model.predict(load(16, 5_000, chunk + 4, computed)) - without >= seconds - 1e-4 * 4


def test_no_time_is_no_chunk_and_before_any_step_nothing_is_known_to_cost_time():
    model = CostModel()
    assert model.num_chunk_tokens(1.0, 0) > 10**6
    model.observe(load(1, 10, 10), 0.1)
    assert model.num_chunk_tokens(0.0, 0) == model.num_chunk_tokens(-1.0, 0) == 0
    assert model.most_chunk_tokens == 9, "beyond one a sequence"


def test_a_device_that_hides_small_chunks_behind_its_weights_is_learnt():
    """Up to 183 tokens cost nothing but the reading of the weights (a roofline)."""

    def seconds(step: StepLoad) -> float:
        return max(3.7e-3, step.num_tokens / 49_000) + 3e-8 * step.num_context_tokens

    rng, model = np.random.default_rng(8), CostModel()
    for _ in range(400):
        step = random_load(rng, longest_chunk=2_000)
        model.observe(step, seconds(step))
    for chunk in (16, 64, 128, 256, 512, 1_500):
        step = load(16, 5_000, chunk)
        assert model.predict(step) == pytest.approx(seconds(step), rel=0.12), chunk
    chunk = model.num_chunk_tokens(0.006, 0, 16)
    step = load(16, 5_000, chunk)
    assert model.predict(step) - model.predict(load(16, 5_000)) == pytest.approx(0.006, rel=0.02)


def test_lengths_of_one_chunk_are_predicted_together_as_one_by_one():
    rng, model = np.random.default_rng(9), CostModel()
    for _ in range(300):
        step = random_load(rng, longest_chunk=2_000)
        model.observe(step, H200.seconds(step))
    lengths = np.array([1, 40, 48, 112, 200, 1_000])
    together = model.predict_chunks(load(16, 5_000), lengths, 300)
    alone = [model.predict(load(16, 5_000, int(length), 300)) for length in lengths]
    assert together == pytest.approx(np.array(alone), rel=1e-9)
