"""`engine-core --supervise` with real engines: what clients and operators see of a restart."""

import asyncio
import os
import signal
import socket

import pytest
from daemons import run_to_exit, running_daemon
from processes import children_of, maps, wait_until, wait_until_gone
from raw_client import RawClient

from engine_core.errors import ExitCode
from frontend import AsyncLLM, RequestOutputKind, SamplingParams
from frontend.errors import EngineDied, RequestRejected
from protocol.calls import Ping
from protocol.errors import ErrorCode
from protocol.outputs import FinishReason

PROMPT = {"prompt_token_ids": list(range(5, 30))}
OPTIONS = ("--supervise", "--num-blocks", 64, "--max-num-batched-tokens", 16)


def child_of(daemon):
    """Between a death and the next start there is none: streams may have ended by then."""
    return wait_until(lambda: children_of(daemon.process.pid))[0]


def stream(llm):
    return llm.generate(
        PROMPT,
        SamplingParams(
            max_tokens=200,
            seed=7,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        ),
    )


async def tokens_and_reason(llm, interrupt=None):
    """`interrupt` is called once when 20 tokens have come."""
    tokens = []
    async for output in stream(llm):
        tokens += output.outputs[0].token_ids
        if interrupt is not None and len(tokens) >= 20:
            interrupt()
            interrupt = None
    return tokens, output.outputs[0].finish_reason


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
async def test_a_killed_engine_is_back_by_itself_and_streams_go_on(tiny_llama, number):
    with running_daemon(tiny_llama, *OPTIONS) as daemon:
        async with AsyncLLM(daemon.address, reconnect_timeout_s=60) as llm:
            expected, reason = await tokens_and_reason(llm)
            assert (len(expected), reason) == (200, "length")
            first = child_of(daemon)

            def kill():
                os.kill(first, number)
                wait_until_gone(first)

            streams = [tokens_and_reason(llm, kill if n == 0 else None) for n in range(3)]
            for outcome in await asyncio.wait_for(asyncio.gather(*streams), 60):
                assert outcome == (expected, "length")
            assert child_of(daemon) != first
        assert f"the engine died (killed by {number.name}); it is started again" in daemon.log()
        assert daemon.stop() == ExitCode.DRAINED


def test_sigterm_to_the_parent_drains_the_engine_and_both_end(tiny_llama):
    with running_daemon(tiny_llama, *OPTIONS) as daemon, RawClient(daemon.address) as client:
        child = child_of(daemon)
        client.request("long", PROMPT["prompt_token_ids"], max_tokens=200)
        client.call(Ping())
        daemon.process.terminate()
        tokens, end = client.collect("long")["long"]
        assert (len(tokens), end.finish_reason) == (200, FinishReason.LENGTH)
        assert daemon.process.wait(30) == ExitCode.DRAINED
        wait_until_gone(child)


def test_a_killed_parent_leaves_nothing_behind(tiny_llama):
    with running_daemon(tiny_llama, *OPTIONS) as daemon:
        child = child_of(daemon)
        daemon.kill()
        wait_until_gone(child)
        daemon.start()
        assert daemon.stop() == ExitCode.DRAINED


def test_the_parent_is_small(tiny_llama):
    program = ("-m", "engine_core.cli")
    with running_daemon(tiny_llama, *OPTIONS, program=program) as daemon:
        assert not maps(daemon.process.pid, "torch")
        assert not maps(daemon.process.pid, "numpy")
        assert maps(child_of(daemon), "torch")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--model", "/no/such/folder"], ExitCode.START_FAILED),
        (["--model", "x", "--preemption-mode", "swap"], ExitCode.WRONG_OPTIONS),
        (["--no-such-option"], ExitCode.WRONG_OPTIONS),
    ],
)
def test_what_cannot_work_is_not_tried_again(arguments, code):
    done = run_to_exit("--supervise", *arguments)
    assert done.returncode == code
    assert "started again" not in done.stderr


def test_restarts_without_a_supervisor_are_refused():
    done = run_to_exit("--model", "x", "--max-restarts", 3)
    assert done.returncode == ExitCode.WRONG_OPTIONS
    assert "--max-restarts has no effect without --supervise" in done.stderr


KILLER = """
import os, signal
from engine_core.executor import InProcessExecutor

submit = InProcessExecutor.submit

def die_of_77(self, plan):
    if any(new.prompt_token_ids[0] == 77 for new in plan.scheduled_new_reqs):
        os.kill(os.getpid(), signal.SIGSEGV)
        signal.pause()
    submit(self, plan)

InProcessExecutor.submit = die_of_77
from engine_core.cli import main
main()
"""


async def test_a_request_that_kills_the_engine_is_refused_alone_and_the_others_live(tiny_llama):
    options = ("--supervise", "--num-blocks", 64)
    params = SamplingParams(max_tokens=150, seed=7, ignore_eos=True, detokenize=False)

    async def last(llm, first):
        prompt = {"prompt_token_ids": [first, *range(5, 30)]}
        output = [output async for output in llm.generate(prompt, params)][-1]
        return output.outputs[0].token_ids, output.outputs[0].finish_reason

    with running_daemon(tiny_llama, *options, program=("-c", KILLER)) as daemon:
        async with AsyncLLM(daemon.address, reconnect_timeout_s=60) as llm:
            expected = [await last(llm, first) for first in (1, 2, 3)]
            tasks = [asyncio.create_task(last(llm, first)) for first in (1, 2, 3, 77)]
            outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 90)
            assert outcomes[:3] == expected
            assert isinstance(outcomes[3], RequestRejected)
            assert outcomes[3].code is ErrorCode.KILLED_ENGINE
            with pytest.raises(RequestRejected, match="the engine died in each step"):
                await last(llm, 77)
            assert await last(llm, 2) == expected[1]
        assert daemon.log().count("the engine died (killed by SIGSEGV)") == 3


async def test_an_engine_of_ones_own_under_supervise_is_back_and_streams_go_on(tiny_llama):
    llm = await AsyncLLM.launch(str(tiny_llama), supervise=True, num_blocks=64, max_restarts=1)
    try:
        expected, reason = await tokens_and_reason(llm)
        supervisor = llm._children[llm.address].pid

        def kill():
            engines = wait_until(lambda: children_of(supervisor))  # it waits before the next start
            os.kill(engines[0], signal.SIGSEGV)
            wait_until_gone(engines[0])  # to kill it once more would be no second death

        assert await asyncio.wait_for(tokens_and_reason(llm, kill), 60) == (expected, reason)
        kill()
        wait_until_gone(supervisor)
        with pytest.raises(EngineDied, match=r"exit code 4(.|\n)*after 1 restarts"):
            await asyncio.wait_for(tokens_and_reason(llm), 30)
    finally:
        await llm.close()


def test_systemd_hears_of_a_real_engine_from_its_parent(tiny_llama, tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(f"\0{tmp_path}")
        systemd.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{tmp_path}")
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")

        def next_message(begin):
            while not (message := systemd.recv(4096).decode()).startswith(begin):
                assert message.startswith("WATCHDOG=1")
            return message

        with running_daemon(tiny_llama, *OPTIONS) as daemon:
            status = next_message("READY=1").partition("STATUS=")[2]
            assert status == f"serving {tiny_llama.name} at {daemon.address}"
            for _ in range(3):
                next_message("WATCHDOG=1")
            os.kill(child_of(daemon), signal.SIGSTOP)  # it hangs
            with pytest.raises(TimeoutError):
                systemd.settimeout(3)
                for _ in range(10):
                    systemd.recv(4096)
            os.kill(child_of(daemon), signal.SIGKILL)
            systemd.settimeout(60)
            next_message("READY=1")
            assert daemon.stop() == ExitCode.DRAINED
            assert "SIGTERM" in next_message("STOPPING=1")
