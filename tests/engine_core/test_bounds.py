"""Many clients and many requests leave nothing behind. Real sockets, the real loop, a made-up
runner."""

import contextlib
import threading
import time
from pathlib import Path

import pytest
import zmq

from engine_core.executor import InProcessExecutor
from engine_core.kv_cache import KVCacheManager
from engine_core.lifecycle import Lifecycle
from engine_core.scheduler import SchedulerConfig
from engine_core.server.transport import ZmqTransport
from engine_core.startup.scheduler import build_scheduler
from protocol.base import WIRE_VERSION
from protocol.codec import decode_engine_message, encode
from protocol.outputs import EngineCoreOutputs
from protocol.requests import EngineRequest, Goodbye, Hello
from protocol.sampling import SamplingParams
from tests.engine_core.made_core import limits, mailboxes, make_core
from tests.engine_core.test_core_loop import Runner
from tests.protocol.all_outputs import all_outputs

pytestmark = pytest.mark.slow

MAX_NUM_SEQS = 128
TIMEOUT_S = 60.0


class RunningEngine:
    """Serves in a thread until it is left."""

    def __init__(self, transport):
        inbox, outbox = mailboxes(transport, heartbeat_s=0.02)
        self.clients = outbox.clients
        config = SchedulerConfig(
            max_num_batched_tokens=1024, max_num_seqs=MAX_NUM_SEQS, max_model_len=64
        )
        self.scheduler = build_scheduler(config, KVCacheManager(num_blocks=1024, block_size=4))
        self.lifecycle = Lifecycle(drain_timeout_s=TIMEOUT_S)
        executor = InProcessExecutor(Runner(1, []))
        self.core = make_core(
            inbox, outbox, self.scheduler, executor, self.lifecycle, limits(config, 10_000)
        )


@contextlib.contextmanager
def serving(address):
    with ZmqTransport(address) as transport:
        engine = RunningEngine(transport)
        thread = threading.Thread(target=engine.core.run, daemon=True)
        thread.start()
        try:
            yield engine
        finally:
            engine.lifecycle.drain("the test is over")
            thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        engine.core.close()
        engine.scheduler.check()


def wait_until(is_so):
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_open_descriptors():
    return len([*Path("/proc/self/fd").iterdir()])


def request(name, max_tokens):
    return encode(
        EngineRequest(
            request_id=name,
            prompt_token_ids=[1, 2, 3],
            sampling_params=SamplingParams(max_tokens=max_tokens),
        )
    )


def outputs_of(socket):
    """The next message's outputs and finished ids."""
    assert socket.poll(TIMEOUT_S * 1000), "the engine said nothing"
    message = decode_engine_message(socket.recv())
    if not isinstance(message, EngineCoreOutputs):
        return [], []
    return all_outputs(message), message.finished_req_ids


def test_512_clients_that_join_and_leave_leave_no_descriptor_client_or_request(tmp_path):
    """Three of four leave with a request that runs, by GOODBYE or by closing their socket."""
    address = f"ipc://{tmp_path}/s"
    hello = encode(Hello(wire_version=WIRE_VERSION))
    with serving(address) as engine, zmq.Context() as context:

        def join_and_leave(wave):
            with contextlib.ExitStack() as sockets:
                waves = [sockets.enter_context(context.socket(zmq.DEALER)) for _ in range(32)]
                for number, socket in enumerate(waves):
                    socket.connect(address)
                    socket.send(hello)
                    max_tokens = 1 if number % 4 == 0 else 60
                    socket.send(request(f"{wave}.{number}", max_tokens))
                for number, socket in enumerate(waves):
                    while not outputs_of(socket)[0]:
                        pass
                    if number % 4 == 1:
                        socket.send(encode(Goodbye()))
                    elif number % 4 == 2:
                        socket.close(linger=0)
            wait_until(lambda: not len(engine.clients))

        join_and_leave(0)
        wait_until(lambda: engine.scheduler.get_request_counts() == (0, 0))
        num_descriptors = num_open_descriptors()
        for wave in range(1, 16):
            join_and_leave(wave)
        wait_until(lambda: engine.scheduler.get_request_counts() == (0, 0))
        wait_until(lambda: num_open_descriptors() <= num_descriptors)
        finished = engine.core.statistics().num_finished
        assert sum(finished.values()) == 512
        assert finished["length"] >= 128
    assert not engine.clients.take_departed()


def test_10000_queued_requests_each_end_once(tmp_path):
    """Sent at once by a client that reads nothing meanwhile."""
    num_requests = 10_000
    address = f"ipc://{tmp_path}/s"
    hello = encode(Hello(wire_version=WIRE_VERSION))
    with (
        serving(address) as engine,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as client,
    ):
        client.setsockopt(zmq.SNDHWM, 0)
        client.connect(address)
        client.send(hello)
        for number in range(num_requests):
            client.send(request(str(number), 1 + number % 3))
        num_tokens, ended = {}, []
        while len(ended) < num_requests:
            outputs, finished = outputs_of(client)
            ended += finished
            for output in outputs:
                name = output.request_id
                num_tokens[name] = num_tokens.get(name, 0) + len(output.new_token_ids)
        assert sorted(map(int, ended)) == list(range(num_requests)), "each ends exactly once"
        assert num_tokens == {str(n): 1 + n % 3 for n in range(num_requests)}
        [known] = engine.clients
        assert not known.request_ids
        assert engine.scheduler.get_request_counts() == (0, 0)
