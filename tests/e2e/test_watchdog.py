"""A real engine whose step hangs: reported, ended, started again, and its streams go on."""

import asyncio
import re
from pathlib import Path

from daemons import running_daemon

from engine_core.errors import ExitCode
from frontend import AsyncLLM, SamplingParams

HANGS = """
import os, sys, time
from pathlib import Path
from engine_core.executor import InProcessExecutor

flag = Path(sys.argv.pop(1))
submit = InProcessExecutor.submit

def hang(self, plan):
    if plan.total_num_scheduled_tokens and flag.exists():
        flag.unlink()
        time.sleep(600)
    time.sleep(0.01)  # the client is not behind when it asks for the hang
    submit(self, plan)

InProcessExecutor.submit = hang
from engine_core.cli import main
main()
"""


def hanging_daemon(model, flag, *options):
    return running_daemon(
        model, "--num-blocks", 64, "--watchdog-timeout", 1, *options, program=("-c", HANGS, flag)
    )


def request(llm):
    params = SamplingParams(max_tokens=50, seed=7, ignore_eos=True, detokenize=False)
    return llm.generate({"prompt_token_ids": list(range(5, 30))}, params)


async def tokens_of(llm, hang=lambda: None):
    async for output in request(llm):
        if hang is not None and len(output.outputs[0].token_ids) >= 10:
            hang()
            hang = None
    return output.outputs[0].token_ids


async def test_under_supervise_a_hung_engine_is_started_again_and_streams_go_on(
    tiny_llama, tmp_path
):
    flag = tmp_path / "hang"
    with hanging_daemon(tiny_llama, flag, "--supervise") as daemon:
        async with AsyncLLM(daemon.address, reconnect_timeout_s=60) as llm:
            expected = await tokens_of(llm)
            assert await asyncio.wait_for(tokens_of(llm, flag.touch), 60) == expected
        assert "the engine died (exit code 5); it is started again" in daemon.log()
        [path] = re.findall(r"stacks and numbers are in (\S+); the engine ends", daemon.log())
        report = Path(path).read_text()
        Path(path).unlink()
        assert "in hang" in report  # where the loop stands
        assert re.search(r"step \d+: 1 tokens: 1-\w+ 1\n", report)
        assert "num_running=1" in report
        assert daemon.stop() == ExitCode.DRAINED


def reports_of(daemon):
    return re.findall(r"stacks and numbers are in (\S+); it waits on", daemon.log())


async def test_alone_it_is_reported_once_and_waits_on(tiny_llama, tmp_path):
    flag = tmp_path / "hang"
    flag.touch()
    with hanging_daemon(tiny_llama, flag) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            task = asyncio.create_task(tokens_of(llm))
            while not (paths := reports_of(daemon)):
                await asyncio.sleep(0.05)
            await asyncio.sleep(2)
            task.cancel()
        assert reports_of(daemon) == paths
        Path(paths[0]).unlink()
        assert daemon.process.poll() is None


async def test_a_ping_says_the_last_step_and_its_age(tiny_llama):
    with running_daemon(tiny_llama, "--num-blocks", 64) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            assert (await llm.ping()).step_id == -1
            await tokens_of(llm)
            await asyncio.sleep(1)
            pong = await llm.ping()
            assert pong.step_id >= 49
            assert 0 <= pong.progress_age_s < 0.9 < pong.uptime_s  # idle is progress
