"""Real daemons with drafts and without: equal tokens, log-probabilities and ends, whatever was
asked for; what was drafted is told. Weights of 4 bits, a cache of 8."""

import json
import random

import msgspec
import pytest
import torch
from daemons import running_daemon
from safetensors.torch import save_file

from frontend import LLM, SamplingParams
from frontend.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.slow

TEXTS = [
    "One, two, three, four. One, two, three, four. One, two,",
    "The cat sat on the mat. The dog sat on the mat. The cow sat on",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n",
]


def kinds():
    """Greedy and sampled requests of all kinds, each with a seed."""
    yield {"temperature": 0.0}
    yield {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 2}
    yield {"temperature": 0.0, "stop": ["\n", " five"]}
    yield {"temperature": 0.4, "top_p": 0.9, "frequency_penalty": 0.3}
    yield {"temperature": 0.3, "min_p": 0.1, "logit_bias": {260: 2.0}, "min_tokens": 20}
    yield {"temperature": 0.2, "n": 3, "top_k": 20, "presence_penalty": 0.2, "logprobs": 0}
    rows = StructuredOutputsParams(regex=r"(one, two, [a-z]{3,6}\. ){1,9}")
    yield {"temperature": 0.7, "structured_outputs": rows}


@pytest.fixture
def adapter(tmp_path):
    """Of SmolLM2's shape, for its queries."""
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for layer in range(30):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, 576, generator=generator) * 0.05
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(576, 4, generator=generator) * 0.05
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


def answers(llm, requests):
    outputs = llm.generate(
        [text for text, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    greedy = SamplingParams(max_tokens=30, temperature=0.0)
    outputs += llm.generate(TEXTS, greedy, use_tqdm=False, adapter="ann")
    drafts = sum(output.metrics.num_draft_tokens for output in outputs)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    found = [
        (each.token_ids, each.text, each.finish_reason, each.stop_reason, [*(each.logprobs or ())])
        for output in outputs
        for each in output.outputs
    ]
    return msgspec.json.encode(found), drafts, accepted


def test_no_draft_changes_anything_of_an_answer(smollm2, adapter):
    draw = random.Random(0)
    requests = [
        (TEXTS[at % 3], SamplingParams(max_tokens=30, seed=draw.getrandbits(60), **kind))
        for at, kind in enumerate(kinds())
    ]
    options = (smollm2, "--num-blocks", 40, "--max-num-seqs", 6, "--adapter", f"ann={adapter}")
    options += ("--quantization", "int4", "--kv-cache-dtype", "int8")
    with running_daemon(*options) as daemon, LLM(address=daemon.address) as llm:
        plain, _, _ = answers(llm, requests)
        assert [*llm.statistics().num_draft_tokens_by_method] == ["grammar"]  # forced ones
    suffix = (*options, "--speculative", "suffix", "--num-speculative-tokens", 6)
    with running_daemon(*suffix) as daemon, LLM(address=daemon.address) as llm:
        accepted = 0
        for number in range(8):  # from the second time on earlier outputs are known
            drafted, drafts, accepted = answers(llm, requests)
            assert drafted == plain
            if number and accepted > 10:  # how many are worth their price depends on the machine
                break
        assert drafts >= accepted > 0
        statistics = llm.statistics()
        assert statistics.num_accepted_tokens > accepted
        assert statistics.num_draft_tokens > drafts
        assert statistics.num_draft_tokens_by_method["suffix"] > 0
        assert statistics.num_accepted_tokens_by_method["grammar"] > 0
