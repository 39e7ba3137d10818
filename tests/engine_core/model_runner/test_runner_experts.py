"""Models with experts through the whole runner, on both backends: greedy tokens of transformers."""

import pytest
import torch
import transformers
from host_sampled import HostSampledTriton
from plans import Drive
from runners import load_reference, runner_config

from engine_core.model_runner.cpu.runner import CPUModelRunner
from kernels.torch.operations import TorchOperations
from protocol.sampling import SamplingParams

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(max_tokens=99, temperature=0.0)
SHAPE = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
CONFIGS = {
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=5, sliding_window=6),
    "qwen3": transformers.Qwen3MoeConfig(
        **SHAPE,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[request.param], attn_implementation="eager"
    )
    model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):  # Qwen's begin as 0
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def drive_of(reference, ops):
    options = {"num_blocks": 60, "max_num_seqs": 5, "max_num_batched_tokens": 40}
    config = runner_config(load_reference(reference, ops), ops, **options)
    return Drive(CPUModelRunner(config), num_blocks=60, max_num_seqs=5)


def prompt_of(length, seed=0):
    return torch.randint(131, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def greedy(reference, prompt, number):
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(number):
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_chunks_and_decodes_in_one_batch_give_the_tokens_of_transformers(reference, backend):
    ops = TorchOperations() if backend == "torch" else HostSampledTriton(torch.device("cpu"))
    drive = drive_of(reference, ops)
    prompts = {"a": prompt_of(9), "b": prompt_of(1, 1), "c": prompt_of(17, 2)}
    drive.add("a", prompts["a"], GREEDY)
    drive.step({"a": 9})
    drive.add("b", prompts["b"], GREEDY)
    drive.add("c", prompts["c"], GREEDY)
    drive.step({"a": 1, "c": 5, "b": 1})
    drive.step({"b": 1, "c": 12, "a": 1})
    drive.decode("c", "a", "b", steps=3)
    for name, prompt in prompts.items():
        number = len(drive.tokens[name]) - len(prompt)
        assert number >= 4
        assert drive.tokens[name] == greedy(reference, prompt, number)


def test_batch_invariant_neither_a_crowd_nor_chunks_change_a_bit(reference):
    """Alone a token's experts have one row each; in the crowd they share tiles with others."""
    ops = HostSampledTriton(torch.device("cpu"), batch_invariant=True)
    params = SamplingParams(max_tokens=99, temperature=0.0, logprobs=131)
    prompt = prompt_of(11)
    alone = drive_of(reference, ops)
    alone.add("a", prompt, params)
    alone.step({"a": 11})
    alone.decode("a", steps=2)
    assert alone.tokens["a"] == greedy(reference, prompt, 3)
    crowd = drive_of(reference, ops)
    for index, name in enumerate("bcd"):
        crowd.add(name, prompt_of(5 + index, index + 1), params)
    crowd.add("a", prompt, params)
    crowd.step({"b": 5, "a": 1, "c": 6})
    crowd.step({"b": 1, "d": 7, "a": 10})
    crowd.decode("c", "a", "d", steps=2)
    assert len(crowd.logprobs["a"]) == len(alone.logprobs["a"]) == 3
    assert crowd.tokens["a"] == alone.tokens["a"]
    for mine, other in zip(crowd.logprobs["a"], alone.logprobs["a"], strict=True):
        assert mine.logprobs == other.logprobs
