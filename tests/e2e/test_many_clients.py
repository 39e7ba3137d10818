"""Several client processes at once; one dies in the middle of its stream."""

import itertools
import multiprocessing
import time

import pytest
from daemons import running_daemon, slow_program
from raw_client import RawClient

from protocol.calls import Ping
from protocol.codec import encode
from protocol.requests import Call

PROMPTS = {f"client-{number}": [number * 7 % 97 or 1] * 30 for number in range(3)}
NUM_TOKENS = 60


def stream(address, name, queue):
    """One client process: report the first token, then all of them."""
    with RawClient(address) as client:
        client.request(name, PROMPTS[name], max_tokens=NUM_TOKENS)
        while not client.socket.poll(100):
            pass
        queue.put((name, "first token"))
        tokens, _ = client.collect(name)[name]
        queue.put((name, tokens))


@pytest.mark.parametrize("bind", [None, "tcp://127.0.0.1:0"])
def test_a_killed_clients_requests_are_aborted_and_the_others_go_on(tiny_llama, bind):
    """Each client is a process, and so is the engine. Proves S017, S200, S204."""
    spawn = multiprocessing.get_context("spawn")
    with (
        running_daemon(
            tiny_llama,
            *("--num-blocks", 200, "--no-enable-prefix-caching"),
            bind=bind,
            program=slow_program(0.02),
        ) as daemon,
        RawClient(daemon.address) as observer,
    ):
        alone = {
            name: observer.complete(prompt, request_id=f"alone-{name}", max_tokens=NUM_TOKENS)[0]
            for name, prompt in PROMPTS.items()
        }
        # two long requests that die with their client: one streams, one waits for a step
        queue = spawn.Queue()
        victims_own = spawn.Queue()  # who is killed may leave it locked
        victim = spawn.Process(target=hold, args=(daemon.address, victims_own))
        victim.start()
        assert victims_own.get(timeout=30) == "streaming"
        survivors = [
            spawn.Process(target=stream, args=(daemon.address, name, queue)) for name in PROMPTS
        ]
        for process in survivors:
            process.start()
        victim.kill()
        killed_s = time.monotonic()
        victim.join()
        tokens = {}
        while len(tokens) < len(PROMPTS):
            name, what = queue.get(timeout=60)
            if what != "first token":
                tokens[name] = what
        assert tokens == alone
        while observer.statistics().num_blocks_in_use:
            assert time.monotonic() - killed_s < 30
        statistics = observer.statistics()
        assert statistics.num_finished["abort"] == 2
        assert (statistics.num_running, statistics.num_waiting) == (0, 0)
        for process in survivors:
            process.join(10)
            assert process.exitcode == 0


def hold(address, queue):
    """The victim: two requests that would take long, then wait to be killed."""
    client = RawClient(address)
    client.request("victim-1", [3] * 20, max_tokens=230)
    client.request("victim-2", [4] * 20, max_tokens=230)
    assert client.socket.poll(10_000)
    queue.put("streaming")
    time.sleep(60)


def test_blocks_of_a_killed_idle_waiter_are_free_within_a_second(tiny_llama):
    """Also a client that is owed nothing at the moment is found dead: by its heartbeat."""
    spawn = multiprocessing.get_context("spawn")
    with (
        running_daemon(tiny_llama, "--num-blocks", 64, "--max-num-seqs", 1) as daemon,
        RawClient(daemon.address) as observer,
    ):
        observer.request("first", [1] * 10, max_tokens=240)
        queue = spawn.Queue()
        victim = spawn.Process(target=wait_in_line, args=(daemon.address, queue))
        victim.start()
        queue.get(timeout=30)
        victim.kill()
        killed_s = time.monotonic()
        while observer.statistics().num_clients > 1:
            assert time.monotonic() - killed_s < 1.0
            time.sleep(0.01)
        assert observer.statistics().num_waiting == 0


def wait_in_line(address, queue):
    client = RawClient(address)
    client.request("in line", [2] * 10, max_tokens=240)
    client.statistics()
    queue.put("waiting")
    time.sleep(60)


def test_a_stream_goes_on_beside_a_client_that_never_stops_calling(tiny_llama):
    spawn = multiprocessing.get_context("spawn")
    with (
        running_daemon(tiny_llama, "--num-blocks", 64) as daemon,
        RawClient(daemon.address) as client,
    ):
        queue = spawn.Queue()
        flooding = spawn.Process(target=flood, args=(daemon.address, queue))
        flooding.start()
        try:
            queue.get(timeout=30)
            client.request("r", [1] * 20, max_tokens=200)
            tokens, _ = client.collect("r", timeout_s=60)["r"]
            assert len(tokens) == 200
            assert flooding.is_alive()
        finally:
            flooding.kill()
            flooding.join()


def flood(address, queue):
    """Call as fast as the socket takes it, and read nothing."""
    client = RawClient(address)
    frame = encode(Call(call_id=1, call=Ping()))
    for number in itertools.count():
        client.socket.send(frame)
        if number == 50_000:
            queue.put("flooding")
