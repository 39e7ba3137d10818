"""Models whose layers keep unlike things, some of them a state, give the tokens of transformers,
however the engine cuts its steps and whatever it takes from its cache."""

import dataclasses

import pytest
import torch
from drafting_loop import DraftingLoop
from engine_loop import EngineLoop, make_scheduler
from runners import load_reference, runner_config, spoiled
from test_output_rows import Watched

from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.models.layer_cache import NoCache
from kernels.backends import select_operations
from kernels.torch.operations import TorchOperations
from protocol.sampling import SamplingParams
from tests.engine_core.models import decoder_cases, hybrid_cases, latent_cases, qwen_hybrid_cases

NUM_TOKENS = 11
FEW = 14
"""Blocks for each group: the longest request takes 9."""
BACKENDS = {"native": lambda: select_operations(torch.device("cpu")), "torch": TorchOperations}


def greedy(reference, prompt):
    """transformers' tokens, each from a forward of all before it."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            best = reference(torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
            assert best.values[0] - best.values[1] > 1e-3, "two are as good"
            tokens.append(int(best.indices[0]))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("name", "chunk", "backend", "drafted"),
    [
        ("granite, dense", 7, "native", False),
        ("granite, experts, angles, tied", 23, "native", False),
        ("lfm2, tied", 7, "native", False),
        ("lfm2, biases, width of 4", 23, "torch", False),
        ("lfm3, tied", 23, "native", True),
        ("lfm3, biases, no gates", 7, "native", False),
        ("lfm2-moe", 23, "native", False),
        ("nemotron-h, Mamba first and last", 23, "native", False),
        ("nemotron-h, a feed-forward first and last, biases, one group", 7, "native", False),
        ("nemotron-h, attention first and last", 23, "torch", False),
        ("nemotron-h, experts in groups and a latent space", 23, "native", False),
        ("bamba", 7, "torch", False),
        ("bamba, biases, tied", 23, "native", False),
        ("falcon-h1", 7, "native", False),
        ("falcon-h1, biases, no norm, tied", 23, "torch", True),
        ("minimax", 23, "native", True),
        ("minimax, attention last, tied", 7, "torch", False),
        ("kimi-linear", 23, "native", True),
        ("kimi-linear, attention last, groups", 7, "native", False),
        ("qwen3.5", 7, "native", False),
        ("qwen3.5", 23, "torch", True),
        ("qwen3.5, attention last, tied, biases", 23, "native", True),
        ("qwen3.5 with experts", 7, "native", False),
        ("qwen3-next, a dense layer", 23, "native", False),
        ("glm4_moe, groups, biases, tied", 7, "native", True),
        ("minimax_m2", 23, "native", False),
        ("minicpm3", 7, "native", False),
        ("minicpm3, whole queries, untied, YaRN", 23, "torch", True),
        ("gemma4 keys are values, untied, biases", 7, "native", True),
        ("deepseek-v2, lite", 7, "native", True),
        ("deepseek-v2, groups, YaRN, all sparse, tied", 23, "torch", False),
        ("deepseek-v3, YaRN", 23, "native", True),
        ("glm-4.7-flash", 7, "native", False),
        ("gemma4 embeddings per layer, shared keys", 23, "native", False),
        ("gemma4 with experts", 7, "native", False),
        ("gemma3n", 7, "native", True),
        ("gemma3n three streams, untied, biases", 23, "torch", False),
    ],
)
def test_tokens_are_those_of_transformers(name, chunk, backend, drafted):
    """With few blocks, so that requests are preempted, hits, three sequences of a prompt, and right
    and wrong drafts."""
    among = (decoder_cases, hybrid_cases, latent_cases, qwen_hybrid_cases)
    cases = next(each for each in among if name in each.CONFIGS)
    reference, ops = cases.reference_model(name), BACKENDS[backend]()
    tensors = hybrid_cases.published(reference) if name.startswith("kimi") else None
    generator = torch.Generator().manual_seed(1)
    first = torch.randint(8, 131, (25,), generator=generator).tolist()
    second = torch.randint(8, 131, (21,), generator=generator).tolist()
    prompts = {"a": first, "b": [*first, 9, 10], "c": first[3:12], "d": second, "e": first}
    expected = {
        (request, index): greedy(reference, prompt)
        for request, prompt in prompts.items()
        for index in range(3 if request == "c" else 1)
    }
    limits = {"max_num_batched_tokens": chunk, "max_num_seqs": 6, "max_model_len": 64}
    model = Watched(load_reference(reference, ops, tensors))
    config = runner_config(model, ops, **limits)
    pools = [spec.pool for spec in config.layout.group_specs]
    sizes = {
        "num_blocks": tuple(FEW * pools.count(pool) for pool in sorted({*pools})),
        "num_host_blocks": config.layout.sizes(0),
    }
    runner = spoiled(CPUModelRunner(dataclasses.replace(config, **sizes)))
    lookahead = {"num_speculative_tokens": 5, "num_lookahead_slots": 5} if drafted else {}
    scheduler = make_scheduler(config.layout, swap=False, **sizes, **limits, **lookahead)
    loop = EngineLoop(scheduler, runner, depth=1)
    if drafted:
        loop = DraftingLoop(scheduler, runner, depth=1, answers=expected, vocab_size=131, seed=0)
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    for request, prompt in prompts.items():
        loop.add(request, prompt, params, num_sequences=3 if request == "c" else 1)
        loop.step()
        loop.step()
        if request == "a":
            loop.finish()
    loop.finish()
    assert loop.num_cached_tokens["b"] == 24
    assert loop.tokens == expected
    keeps_nothing = isinstance(model.spec.layers[-1], NoCache)
    assert keeps_nothing != any(rows < tokens for tokens, rows in model.passes)
    if drafted:  # so that requests end before blocks run short
        assert loop.num_drafted > loop.num_accepted > 20
    elif not name.startswith(("lfm", "gemma")):  # whose one pool has room: states leave it to keys
        assert loop.scheduler.pool.counters.num_preemptions
