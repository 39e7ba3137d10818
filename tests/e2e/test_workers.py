"""One model on several workers: an engine of several processes, seen by clients and operators.
Proves S197, S198."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from daemons import running_daemon
from processes import is_running, wait_until_gone

from engine_core.distributed.rendezvous import free_port
from engine_core.errors import ExitCode
from frontend import AsyncLLM, RequestOutputKind, SamplingParams

pytestmark = pytest.mark.slow

LIMIT_S = 300
TOKENS = {"prompt_token_ids": list(range(5, 30))}


def workers_of(daemon):
    return [worker["pid"] for worker in daemon.ready["workers"]]


def left_folders():
    from protocol.addresses import default_socket_folder

    return [
        folder
        for folder in default_socket_folder().glob("workers-*")
        if not is_running(folder.name.split("-")[1])
    ]


async def generated(llm, interrupt=None, **options):
    """`interrupt` is called once, when 5 tokens have come."""
    params = SamplingParams(
        ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA, **options
    )
    tokens = []
    async for output in llm.generate(TOKENS, params):
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
                generated(llm, interrupt if number == 0 else None, max_tokens=24, **way)
                for number, way in enumerate(ways)
            )
        ),
        LIMIT_S,
    )


async def test_two_workers_have_one_workers_tokens_and_leave_nothing(tiny_llama):
    options = ("--dtype", "float32", "--num-blocks", 64)
    with running_daemon(tiny_llama, *options) as daemon:
        assert daemon.ready["workers"] == []
        async with AsyncLLM(daemon.address) as llm:
            expected = await answers(llm)
    with running_daemon(tiny_llama, *options, "-tp", 2) as daemon:
        assert [worker["rank"] for worker in daemon.ready["workers"]] == [1]
        async with AsyncLLM(daemon.address) as llm:
            assert await answers(llm) == expected
            await llm.sleep(level=2)
            await llm.wake_up()
            await llm.update_weights(str(tiny_llama))
            assert await answers(llm) == expected
        assert daemon.stop(LIMIT_S) == ExitCode.DRAINED
        wait_until_gone(*workers_of(daemon))
    assert not left_folders()


async def test_a_group_whose_worker_is_killed_starts_again_and_streams_go_on(tiny_llama):
    options = ("--num-blocks", 64, "-pp", 2, "--supervise")
    with running_daemon(tiny_llama, *options) as daemon:
        (worker,) = workers_of(daemon)
        async with AsyncLLM(daemon.address, reconnect_timeout_s=LIMIT_S) as llm:
            expected = await answers(llm)
            found = await answers(llm, lambda: os.kill(worker, signal.SIGKILL))
            assert found == expected
        assert f"a worker is lost: rank 1 (pid {worker}) was killed by SIGKILL" in daemon.log()
        while "it is started again" not in daemon.log():  # the streams may end before
            await asyncio.sleep(0.05)
        assert daemon.stop(LIMIT_S) == ExitCode.DRAINED


async def test_workers_join_by_address_and_key_and_all_end_with_one(tiny_llama, tmp_path):
    from engine_core.server.keys import KeyFolder

    keys = KeyFolder(tmp_path / "keys")
    keys.make()
    key = keys.add("second-machine", is_admin=True)
    port = free_port("127.0.0.1")
    address = f"tcp://127.0.0.1:{port}"
    program = [sys.executable, "-m", "engine_core.cli", "--join", address, "--keys", str(key)]
    joined = subprocess.Popen(  # before the engine is there
        [*program, "--model", str(tiny_llama)], stderr=subprocess.PIPE, text=True
    )
    options = ("--num-blocks", 64, "-tp", 2, "--num-joining", 1, "--workers-bind", address)
    try:
        with running_daemon(tiny_llama, *options, "--keys", keys.folder) as daemon:
            assert workers_of(daemon) == [joined.pid]
            async with AsyncLLM(daemon.address) as llm:
                tokens, reason, detail = await generated(llm, joined.kill, max_tokens=200)
            assert (reason, len(tokens) < 200) == ("error", True)
            assert f"rank 1 (pid {joined.pid}, joined) is gone, or its network is" in detail
            assert daemon.process.wait(LIMIT_S) == ExitCode.FAULT
    finally:
        joined.kill()
        joined.communicate()
