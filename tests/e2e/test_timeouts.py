"""`timeout_s` on a real engine: a request ends in time with what it has, also after a restart."""

import asyncio
import functools
import os
import signal
import time

import pytest
from daemons import running_daemon, slow_program

from frontend import LLM, AsyncLLM, SamplingParams
from tests.e2e.test_supervise import child_of

PROMPT = {"prompt_token_ids": list(range(5, 30))}


def slow_daemon(model, *options):
    """20 steps a second."""
    return running_daemon(model, "--num-blocks", 64, *options, program=slow_program(0.05))


def params():
    return SamplingParams(max_tokens=200, seed=7, ignore_eos=True, detokenize=False)


async def last_output(stream, interrupt=None):
    """`interrupt` is called at the first one."""
    async for output in stream:
        last = output
        if interrupt is not None:
            interrupt()
            interrupt = None
    return last


async def test_a_request_ends_in_time_with_what_it_has_and_no_other_does(tiny_llama):
    with slow_daemon(tiny_llama) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            other = asyncio.create_task(last_output(llm.generate(PROMPT, params())))
            output = (await last_output(llm.generate(PROMPT, params(), timeout_s=1))).outputs[0]
            assert output.finish_reason == "timeout"
            assert "timeout_s is " in output.detail
            assert 0 < len(output.token_ids) < 21
            assert (await other).outputs[0].finish_reason == "length"
            statistics = await llm.statistics()
            assert (statistics.num_blocks_in_use, statistics.num_finished["timeout"]) == (0, 1)


def test_a_batch_ends_in_time(tiny_llama):
    with slow_daemon(tiny_llama, "--max-num-seqs", 1) as daemon, LLM(address=daemon.address) as llm:
        outputs = llm.generate([PROMPT, PROMPT], params(), False, timeout_s=1)
        running, waiting = (output.outputs[0] for output in outputs)
        assert (running.finish_reason, waiting.finish_reason) == ("timeout", "timeout")
        # the waiting one's time began a moment later, some steps of which may be its own
        assert len(waiting.token_ids) < 5 < len(running.token_ids)


@pytest.mark.parametrize("timeout_s", [0.5, 6.0])
async def test_the_time_before_a_restart_counts(tiny_llama, timeout_s):
    with slow_daemon(tiny_llama, "--supervise") as daemon:
        async with AsyncLLM(daemon.address, reconnect_timeout_s=60) as llm:
            began_s = time.monotonic()
            stream = llm.generate(PROMPT, params(), timeout_s=timeout_s)
            kill = functools.partial(os.kill, child_of(daemon), signal.SIGKILL)
            output = await asyncio.wait_for(last_output(stream, kill), 60)
            assert time.monotonic() - began_s >= timeout_s
            assert output.outputs[0].finish_reason == "timeout"
            assert output.outputs[0].token_ids
            assert output.metrics.num_resumptions == 1
