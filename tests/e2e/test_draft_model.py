"""SmolLM2 in float32 with drafts of the same model in 4 bits: the tokens of an engine without."""

import pytest
from daemons import running_daemon

from frontend import LLM, SamplingParams

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZES = ("--dtype", "float32", "--max-model-len", 256, "--num-blocks", 64)
PROMPTS = ["Once upon a time", "def fibonacci(n):\n", "The capital of France is"]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0.0),
    SamplingParams(max_tokens=40, temperature=1.0, seed=3, n=2, repetition_penalty=1.2),
    SamplingParams(max_tokens=40, temperature=0.8, seed=4, top_p=0.9, logprobs=1, stop=["river"]),
]


def answers(llm):
    results = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [[(part.token_ids, part.text) for part in result.outputs] for result in results]


def test_tokens_are_those_without_drafts_also_after_a_sleep(smollm2):
    with running_daemon(smollm2, *SIZES) as daemon, LLM(address=daemon.address) as llm:
        expected = answers(llm)
    drafts = ("--speculative", "draft", "--draft-model", smollm2, "--num-speculative-tokens", 3)
    with running_daemon(smollm2, *SIZES, *drafts) as daemon, LLM(address=daemon.address) as llm:
        assert answers(llm) == expected
        llm.sleep(2)
        llm.wake_up()
        assert answers(llm) == expected
        seen = llm.statistics()
    assert seen.num_draft_tokens > 0
    assert seen.num_accepted_tokens > 0.7 * seen.num_draft_tokens
