"""The device runner on the real kernels, interpreted, against the CPU's runner: a few steps. Models
with norms of q and k and two groups of layers, with experts, and Gemma 4."""

import dataclasses

import pytest
import torch
import transformers
from fake_device import TRITON_DEVICE, make_queue
from plans import Drive, Plans
from test_output_rows import Watched, prompt_of
from test_steps_in_flight import KINDS, PROMPTS, in_flight, one_at_a_time

from engine_core.model_runner.gpu import runner as runner_of_the_device
from kernels.cpu.operations import CpuOperations
from kernels.torch.operations import TorchOperations
from kernels.triton.device_steps import TritonDeviceSteps
from kernels.triton.operations import TritonOperations
from protocol.sampling import SamplingParams
from tests.engine_core.models.decoder_cases import gemma4
from tests.native_kernels import native_library_or_skip

pytestmark = pytest.mark.slow

SHAPE = {
    "vocab_size": 131,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "head_dim": 8,
}
CONFIGS = {
    "two groups": transformers.Qwen3Config(
        **SHAPE,
        num_attention_heads=6,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "experts": transformers.Qwen3MoeConfig(
        **SHAPE,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    "gemma4, experts": gemma4(
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        global_head_dim=320,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=22,
    ),
    "gemma4, embeddings per layer": gemma4(
        num_hidden_layers=4,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=10,
        vocab_size_per_layer_input=131,
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[request.param], attn_implementation="eager"
    )
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):  # they begin as 0
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture
def ops():
    """Of the CPU's runner. One backend: what is compared here is the device's."""
    return TorchOperations()


@pytest.fixture
def triton_runner(make_device_runner):
    return make_device_runner(
        ops=TritonOperations(TRITON_DEVICE), steps=TritonDeviceSteps(), queue=make_queue()
    )


@pytest.mark.parametrize("reference", ["two groups"], indirect=True)
def test_steps_in_flight_give_the_tokens_of_the_cpu(triton_runner, make_runner):
    names = list(KINDS)
    tokens, _ = in_flight(triton_runner, names, 2)
    assert tokens == one_at_a_time(make_runner(), names, 2).tokens


@pytest.mark.parametrize("reference", ["experts"], indirect=True)
def test_experts_in_flight_give_the_tokens_of_the_cpu(make_device_runner, make_runner):
    """On torch: five steps of all kinds, chunks and graphs with padding at once."""
    names = list(KINDS)
    tokens, _ = in_flight(make_device_runner(), names, 5)
    assert tokens == one_at_a_time(make_runner(), names, 5).tokens


@pytest.mark.parametrize(
    ("reference", "num_layers"), [("experts", 2), ("gemma4, experts", 1)], indirect=["reference"]
)
def test_experts_on_the_host_give_the_tokens_of_the_cpu(
    make_device_runner, make_runner, num_layers
):
    """Gemma's second layer has its experts on the device."""
    host = CpuOperations(native_library_or_skip())
    ops = TritonOperations(TRITON_DEVICE)
    ops.leave_experts_to(host, num_layers)
    runner = make_device_runner(
        ops=ops, steps=TritonDeviceSteps(), queue=make_queue(), use_graphs=False
    )
    assert host.weight_packing(torch.float32).bytes_by_format().keys() == {"float32"}
    names = ["greedy", "truncated"]
    tokens, _ = in_flight(runner, names, 3)
    assert tokens == one_at_a_time(make_runner(), names, 3).tokens


@pytest.mark.parametrize(
    "reference", ["two groups", "experts", "gemma4, embeddings per layer"], indirect=True
)
def test_graphs_of_decodes_and_mixed_steps_give_the_tokens_of_the_cpu(triton_runner, make_runner):
    names = ["greedy", "truncated", "random"]
    expected = one_at_a_time(make_runner(), names, 4)
    plans = Plans(num_groups=triton_runner.config.num_groups)
    tokens = {name: list(PROMPTS[name]) for name in names}
    for name in names:
        plans.add(name, PROMPTS[name], KINDS[name])
    for counts in (
        {"truncated": 3, "greedy": 4, "random": 3},
        {"truncated": 7, "greedy": 1, "random": 4},
        *[dict.fromkeys(names, 1)] * 2,
    ):
        triton_runner.submit(plans.plan(counts))
        answer = triton_runner.collect()
        for name, token_id in zip(answer.req_ids, answer.sampled_token_ids, strict=True):
            if plans.lines[name].num_computed == len(tokens[name]):
                tokens[name].append(int(token_id))
    assert triton_runner._queue.num_replayed == 4
    for name in names:
        assert len(tokens[name]) > len(PROMPTS[name]) + 1
        assert tokens[name] == expected.tokens[name][: len(tokens[name])]


def run_launched(runner):
    """Chunks, prompts that end and decodes beside one another; (runner's drive, rows of passes)."""
    watched = runner.model = Watched(runner.model)
    drive = Drive(runner)
    reported = SamplingParams(max_tokens=9, temperature=0.0, logprobs=2)
    for name, length in {"long": 37, "a": 6, "b": 9}.items():
        drive.add(name, prompt_of(length), reported)
    drive.step({"long": 21, "a": 6})
    drive.step({"b": 9, "long": 16, "a": 1})
    drive.step({"b": 1, "long": 1, "a": 1})
    return drive, [rows for _, rows in watched.passes]


@pytest.mark.parametrize(
    ("reference", "batch_invariant"),
    [("two groups", False), ("experts", True), ("gemma4, experts", False)],
    indirect=["reference"],
)
def test_the_last_rows_of_a_launched_step_give_the_tokens_of_the_cpu(
    make_device_runner, make_runner, batch_invariant, monkeypatch
):
    """Batch-invariant with the bits that they have among all rows."""

    def launched():
        ops = TritonOperations(TRITON_DEVICE, batch_invariant=batch_invariant)
        runner = make_device_runner(ops=ops, steps=TritonDeviceSteps(), use_graphs=False)
        return run_launched(runner)

    drive, rows = launched()
    assert rows == [2, 3, 3]
    assert drive.tokens == run_launched(make_runner())[0].tokens
    if not batch_invariant:
        return
    arrange = runner_of_the_device.arrange_step

    def reading_all(*arguments, **options):
        return dataclasses.replace(arrange(*arguments, **options), reads_last_rows=False)

    monkeypatch.setattr(runner_of_the_device, "arrange_step", reading_all)
    everything, rows = launched()
    assert rows == [27, 26, 3]
    assert drive.logprobs == everything.logprobs
