"""The client's ZMQ transport on real sockets: what the engine sent before it went is delivered."""

import asyncio
import os
import threading
import time

import pytest
import zmq

from frontend.engine.transport import ZmqTransport
from frontend.errors import EngineUnavailable


def send_and_go(address, num_messages, has_gone):
    """An engine that sends to the first client, and exits."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 1_000)
        router.setsockopt(zmq.SNDHWM, 0)
        router.bind(address)
        identity, _ = router.recv_multipart()
        for number in range(num_messages):
            router.send_multipart([identity, b"%d" % number])
    has_gone.set()


@pytest.mark.parametrize("num_messages", [1, 64, 99, 800])
async def test_a_busy_client_reads_all_that_the_engine_sent_before_it_went(tmp_path, num_messages):
    address, has_gone = f"ipc://{tmp_path}/socket", threading.Event()
    arguments = (address, num_messages, has_gone)
    engine = threading.Thread(target=send_and_go, args=arguments, daemon=True)
    engine.start()
    while not (tmp_path / "socket").exists():
        await asyncio.sleep(0.01)
    transport, received, lost = ZmqTransport(address), [], asyncio.Event()
    transport.connect(lambda frames: received.append(int(frames[0])), lambda *_why: lost.set())
    transport.send_frames([b"here"])
    await asyncio.sleep(0.01)
    has_gone.wait(timeout=20)
    time.sleep(0.15)  # this event loop is busy meanwhile
    await asyncio.wait_for(lost.wait(), timeout=20)
    assert received == list(range(num_messages))
    transport.close()
    engine.join()


@pytest.mark.parametrize("user", [1000, 0])
async def test_a_socket_of_another_user_is_not_trusted(tmp_path, monkeypatch, user):
    """In a folder such as /tmp anybody may put one at the address of an engine: of root's, too."""
    path = tmp_path / "engine.sock"
    path.touch()
    foreign = os.stat_result((0o140600, 0, 0, 1, 1001, 0, 0, 0, 0, 0))
    monkeypatch.setattr("frontend.engine.transport.Path.stat", lambda _path, **_: foreign)
    monkeypatch.setattr(os, "getuid", lambda: user)
    transport = ZmqTransport(f"ipc://{path}")
    with pytest.raises(EngineUnavailable, match=r"belongs to another user \(1001\)"):
        transport.connect(lambda _frames: None, lambda *_why: None)
    transport.close()


async def test_a_message_to_an_engine_that_has_gone_is_dropped(tmp_path):
    address, has_gone = f"ipc://{tmp_path}/socket", threading.Event()
    engine = threading.Thread(target=send_and_go, args=(address, 0, has_gone), daemon=True)
    engine.start()
    while not (tmp_path / "socket").exists():
        await asyncio.sleep(0.01)
    transport, lost = ZmqTransport(address), asyncio.Event()
    transport.connect(lambda _frames: None, lambda *_why: lost.set())
    transport.send_frames([b"here"])
    await asyncio.sleep(0.01)
    has_gone.wait(timeout=20)
    time.sleep(0.15)
    transport.send_frames([b"the loss is not known yet"])
    await asyncio.wait_for(lost.wait(), timeout=20)
    transport.send_frames([b"and now it is"])
    transport.close()
    engine.join()
