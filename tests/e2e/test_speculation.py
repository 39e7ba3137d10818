"""Real daemons with drafts and without: equal tokens, log-probabilities and ends, whatever was
asked for; what was drafted is told."""

import random

import msgspec
import pytest
from daemons import running_daemon

from frontend import LLM, SamplingParams

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


def answers(llm, requests):
    outputs = llm.generate(
        [text for text, _ in requests], [params for _, params in requests], use_tqdm=False
    )
    drafts = sum(output.metrics.num_draft_tokens for output in outputs)
    accepted = sum(output.metrics.num_accepted_tokens for output in outputs)
    found = [
        (each.token_ids, each.text, each.finish_reason, each.stop_reason, each.logprobs)
        for output in outputs
        for each in output.outputs
    ]
    return msgspec.json.encode(found), drafts, accepted


def test_no_draft_changes_anything_of_an_answer(smollm2):
    draw = random.Random(0)
    requests = [
        (TEXTS[at % 3], SamplingParams(max_tokens=30, seed=draw.getrandbits(60), **kind))
        for at, kind in enumerate(kinds())
    ]
    options = (smollm2, "--num-blocks", 40, "--max-num-seqs", 6)
    with running_daemon(*options) as daemon, LLM(address=daemon.address) as llm:
        plain, drafts, _ = answers(llm, requests)
        assert drafts == 0
    suffix = (*options, "--speculative", "suffix", "--num-speculative-tokens", 6)
    with running_daemon(*suffix) as daemon, LLM(address=daemon.address) as llm:
        for _ in range(2):  # the second time earlier outputs are known
            drafted, drafts, accepted = answers(llm, requests)
            assert drafted == plain
        assert drafts > accepted > 10
        statistics = llm.statistics()
        assert statistics.num_accepted_tokens > accepted
        assert statistics.num_draft_tokens > drafts
