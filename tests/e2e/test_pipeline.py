"""One model in stages, seen by a client: the tokens of one worker, also where four ranks share it,
prompts are chunked and cached, blocks are short, and a request is aborted."""

import asyncio

import pytest
from daemons import running_daemon
from test_workers import LIMIT_S, workers_of

from engine_core.errors import ExitCode
from frontend import AsyncLLM, RequestOutputKind, SamplingParams

pytestmark = pytest.mark.slow

WAYS = (
    {"temperature": 0.0},
    {"seed": 5},
    {"seed": 6, "top_p": 0.9, "top_k": 40},
    {"seed": 7, "n": 3},
    {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.2},
)
OPTIONS = ("--dtype", "float32", "--block-size", 8, "--max-num-batched-tokens", 32)
PREFIX = list(range(40, 64))


async def answers(llm):
    """Prompts that share a prefix, some longer than a step. The last one is not read to its end."""

    async def answer(number):
        prompt = PREFIX[: 8 * (number % 4)] + [(7 * number + place) % 90 + 3 for place in range(30)]
        params = SamplingParams(
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
            max_tokens=20,
            **WAYS[number % len(WAYS)],
        )
        found = []
        async for output in llm.generate({"prompt_token_ids": prompt}, params):
            if number == 10:
                break
            found = [list(each.token_ids) for each in output.outputs]
        return found

    return await asyncio.wait_for(asyncio.gather(*map(answer, range(11))), LIMIT_S)


async def test_stages_and_ranks_give_the_tokens_of_one_worker(tiny_llama):
    async def tokens_of(*options):
        with running_daemon(tiny_llama, *OPTIONS, *options) as daemon:
            async with AsyncLLM(daemon.address) as llm:
                found = [await answers(llm), await answers(llm)]
                statistics = await llm.statistics()
            assert daemon.stop(LIMIT_S) == ExitCode.DRAINED
            return found, statistics, len(workers_of(daemon))

    expected, *_ = await tokens_of("--num-blocks", 400)
    found, statistics, num_workers = await tokens_of("--num-blocks", 60, "-pp", 2, "-tp", 2)
    assert found == expected
    assert num_workers == 3
    assert statistics.num_preemptions > 0
    assert statistics.num_cached_prompt_tokens > 0
