"""Step times: the roofline against the table of floors, fits against known coefficients."""

import itertools

import numpy as np
import pytest

from frontend.simulator import SimulationError
from frontend.simulator.step_times import (
    FEATURES,
    HARDWARE,
    SHAPES,
    FittedModel,
    NoisyModel,
    Roofline,
    StepWork,
    nonnegative_least_squares,
)


def decode(batch, context):
    # the token that is computed attends to itself: `context` tokens in all
    return StepWork(batch, batch, batch * context, batch * context, 0, batch)


def prefill(tokens):
    return StepWork(tokens, 1, tokens, tokens * (tokens + 1) // 2, 0, 1)


@pytest.mark.parametrize(
    ("model", "work", "floor_ms"),
    [
        ("llama-3.1-8b", decode(1, 1024), 3.52),
        ("llama-3.1-8b", decode(256, 1024), 12.9),
        ("qwen3-0.6b", decode(256, 1024), 7.45),
        ("llama-3.1-8b", prefill(8192), 167),
    ],
)
def test_the_roofline_gives_the_floors_that_were_worked_out_for_an_h200(model, work, floor_ms):
    roofline = Roofline(HARDWARE["h200"], SHAPES[model], 16)

    assert roofline.duration_s(work) * 1000 == pytest.approx(floor_ms, rel=0.025)


def test_a_small_model_on_the_cpu_reads_its_weights_in_the_time_of_its_floor():
    roofline = Roofline(HARDWARE["cpu-2"], SHAPES["smollm2-135m"], 16)

    assert roofline.duration_s(decode(1, 64)) * 1000 == pytest.approx(31, rel=0.05)


def test_copies_and_overhead_are_added_and_an_empty_step_costs_only_them():
    import dataclasses

    hardware = dataclasses.replace(HARDWARE["h200"], overhead_s=0.001)
    roofline = Roofline(hardware, SHAPES["llama-3.1-8b"], 16)
    empty = StepWork(0, 0, 0, 0, 100, 0)

    assert roofline.duration_s(empty) == pytest.approx(0.001 + 100 * 16 * 131072 / 50e9)


def test_the_memory_left_by_the_weights_holds_the_cache():
    roofline = Roofline(HARDWARE["h200"], SHAPES["llama-3.1-8b"], 16)

    # 139 GiB * 0.9 less 16.06 GB, by 2 MiB a block
    assert roofline.num_blocks() == pytest.approx((139 * 2**30 * 0.9 - 16.06e9) / 2**21, rel=1e-3)
    with pytest.raises(SimulationError, match=r"leaves .* GB of h200's memory"):
        roofline.num_blocks(memory_share=0.05)


def rows(count, seed=0):
    random = np.random.default_rng(seed)
    tokens = random.integers(1, 2048, count)
    sequences = np.minimum(tokens, random.integers(1, 64, count))
    context = tokens + random.integers(0, 50_000, count)
    pairs = context * random.integers(1, 20, count)
    return np.stack(
        [np.ones(count), tokens, sequences, context, pairs, np.zeros(count)], axis=1
    ).astype(float)


def test_a_fit_finds_the_coefficients_that_made_the_times():
    features, truth = rows(500), np.array([4e-3, 2e-3, 1e-4, 1e-6, 1e-8, 0.0])

    model = FittedModel.from_rows(features, features @ truth)

    assert model.coefficients == pytest.approx(truth, rel=1e-3, abs=1e-12)
    assert model.mean_relative_error < 1e-6


def test_a_fit_of_noisy_times_predicts_new_ones_and_knows_its_error():
    truth = np.array([4e-3, 2e-3, 1e-4, 1e-6, 1e-8, 0.0])
    noise = np.random.default_rng(1).lognormal(0.0, 0.1, 3000)
    model = FittedModel.from_rows(rows(3000), rows(3000) @ truth * noise)

    for feature in rows(50, seed=2):
        work = StepWork(*(int(feature[place]) for place in (1, 2, 3, 4, 5, 2)))
        assert model.duration_s(work) == pytest.approx(float(feature @ truth), rel=0.1)
    assert model.mean_relative_error == pytest.approx(0.08, abs=0.02)
    described = model.describe()["measured_to_predicted"]
    assert described["p95"] / described["p50"] == pytest.approx(np.exp(0.1645), rel=0.05)


@pytest.mark.parametrize("sigma", [0.1, 1.0])
def test_predictions_add_up_to_the_recorded_time_however_skewed_its_noise(sigma):
    truth = np.array([4e-3, 3e-4, 3e-4, 1e-7, 1e-8, 0.0])
    noise = np.random.default_rng(1).lognormal(0.0, sigma, 3000)
    features, durations = rows(3000), rows(3000) @ truth * noise
    model = FittedModel.from_rows(features, durations)

    is_long = features[:, 1] > 1000
    for chosen in (is_long, ~is_long):
        predicted = _predicted(model, features[chosen])
        assert predicted == pytest.approx(durations[chosen].sum(), rel=0.05)
    assert _predicted(model, features) == pytest.approx(durations.sum(), rel=0.001)


def test_nonnegative_least_squares_is_the_best_of_a_fine_grid():
    random = np.random.default_rng(3)
    for _ in range(3):
        matrix, target = random.normal(size=(12, 3)), random.normal(size=12)
        found = nonnegative_least_squares(matrix, target)
        loss = np.sum((matrix @ found - target) ** 2)
        grid = itertools.product(np.linspace(0, 1.5, 31), repeat=3)
        least = min(np.sum((matrix @ np.array(point) - target) ** 2) for point in grid)
        assert (found >= 0).all()
        assert loss <= least + 1e-9


def test_no_coefficient_is_negative_where_times_fall_with_a_feature():
    features = rows(200)
    durations = 1.0 - 1e-4 * features[:, 1]

    model = FittedModel.from_rows(features, durations)

    assert min(model.coefficients) >= 0
    assert len(model.coefficients) == len(FEATURES)


def test_noise_is_a_function_of_its_seed_and_keeps_the_total_time():
    truth = np.array([1e-2, 2e-3, 0, 0, 0, 0])
    factors = np.random.default_rng(1).lognormal(0.0, 0.3, 4000)
    features = rows(4000)
    model = FittedModel.from_rows(features, features @ truth * factors)
    work = StepWork(500, 1, 500, 500, 0, 1)
    one, same, other = NoisyModel(model, 1), NoisyModel(model, 1), NoisyModel(model, 2)
    drawn = [one.duration_s(work) for _ in range(3000)]

    assert drawn == [same.duration_s(work) for _ in range(3000)]
    assert drawn != [other.duration_s(work) for _ in range(3000)]
    assert np.std(drawn) / np.mean(drawn) == pytest.approx(0.3, abs=0.05)
    total = np.mean(drawn) / model.duration_s(work)
    assert total == pytest.approx(
        (features @ truth * factors).sum() / _predicted(model, features), rel=0.03
    )


def test_long_steps_deviate_as_recorded_long_steps_do():
    random = np.random.default_rng(1)
    features = np.array([[1, 1, 1, 100, 100, 0], [1, 256, 1, 400, 5e4, 0]] * 1000, float)
    factors = np.where(np.arange(2000) % 2, random.uniform(0.5, 1.5, 2000), 1.0)
    noisy = NoisyModel(FittedModel.from_rows(features, features[:, 1] * 1e-3 * factors), 0)

    for row, low, high in ((features[0], 0.99, 1.01), (features[1], 0.5, 1.5)):
        work = StepWork(*map(int, row[1:]), 1)
        drawn = np.array([noisy.duration_s(work) for _ in range(1000)]) / (row[1] * 1e-3)
        assert drawn.mean() == pytest.approx(1.0, abs=0.03)
        assert (drawn.min(), drawn.max()) == pytest.approx((low, high), abs=0.06)


def _predicted(model, features):
    return np.maximum(features @ np.array(model.coefficients), model.shortest_s).sum()


def test_too_few_steps_and_a_step_without_duration_are_refused():
    with pytest.raises(SimulationError, match="3 steps were recorded, at least 8"):
        FittedModel.from_rows(rows(3), np.ones(3))
    with pytest.raises(SimulationError, match=r"a step of 0.0 s"):
        FittedModel.from_rows(rows(9), np.zeros(9))


def test_ranks_share_a_step_and_exchange_sums_stages_pass_states_on():
    shape, hardware = SHAPES["llama-3.1-8b"], HARDWARE["h200"]
    alone = Roofline(hardware, shape, 16).duration_s(decode(64, 1024))
    for ranks in (2, 4, 8):
        shared = Roofline(hardware, shape, 16, tensor_parallel_size=ranks)
        crossing = 65 * 64 * 4096 * 2 * 2 * (ranks - 1) / ranks / 450e9
        expected = alone / ranks + 65 * 10e-6 + crossing
        assert shared.duration_s(decode(64, 1024)) == pytest.approx(expected)
    stages = Roofline(hardware, shape, 16, pipeline_parallel_size=4)
    expected = alone + 3 * (10e-6 + 64 * 2 * 4096 * 2 / 450e9)
    assert stages.duration_s(decode(64, 1024)) == pytest.approx(expected)


def test_devices_together_hold_more_blocks_and_copies_of_heads_take_some_of_them():
    def num_blocks(name, **sizes):
        return Roofline(HARDWARE["h200"], SHAPES[name], 16, **sizes).num_blocks()

    one = num_blocks("llama-3.1-8b")
    assert num_blocks("llama-3.1-8b", tensor_parallel_size=2) > 2 * one
    assert num_blocks("llama-3.1-8b", pipeline_parallel_size=2) > 2 * one
    eight = num_blocks("llama-3.1-8b", tensor_parallel_size=8)
    assert num_blocks("llama-3.1-8b", tensor_parallel_size=16) == pytest.approx(eight, rel=0.05)
    with pytest.raises(SimulationError, match="choose a smaller model"):
        num_blocks("llama-3.1-70b")
    with pytest.raises(SimulationError, match="cpu-2 is one device"):
        Roofline(HARDWARE["cpu-2"], SHAPES["smollm2-135m"], 16, tensor_parallel_size=2)
