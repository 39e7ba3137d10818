"""Pooled hidden states of both runners against transformers': in chunks, with a warm cache, with
preemption, beside generation. However a prompt is cut, its answer has the same bits."""

import numpy as np
import pytest
import torch
from engine_loop import EngineLoop, few_blocks, make_scheduler

from engine_core.model_runner.pooling import DenseLayer, Pooler
from engine_core.pooler_config import PoolerConfig, PoolingType
from protocol.outputs import FinishReason
from protocol.pooling import POOLING_SAMPLING, PoolingParams, PoolingTask
from protocol.sampling import SamplingParams

V, E, TAG = 131, 36, 11
LENGTHS = (1, 2, 8, 17, 41)
TASKS = tuple(PoolingTask)
EMBED, TOKENS = PoolingParams(task=PoolingTask.EMBED), PoolingParams(task=PoolingTask.TOKEN_EMBED)
CLASSES = PoolingParams(task=PoolingTask.CLASSIFY)
STEPS = PoolingParams(task=PoolingTask.TOKEN_CLASSIFY)
WEIGHT = np.random.default_rng(1).normal(size=(3, E)).astype(np.float32)


def make_pooler(kind, **more):
    of_tokens = kind in (PoolingType.ALL, PoolingType.STEP)
    names = {"tok_pooling_type" if of_tokens else "seq_pooling_type": kind}
    config = PoolerConfig(tasks=TASKS, hidden_size=E, vector_size=E, num_labels=3, **names, **more)
    return Pooler(config, [DenseLayer(WEIGHT)])


@pytest.fixture(params=["host", "device"])
def any_runner(request, reference, make_runner, ops):
    """A runner's maker and how many steps it may have in flight."""
    is_native = ops.name != "torch-cpu"
    if request.param == "host":
        if not is_native:
            pytest.skip("once is enough")
        return make_runner, 1
    if is_native or getattr(reference.config, "sliding_window", None):
        pytest.skip("the device has operations of its own; windows are the host's case")
    return request.getfixturevalue("make_device_runner"), 2


def make_loop(reference, any_runner, pooler, *, swap=False, num_blocks=None, **scheduling):
    make, depth = any_runner
    blocks = few_blocks(reference) | ({} if num_blocks is None else {"num_blocks": num_blocks})
    runner = make(max_num_seqs=8, max_model_len=64, pooler=pooler, **blocks)
    scheduler = make_scheduler(
        runner.config.layout,
        swap=swap,
        depth=depth,
        max_num_seqs=8,
        max_model_len=64,
        **{"max_num_batched_tokens": 96} | blocks | scheduling,
    )
    return EngineLoop(scheduler, runner, depth=depth)


def add(loop, pooler, name, prompt, params, **more):
    loop.add(
        name,
        prompt,
        POOLING_SAMPLING,
        pooling_params=params,
        pools_all_states=pooler.config.needs_all_states(params),
        **more,
    )


def prompt_of(length, seed=0):
    return np.random.default_rng(seed).integers(8, V, length).tolist()


def states_of(reference, prompt):
    with torch.inference_mode():
        return reference.model(torch.tensor([prompt])).last_hidden_state[0]


def expected(reference, prompt, kind, params):
    """As sentence-transformers and transformers make it, [labels], [E] or a row a token."""
    states = states_of(reference, prompt)
    if kind is PoolingType.STEP:
        states = states[torch.tensor(prompt) == TAG]
    elif kind is not PoolingType.ALL:
        one = {PoolingType.LAST: states[-1], PoolingType.CLS: states[0]}
        states = one.get(kind, states.mean(0))
    if params.task.has_head:
        return (states @ torch.from_numpy(WEIGHT).T).softmax(-1)
    return torch.nn.functional.normalize(states, dim=-1)


def assert_equal(loop, one, other):
    """To the bit with the native library; torch's products depend on the batch."""
    if loop.depth == 1:
        assert one == other
    torch.testing.assert_close(array_of(one), array_of(other), atol=1e-5, rtol=1e-4)


def array_of(pooled):
    return torch.from_numpy(np.frombuffer(pooled.data, "<f4").reshape(pooled.shape).copy())


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (PoolingType.LAST, EMBED),
        (PoolingType.MEAN, CLASSES),
        (PoolingType.CLS, EMBED),
        (PoolingType.ALL, TOKENS),
        (PoolingType.STEP, STEPS),
    ],
    ids=lambda value: getattr(value, "value", None),
)
def test_answers_are_those_of_transformers_and_bits_do_not_depend_on_chunks(
    reference, any_runner, kind, params
):
    """Whole and alone; then in chunks of 9 with a warm cache, beside one another and generation,
    where blocks are short. Proves S023."""
    if any_runner[1] > 1 and kind in (PoolingType.CLS, PoolingType.ALL):
        pytest.skip("three kinds are enough on a late device")
    pooler = make_pooler(kind, step_tag_id=TAG if kind is PoolingType.STEP else None)
    prompts = {f"r{length}": prompt_of(length) for length in LENGTHS}
    prompts["r17"][7], prompts["r41"][3], prompts["r41"][40] = TAG, TAG, TAG
    alone = make_loop(reference, any_runner, pooler, num_blocks=80)
    for name, prompt in prompts.items():
        add(alone, pooler, name, prompt, params)
        alone.finish()
        wanted = expected(reference, prompt, kind, params)
        torch.testing.assert_close(array_of(alone.pooled[name]), wanted, atol=1e-5, rtol=1e-4)
    crowd = make_loop(reference, any_runner, pooler, max_num_batched_tokens=9)
    plain = SamplingParams(max_tokens=12, temperature=0.0)
    crowd.add("text", prompt_of(30, 5), plain)
    for name, prompt in prompts.items():
        add(crowd, pooler, name, prompt, params)
    crowd.add("more text", prompt_of(41), plain)
    for name, prompt in prompts.items():
        add(crowd, pooler, f"again {name}", prompt, params)
    crowd.finish()
    for name in prompts:
        for each in (crowd.pooled[name], crowd.pooled[f"again {name}"]):
            assert_equal(crowd, each, alone.pooled[name])
        assert crowd.ends[name, 0] is FinishReason.STOP
        assert not crowd.tokens[name, 0]
    assert (len(crowd.tokens["text", 0]), len(crowd.tokens["more text", 0])) == (12, 12)
    add(crowd, pooler, "once more", prompts["r41"], params)
    crowd.finish()
    assert_equal(crowd, crowd.pooled["once more"], alone.pooled["r41"])
    cached = crowd.num_cached_tokens["once more"]
    assert cached == (40 if kind is PoolingType.LAST else 0)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("kind", [PoolingType.LAST, PoolingType.MEAN])
def test_a_prompt_that_gives_way_in_its_middle_has_the_same_bits(reference, any_runner, swap, kind):
    pooler, prompt = make_pooler(kind), prompt_of(41)
    whole = make_loop(reference, any_runner, pooler)
    add(whole, pooler, "whole", prompt, EMBED)
    whole.finish()
    num_blocks = 40 if getattr(reference.config, "sliding_window", None) else 13
    priority = {"max_num_batched_tokens": 7, "scheduling_policy": "priority"}
    loop = make_loop(reference, any_runner, pooler, swap=swap, num_blocks=num_blocks, **priority)
    for number in range(3):
        add(loop, pooler, f"r{number}", prompt, EMBED, priority=9 - number)
        loop.step()
        loop.step()
    loop.finish()
    assert loop.scheduler.statistics().num_preemptions_forced
    for number in range(3):
        assert_equal(loop, loop.pooled[f"r{number}"], whole.pooled["whole"])


def test_swapped_out_or_aborted_in_flight_nothing_of_it_is_left(reference, any_runner):
    pooler = make_pooler(PoolingType.MEAN)
    loop = make_loop(reference, any_runner, pooler, max_num_batched_tokens=9)
    prompt = prompt_of(41)
    add(loop, pooler, "gone", prompt, EMBED)
    loop.step()
    loop.step()
    loop.abort("gone")
    add(loop, pooler, "next", prompt, EMBED)
    loop.finish()
    assert loop.ends == {("gone", 0): FinishReason.ABORT, ("next", 0): FinishReason.STOP}
    wanted = expected(reference, prompt, PoolingType.MEAN, EMBED)
    torch.testing.assert_close(array_of(loop.pooled["next"]), wanted, atol=1e-5, rtol=1e-4)


def test_hidden_states_that_are_not_finite_fail_their_request_alone(reference, any_runner):
    weight = np.full((1, E), np.inf, np.float32)
    config = PoolerConfig(tasks=TASKS, hidden_size=E, vector_size=E, num_labels=1)
    pooler = Pooler(config, [DenseLayer(weight, activation="tanh"), DenseLayer(weight[:, :1])])
    loop = make_loop(reference, any_runner, pooler)
    add(
        loop,
        pooler,
        "wrong",
        prompt_of(5),
        CLASSES,
    )
    add(loop, pooler, "right", prompt_of(5), EMBED)
    loop.finish()
    assert loop.ends == {("wrong", 0): FinishReason.ERROR, ("right", 0): FinishReason.STOP}


def test_dimensions_are_cut_before_the_length_is_made_one(reference, any_runner):
    pooler = make_pooler(PoolingType.LAST, matryoshka_dimensions=())
    loop = make_loop(reference, any_runner, pooler)
    prompt = prompt_of(9)
    for name, active in (("on", None), ("off", False)):
        params = PoolingParams(task=PoolingTask.EMBED, dimensions=5, use_activation=active)
        add(loop, pooler, name, prompt, params)
    loop.finish()
    raw = states_of(reference, prompt)[-1, :5]
    torch.testing.assert_close(array_of(loop.pooled["off"]), raw, atol=1e-4, rtol=1e-4)
    wanted = torch.nn.functional.normalize(raw, dim=-1)
    torch.testing.assert_close(array_of(loop.pooled["on"]), wanted, atol=1e-5, rtol=1e-4)
