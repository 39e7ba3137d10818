"""Steps of a real runner that fail: because of one request, of too much at once, or for good."""

import asyncio

import pytest
from daemons import running_daemon

from engine_core.errors import ExitCode
from frontend import AsyncLLM, SamplingParams

pytestmark = pytest.mark.slow

FAULTY = """
import os, sys
from pathlib import Path
import torch
from engine_core.model_runner.cpu.runner import CPUModelRunner

flag = Path(sys.argv.pop(1))
sample, submit = CPUModelRunner._sample, CPUModelRunner.submit

def fail(self, plan, inputs, hidden_TE):
    rows = plan.batch.rows
    if 77 in self.batch.token_ids[rows, 0]:
        raise ValueError("77 comes first")
    if ((self.batch.token_ids[rows, 0] == 78) & (self.batch.num_tokens[rows] > 40)).any():
        raise torch.OutOfMemoryError("40 tokens are too many")
    if flag.exists():
        if flag.read_text() == "once":
            flag.unlink()
        raise RuntimeError("the device is gone")
    return sample(self, plan, inputs, hidden_TE)

CPUModelRunner._sample = fail
from engine_core.cli import main
main()
"""


async def last(llm, first, **options):
    params = SamplingParams(
        max_tokens=60, temperature=1.0, seed=7, ignore_eos=True, detokenize=False, **options
    )
    prompt = {"prompt_token_ids": [first, *range(5, 30)]}
    output = [output async for output in llm.generate(prompt, params)][-1]
    return [(o.token_ids, o.finish_reason, o.detail) for o in output.outputs]


def faulty_daemon(model, flag, *options):
    return running_daemon(model, "--num-blocks", 64, *options, program=("-c", FAULTY, flag))


async def test_only_the_requests_that_make_steps_fail_end_and_the_others_have_their_tokens(
    tiny_llama, tmp_path
):
    with faulty_daemon(tiny_llama, tmp_path / "flag") as daemon:
        async with AsyncLLM(daemon.address) as llm:
            expected = [await last(llm, first, n=1 + first % 2) for first in range(1, 9)]
            asked = [last(llm, first, n=1 + first % 2) for first in range(1, 9)]
            others = [last(llm, 77), last(llm, 78, n=2)]
            *found, by_value, by_memory = await asyncio.wait_for(
                asyncio.gather(*asked, *others), 60
            )
            assert found == expected
            assert [(len(tokens), reason) for tokens, reason, _ in by_value] == [(0, "error")]
            assert by_value[0][2] == "the step failed: ValueError: 77 comes first"
            assert len(by_memory[0][0]) == 15, "what came before is delivered"
            for _, reason, detail in by_memory:
                assert reason == "error"
                assert detail == "the step failed: OutOfMemoryError: 40 tokens are too many"
            assert await last(llm, 2) == expected[1]
            statistics = await llm.statistics()
            assert statistics.num_blocks_in_use == statistics.num_running == 0
        assert daemon.stop() == ExitCode.DRAINED


async def test_a_fault_that_comes_once_ends_nobody(tiny_llama, tmp_path):
    flag = tmp_path / "flag"
    with faulty_daemon(tiny_llama, flag) as daemon:
        async with AsyncLLM(daemon.address) as llm:
            expected = [await last(llm, first) for first in range(1, 5)]
            flag.write_text("once")
            assert await asyncio.gather(*(last(llm, first) for first in range(1, 5))) == expected
            assert not flag.exists()
        assert "the device is gone" in daemon.log()


@pytest.mark.parametrize("options", [("--supervise",), ()])
async def test_a_device_that_is_gone_loses_nothing_under_supervise(tiny_llama, tmp_path, options):
    flag = tmp_path / "flag"

    with faulty_daemon(tiny_llama, flag, *options) as daemon:
        async with AsyncLLM(daemon.address, reconnect_timeout_s=60) as llm:
            expected = [await last(llm, first) for first in range(1, 6)]
            flag.write_text("for good")
            tasks = [asyncio.create_task(last(llm, first)) for first in range(1, 6)]
            while "steps fail whatever they hold" not in daemon.log():
                await asyncio.sleep(0.01)
            flag.unlink()  # the next engine has another device
            outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 90)
        if options:
            assert outcomes == expected
            assert daemon.log().count("the engine died (exit code 1)") == 1
            assert daemon.stop() == ExitCode.DRAINED
        else:
            assert daemon.process.wait(30) == ExitCode.FAULT
            assert {(reason, detail.split(":")[1]) for ((_, reason, detail),) in outcomes} == {
                ("error", " DeviceFault")
            }
