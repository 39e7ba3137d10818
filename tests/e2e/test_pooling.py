"""A real daemon that serves text and vectors of one model: LLM against transformers, beside
generation, refusals, and after kill -9."""

import asyncio
import threading

import numpy as np
import pytest
import torch
import transformers
from daemons import running_daemon, slow_program

from frontend import LLM, AsyncLLM, PoolingParams, RequestFailed, RequestRejected, SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = [np.random.default_rng(seed).integers(1, 96, 9 + 60 * seed).tolist() for seed in range(4)]
MEAN = ("--runner", "pooling", "--pooler-config", '{"pooling_type": "MEAN"}')


@pytest.fixture(scope="module")
def expected(tiny_llama):
    """Of each prompt the last hidden states, [T, E]."""
    model = transformers.AutoModel.from_pretrained(tiny_llama, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def assert_alike(vector, wanted):
    vector, wanted = torch.tensor(vector), torch.nn.functional.normalize(wanted, dim=0)
    torch.testing.assert_close(vector, wanted, atol=1e-4, rtol=0)
    assert torch.cosine_similarity(vector, wanted, dim=0) > 0.9999


def test_vectors_are_those_of_transformers_and_the_same_cached_or_beside_text(tiny_llama, expected):
    """Prompts are longer than a step. Proves S023."""
    options = ("--convert", "embed", "--max-num-batched-tokens", "48")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with running_daemon(tiny_llama, *options) as daemon, LLM(address=daemon.address) as llm:
        assert llm.model.tasks == ("generate", "embed", "token_embed")
        first = llm.embed(PROMPTS, use_tqdm=False)
        for found, states in zip(first, expected, strict=True):
            assert_alike(found.outputs.embedding, states[-1])
        alone = llm.generate(PROMPTS, params, use_tqdm=False)
        results = []
        text = threading.Thread(
            target=lambda: results.extend(llm.generate(PROMPTS, params, use_tqdm=False))
        )
        text.start()
        again = llm.embed(PROMPTS * 8, use_tqdm=False)
        text.join()
        for index, found in enumerate(again):
            assert found.outputs.embedding == first[index % 4].outputs.embedding
        assert again[-1].num_cached_tokens >= 176
        assert [a.outputs[0].token_ids for a in results] == [b.outputs[0].token_ids for b in alone]
        raw = PoolingParams(use_activation=False, task="token_embed")
        (tokens,) = llm.encode(PROMPTS[1], raw, use_tqdm=False)
        found = torch.tensor(tokens.outputs.data)
        torch.testing.assert_close(found, expected[1], atol=1e-4, rtol=1e-4)
        check_refusals(llm)


def check_refusals(llm):
    with pytest.raises(ValueError, match="classify, this engine's tasks are generate, embed"):
        llm.classify([1], use_tqdm=False)
    with pytest.raises(RequestRejected, match=r"dimensions is 4.*is_matryoshka"):
        llm.embed([1], PoolingParams(dimensions=4), use_tqdm=False)
    with pytest.raises(RequestFailed, match="reason timeout"):
        llm.embed([PROMPTS[3]] * 200, timeout_s=0.001, use_tqdm=False)
    with pytest.raises(ValueError, match="the limit is 256"):
        llm.embed([1] * 257, use_tqdm=False)
    assert len(llm.embed([1] * 256, use_tqdm=False)) == 1


async def test_a_killed_daemon_gets_unfinished_requests_again(tiny_llama, expected):
    options = ("--max-num-batched-tokens", "16", *MEAN)
    with running_daemon(tiny_llama, *options, program=slow_program(0.05)) as daemon:
        async with AsyncLLM(daemon.address, reconnect_timeout_s=60) as llm:
            assert llm.model.tasks == ("embed", "token_embed")
            waiting = asyncio.create_task(llm.embed(PROMPTS))
            while not (await llm.statistics()).num_running:
                await asyncio.sleep(0.01)
            daemon.kill()
            assert not waiting.done()
            await asyncio.to_thread(daemon.start)
            for found, states in zip(await waiting, expected, strict=True):
                assert_alike(found.outputs.embedding, states.mean(0))
