"""A daemon keeps its bounds: clients, descriptors, sizes of messages, slow readers."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import zmq
from daemons import run_to_exit, running_daemon
from processes import wait_until
from raw_client import RawClient

from frontend import AsyncLLM, SamplingParams, TooManyClients

pytestmark = pytest.mark.slow

PROMPT = {"prompt_token_ids": [1, 2, 3]}


def with_few_descriptors(hard):
    """A program that is the daemon under that hard limit."""
    code = f"import resource, runpy; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard})); "
    return ("-c", code + "runpy.run_module('engine_core.cli', run_name='__main__')")


def num_descriptors(daemon):
    return len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))


async def test_a_client_too_many_is_told_the_limit_and_may_come_when_another_has_left(tiny_llama):
    with running_daemon(tiny_llama, "--num-blocks", 64, "--max-clients", 2) as daemon:
        async with AsyncLLM(daemon.address) as first:
            async with AsyncLLM(daemon.address):
                with pytest.raises(TooManyClients, match=r"2 clients .* the limit is 2; close one"):
                    await AsyncLLM.connect(daemon.address)
                assert (await first.statistics()).num_clients == 2
            while (await first.statistics()).num_clients == 2:
                await asyncio.sleep(0.01)  # a goodbye and the next hello take two connections
            async with AsyncLLM(daemon.address) as third:
                assert (await third.statistics()).num_clients == 2


def test_50_clients_that_join_and_leave_leave_no_descriptor(tiny_llama):
    with (
        running_daemon(tiny_llama, "--num-blocks", 64) as daemon,
        RawClient(daemon.address) as observer,
    ):
        observer.complete([1, 2, 3])
        before = num_descriptors(daemon)
        for wave in range(5):
            with contextlib.ExitStack() as clients:
                for number in range(10):
                    client = clients.enter_context(RawClient(daemon.address))
                    client.complete([1, 2, 3], request_id=f"{wave}.{number}")
        wait_until(lambda: num_descriptors(daemon) <= before)
        wait_until(lambda: observer.statistics().num_clients == 1)


def test_more_connections_than_descriptors_do_not_end_the_daemon(tiny_llama):
    """Connected ones go on, and others find a place when there is one again."""
    program = with_few_descriptors(512)
    with running_daemon(tiny_llama, "--num-blocks", 64, program=program) as daemon:
        limits = Path(f"/proc/{daemon.process.pid}/limits").read_text()
        (line,) = (line for line in limits.splitlines() if line.startswith("Max open files"))
        assert line.split()[3:5] == ["512", "512"], "the soft limit is the hard one"
        with RawClient(daemon.address) as early, zmq.Context() as context:
            context.set(zmq.MAX_SOCKETS, 2000)
            with contextlib.ExitStack() as many:
                for _ in range(600):
                    socket = many.enter_context(context.socket(zmq.DEALER))
                    socket.setsockopt(zmq.LINGER, 0)
                    socket.connect(daemon.address)
                wait_until(lambda: "descriptors are in use, the limit is 512" in daemon.log())
                assert len(early.complete([1, 2, 3], max_tokens=20)[0]) == 20
                assert daemon.process.poll() is None
            wait_until(lambda: num_descriptors(daemon) < 200)
            wait_until(Path(daemon.address.removeprefix("ipc://")).exists)
            with RawClient(daemon.address) as late:
                assert len(late.complete([1, 2, 3], request_id="late")[0]) == 8
        assert daemon.stop() == 0


def test_with_too_few_descriptors_the_daemon_does_not_start_and_says_why(tiny_llama):
    ended = run_to_exit("--model", tiny_llama, program=with_few_descriptors(256))
    assert ended.returncode == 3
    assert "may open 256 files, it needs 320 and one for each client; raise" in ended.stderr


def test_a_message_beyond_the_limit_ends_its_own_connection_only(tiny_llama):
    with (
        running_daemon(tiny_llama, "--num-blocks", 64) as daemon,
        RawClient(daemon.address) as other,
        RawClient(daemon.address) as client,
    ):
        other.request("goes on", [1, 2, 3], max_tokens=200)
        client.socket.send(b"x" * (17 * 1024**2))
        assert len(other.collect("goes on")["goes on"][0]) == 200
        wait_until(lambda: other.statistics().num_clients == 1)


def stream(address, results):
    """Tokens of 16 streams, and how often they were resumed."""

    async def run():
        async with AsyncLLM(address) as llm:

            async def one(number):
                params = SamplingParams(max_tokens=240, temperature=0.0, ignore_eos=True)
                output = None
                async for new_output in llm.generate(PROMPT, params, str(number)):
                    if output is None and number == 0:
                        results.put("streams")
                    output = new_output
                return list(output.outputs[0].token_ids), output.metrics.num_resumptions

            results.put(await asyncio.gather(*map(one, range(16))))

    asyncio.run(run())


@pytest.mark.parametrize("backlog", ["large", "small"])
def test_a_client_that_was_stopped_has_every_token_once(tiny_llama, backlog):
    """Merged if it is read in time; resumed, if it was dropped meanwhile. Nobody else waits."""
    program = None
    if backlog == "small":
        code = "import engine_core.server.outbox as o, engine_core.server.transport as t, runpy; "
        code += "o._MAX_BACKLOG_BYTES = 20_000; t._SEND_QUEUE_MESSAGES = 2; "
        program = ("-c", code + "runpy.run_module('engine_core.cli', run_name='__main__')")
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    with (
        running_daemon(tiny_llama, "--num-blocks", 1000, program=program) as daemon,
        RawClient(daemon.address) as other,
    ):
        alone, _ = other.complete([1, 2, 3], request_id="alone", max_tokens=240)
        process = spawn.Process(target=stream, args=(daemon.address, results))
        process.start()
        assert results.get(timeout=60) == "streams"
        os.kill(process.pid, signal.SIGSTOP)
        try:
            for number in range(10):
                tokens, _ = other.complete([1, 2, 3], request_id=f"r{number}", max_tokens=240)
                assert tokens == alone
        finally:
            os.kill(process.pid, signal.SIGCONT)
        for tokens, num_resumptions in results.get(timeout=60):
            assert tokens == alone
            assert num_resumptions == 0 or backlog == "small"
        process.join(10)
