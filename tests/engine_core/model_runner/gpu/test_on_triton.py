"""The device runner on the real kernels, interpreted, against the host's runner: a few steps."""

import pytest
import torch
import transformers
from fake_device import LateQueue
from plans import Plans
from test_steps_in_flight import KINDS, PROMPTS, in_flight, one_at_a_time

from kernels.triton.device_steps import TritonDeviceSteps
from kernels.triton.operations import TritonOperations

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def reference():
    """Two layers and two groups, with norms of q and k."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=131,
        hidden_size=36,
        intermediate_size=50,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.3,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.eval()


@pytest.fixture
def triton_runner(make_device_runner):
    return make_device_runner(
        ops=TritonOperations(CPU), steps=TritonDeviceSteps(CPU), queue=LateQueue()
    )


def test_steps_in_flight_give_the_tokens_of_the_host(triton_runner, make_runner):
    names = list(KINDS)
    tokens, _ = in_flight(triton_runner, names, 2)
    assert tokens == one_at_a_time(make_runner(), names, 2).tokens


def test_graphs_with_padding_and_chunks_give_the_tokens_of_the_host(triton_runner, make_runner):
    names = ["greedy", "truncated", "held back"]
    expected = one_at_a_time(make_runner(), names, 4)
    plans = Plans(num_groups=triton_runner.config.num_groups)
    tokens = {name: list(PROMPTS[name]) for name in names}
    for name in names:
        plans.add(name, PROMPTS[name], KINDS[name])
    steps = [
        {"truncated": 3, "greedy": 4, "held back": 9},
        {"truncated": 7, "greedy": 1, "held back": 7},
        *[dict.fromkeys(names, 1)] * 2,
    ]
    for counts in steps:
        triton_runner.submit(plans.plan(counts))
        answer = triton_runner.collect()
        for name, token_id in zip(answer.req_ids, answer.sampled_token_ids, strict=True):
            if plans.lines[name].num_computed == len(tokens[name]):
                tokens[name].append(int(token_id))
    assert triton_runner._queue.num_replayed == 2
    for name in names:
        number = len(tokens[name])
        assert tokens[name] == expected.tokens[name][:number]
