"""The CPU's runner on the Triton backend, interpreted: what transformers computes.

Steps mix prefills, chunks and decodes in any order; the runner puts decodes first for this backend
and gives its answer in the order of the plan. With batch-invariant operations a sequence has the
same bits alone, in a crowd, in chunks and after a preemption.
"""

import numpy as np
import pytest
import torch
import transformers
from host_sampled import HostSampledTriton
from plans import Drive
from runners import load_reference, runner_config, spoil, spoiled

from engine_core.model_runner.cpu.runner import CPUModelRunner
from kernels.torch.operations import TorchOperations
from protocol.sampling import SamplingParams

pytestmark = pytest.mark.slow

V = 131
CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=99, temperature=0.0, logprobs=V)
SHAPE = {
    "vocab_size": V,
    "hidden_size": 36,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
CONFIGS = {
    "llama 9 / 3 heads": transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "qwen3, norms of q and k, two groups": transformers.Qwen3Config(
        **SHAPE,
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **SHAPE,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=6,
        query_pre_attn_scalar=11,
    ),
    "mixtral, window of 6": transformers.MixtralConfig(
        **SHAPE, num_local_experts=5, sliding_window=6
    ),
    "qwen3, experts in one layer": transformers.Qwen3MoeConfig(
        **SHAPE, **EXPERTS, norm_topk_prob=True, decoder_sparse_step=2
    ),
}


def reference_of(name):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIGS[name], attn_implementation="eager"
    )
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    for key, parameter in model.named_parameters():  # they begin as 0 or 1
        if key.endswith(("bias", "mlp.gate.weight")) or "norm" in key:
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
    return model.eval()


def drive_of(reference, ops, **options):
    options = {"num_blocks": 60, "max_num_seqs": 5, "max_num_batched_tokens": 40} | options
    config = runner_config(load_reference(reference, ops), ops, **options)
    return Drive(spoiled(CPUModelRunner(config)), num_blocks=60, max_num_seqs=5)


def prompt_of(length, seed=0):
    return torch.randint(V, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_as_transformers(drive, reference, prompts):
    """Tokens, and the log-probability of every token of the vocabulary at every step."""
    for name, prompt in prompts.items():
        tokens = drive.tokens[name]
        number = len(tokens) - len(prompt)
        assert number > 0
        with torch.inference_mode():
            logits = reference(torch.tensor([tokens])).logits[0].float()
        expected = logits[len(prompt) - 1 : -1].log_softmax(dim=1)
        assert tokens[len(prompt) :] == expected.argmax(dim=1).tolist()
        assert len(drive.logprobs[name]) == number
        for columns, wanted in zip(drive.logprobs[name], expected, strict=True):
            ids = np.frombuffer(columns.token_ids, "<i4")
            values = np.frombuffer(columns.logprobs, "<f4")
            actual = torch.empty(V)
            actual[torch.from_numpy(ids.astype(np.int64))] = torch.from_numpy(values.copy())
            torch.testing.assert_close(actual, wanted, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", [name for name in CONFIGS if "llama" not in name])
def test_mixed_steps_give_tokens_and_logprobs_of_transformers(name):
    reference = reference_of(name)
    drive = drive_of(reference, HostSampledTriton(CPU))
    prompts = {"a": prompt_of(9), "b": prompt_of(1, 1), "c": prompt_of(17, 2)}
    drive.add("a", prompts["a"], GREEDY)
    drive.step({"a": 9})
    drive.add("b", prompts["b"], GREEDY)
    drive.add("c", prompts["c"], GREEDY)
    drive.step({"c": 5, "a": 1, "b": 1})
    drive.step({"b": 1, "c": 11, "a": 1})
    drive.step({"a": 1, "c": 1})  # the last token of a prompt, alone
    drive.decode("c", "a", "b")
    assert_as_transformers(drive, reference, prompts)


def test_preempted_swapped_and_copied_blocks_keep_their_contents():
    reference = reference_of("llama 9 / 3 heads")
    drive = drive_of(reference, HostSampledTriton(CPU), num_host_blocks=6)
    prompts = {"a": prompt_of(10), "b": prompt_of(6, 1)}
    for name, prompt in prompts.items():
        drive.add(name, prompt, GREEDY)
    drive.step({"a": 10, "b": 6})
    (table,) = drive.plans.lines["a"].tables
    host_ids = [61 + index for index in range(len(table))]
    drive.plans.swap_out = list(zip(table, host_ids, strict=True))
    drive.plans.preempt("a")
    drive.decode("b")
    moved = drive.plans.take_blocks(len(table))
    drive.plans.swap_in = list(zip(host_ids, moved, strict=True))
    drive.plans.resume("a", drive.tokens["a"], tables=[moved], computed=10)
    spoil(drive.runner.storage.pools[0].device_blocks, table)
    drive.step({"b": 1, "a": 1})
    again = drive.plans.take_blocks(1)
    drive.plans.copy = [(moved[0], again[0])]
    drive.plans.update("a", 0, [again])
    drive.decode("a", "b", steps=2)
    assert_as_transformers(drive, reference, prompts)


def test_random_tokens_are_those_of_the_torch_backend():
    reference = reference_of("llama 9 / 3 heads")
    penalised = {"seed": 5, "repetition_penalty": 1.4, "frequency_penalty": 0.3}
    truncated = {"seed": 6, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7}
    tokens = []
    for ops in (TorchOperations(), HostSampledTriton(CPU)):
        drive = drive_of(reference, ops)
        drive.add("a", prompt_of(9), SamplingParams(max_tokens=99, **penalised))
        drive.add("b", prompt_of(4, 1), SamplingParams(max_tokens=99, **truncated))
        drive.step({"b": 3, "a": 9})
        drive.decode("a", "b", steps=2)
        tokens.append(drive.tokens)
    assert tokens[0] == tokens[1]


def bits(drive, name):
    return drive.tokens[name], [each.logprobs for each in drive.logprobs[name]]


@pytest.mark.parametrize(
    "name", ["qwen3, norms of q and k, two groups", "qwen3, experts in one layer"]
)
def test_batch_invariant_neither_chunks_nor_a_crowd_nor_a_preemption_change_a_bit(name):
    """What was decoded before the preemption is computed again as part of a prompt. Alone a token's
    experts have one row each; in the crowd they share tiles with others."""
    reference = reference_of(name)
    ops = HostSampledTriton(CPU, batch_invariant=True)
    alone = drive_of(reference, ops)
    alone.add("a", prompt_of(21), GREEDY)
    alone.step({"a": 21})
    alone.decode("a", steps=3)
    assert_as_transformers(alone, reference, {"a": prompt_of(21)})
    crowd = drive_of(reference, ops)
    crowd.add("a", prompt_of(21), GREEDY)
    for index, other in enumerate("bcd"):
        crowd.add(other, prompt_of(3 + 2 * index, index + 1), GREEDY)
    crowd.step({"c": 4, "b": 3, "a": 5})
    crowd.step({"d": 7, "a": 16, "b": 1})
    crowd.decode("d", "a", "b")
    crowd.plans.preempt("a")
    crowd.step({"b": 1, "c": 1})
    crowd.plans.resume("a", crowd.tokens["a"])
    crowd.step({"d": 1, "a": 23})
    crowd.decode("c", "a")
    assert bits(crowd, "a") == bits(alone, "a")
