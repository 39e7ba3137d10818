"""One model on several workers: an engine of several processes, seen by clients and operators."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from daemons import running_daemon

from engine_core.errors import ExitCode
from frontend import AsyncLLM, RequestOutputKind, SamplingParams

pytestmark = pytest.mark.slow

LIMIT_S = 300
TEXT = "The capital of France is Paris. The capital of Italy is"


def wait_until_gone(pids):
    deadline_s = time.monotonic() + LIMIT_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline_s, f"of {pids} some live on"
        time.sleep(0.01)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers_of(daemon):
    return [worker["pid"] for worker in daemon.ready["workers"]]


def left_folders():
    from protocol.addresses import default_socket_folder

    return [
        folder
        for folder in default_socket_folder().glob("workers-*")
        if not is_alive(folder.name.split("-")[1])
    ]


async def generated(llm, prompt=TEXT, interrupt=None, **options):
    """`interrupt` is called once, when 5 tokens have come."""
    params = SamplingParams(ignore_eos=True, output_kind=RequestOutputKind.DELTA, **options)
    tokens = []
    async for output in llm.generate(prompt, params):
        tokens += output.outputs[0].token_ids
        if interrupt is not None and len(tokens) >= 5:
            interrupt()
            interrupt = None
    return tokens, output.outputs[0].finish_reason, output.outputs[0].detail


async def answers(llm, interrupt=None):
    ways = ({"temperature": 0.0}, {"seed": 5}, {"seed": 6, "top_p": 0.9, "top_k": 40})
    return await asyncio.wait_for(
        asyncio.gather(
            *(
                generated(llm, interrupt=interrupt if number == 0 else None, max_tokens=24, **way)
                for number, way in enumerate(ways)
            )
        ),
        LIMIT_S,
    )


async def test_three_workers_have_one_workers_tokens_also_when_one_is_killed(smollm2):
    options = ("--dtype", "float32", "--num-blocks", 64, "--max-model-len", 256)
    with running_daemon(smollm2, *options) as daemon:
        assert daemon.ready["workers"] == []
        async with AsyncLLM(daemon.address) as llm:
            expected = await answers(llm)
    with running_daemon(smollm2, *options, "-tp", 3, "--supervise") as daemon:
        first = workers_of(daemon)
        assert [worker["rank"] for worker in daemon.ready["workers"]] == [1, 2]
        async with AsyncLLM(daemon.address, reconnect_timeout_s=LIMIT_S) as llm:
            found = await answers(llm, lambda: os.kill(first[1], signal.SIGKILL))
        assert found == expected
        wait_until_gone(first)
        assert "a worker is lost: rank 2" in daemon.log()
        assert "was killed by SIGKILL" in daemon.log()
        assert "it is started again" in daemon.log()
        assert daemon.stop(LIMIT_S) == ExitCode.DRAINED
    assert not left_folders()
