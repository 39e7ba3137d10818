"""A stream outlives the daemon: killed and started again, it goes on where it stopped."""

import asyncio

import pytest
from daemons import running_daemon

from frontend import AsyncLLM, RequestOutputKind, SamplingParams
from frontend.errors import EngineDied, EngineUnavailable

PROMPT = {"prompt_token_ids": list(range(5, 30))}
CHAINED = {
    "xtc_probability": 0.5, "xtc_threshold": 0.001, "dry_multiplier": 1.0, "dry_allowed_length": 1,
    "dry_sequence_breakers": [], "repetition_penalty": 1.5, "repeat_last_n": 20,
    "dynatemp_range": 0.5,
}  # fmt: skip
OPTIONS = ("--num-blocks", 64, "--max-num-batched-tokens", 16)


def parameters(**changes):
    return SamplingParams(
        **{"max_tokens": 200, "seed": 7, "ignore_eos": True, "detokenize": False,
           "output_kind": RequestOutputKind.DELTA} | changes
    )  # fmt: skip


async def stream(llm, params, after_tokens=None, interrupt=None):
    """All tokens of a request; `interrupt` is called once when `after_tokens` have come."""
    tokens = []
    async for output in llm.generate(PROMPT, params):
        tokens += output.outputs[0].token_ids
        if interrupt is not None and len(tokens) >= after_tokens:
            interrupt()
            interrupt = None
    return tokens


@pytest.mark.parametrize(
    ("temperature", "more"), [(0.0, ("--speculative", "suffix")), (1.0, ())], ids=str
)
async def test_a_killed_daemon_that_comes_back_goes_on_with_the_same_tokens(
    tiny_llama, temperature, more
):
    """With drafts too, which do not survive it, or with samplers that look at what was said."""
    few = {"allowed_token_ids": [11, 12, 13]}  # which come in runs
    params = parameters(temperature=temperature, **few if more else CHAINED)
    with running_daemon(tiny_llama, *OPTIONS, *more) as daemon:
        async with AsyncLLM(daemon.address, reconnect_timeout_s=60) as llm:
            expected = await stream(llm, params)
            assert len(expected) == 200
            task = asyncio.create_task(stream(llm, params, 20, daemon.kill))
            while daemon.process.poll() is None:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(daemon.start)
            assert await asyncio.wait_for(task, 60) == expected
            seen = await llm.statistics()
            assert seen.num_generated_tokens < 200
            # some; how many, and whether one is right, follows from how long steps take
            assert (seen.num_draft_tokens > 0) == bool(more)


async def test_streams_resume_though_they_are_more_than_the_queue_takes(tiny_llama):
    options = (*OPTIONS, "--max-num-seqs", 2, "--max-queued-requests", 4)
    params = parameters(max_tokens=100)
    with running_daemon(tiny_llama, *OPTIONS) as daemon:
        async with AsyncLLM(daemon.address, reconnect_timeout_s=60) as llm:
            tasks = [
                asyncio.create_task(stream(llm, params, 5, daemon.process.kill)) for _ in range(8)
            ]
            await asyncio.to_thread(daemon.process.wait)
            await asyncio.to_thread(daemon.start, options=options)
            answers = await asyncio.wait_for(asyncio.gather(*tasks), 60)
            assert [len(tokens) for tokens in answers] == [100] * 8


async def test_a_daemon_that_stays_away_ends_its_streams_with_an_error(tiny_llama):
    with running_daemon(tiny_llama, *OPTIONS) as daemon:
        async with AsyncLLM(daemon.address, reconnect_timeout_s=0.5) as llm:
            with pytest.raises(EngineDied, match="ipc://"):
                await stream(llm, parameters(), after_tokens=5, interrupt=daemon.process.kill)


async def test_no_daemon_at_all_is_said_at_once_with_the_next_action(tmp_path):
    with pytest.raises(EngineUnavailable, match="start one with `engine-core"):
        await AsyncLLM.connect(f"ipc://{tmp_path}/nobody.sock")


async def test_leaving_a_stream_early_frees_its_blocks(tiny_llama):
    with running_daemon(tiny_llama, *OPTIONS) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            async for _ in llm.generate(PROMPT, parameters()):
                break
            for _ in range(200):
                statistics = await llm.statistics()
                if not statistics.num_running:
                    break
                await asyncio.sleep(0.01)
            assert statistics.num_blocks_in_use == 0
            assert statistics.num_finished["abort"] == 1
