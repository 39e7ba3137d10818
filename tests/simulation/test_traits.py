"""What the simulated sockets do is what libzmq does, on real sockets of this machine."""

import contextlib
import os
import subprocess
import sys
import time

import pytest
import zmq

from tests.simulation.sim_zmq import PIPE_MESSAGES

_SERVER = """
import os, sys, time, zmq
context = zmq.Context()
router = context.socket(zmq.ROUTER)
router.setsockopt(zmq.ROUTER_MANDATORY, 1)
router.setsockopt(zmq.LINGER, 20_000)
router.setsockopt(zmq.SNDHWM, 10_000)
router.bind(sys.argv[1])
identity, _ = router.recv_multipart()
for number in range(int(sys.argv[2])):
    router.send_multipart([identity, b"%d" % number + b"x" * 100])
if sys.argv[3] == "close":
    router.close()
    context.term()
else:
    time.sleep(0.3)
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def dealer():
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.RCVHWM, 0)
    yield socket
    context.destroy(linger=0)  # the monitor's socket, too, where a test has failed


def read_after_the_end(dealer, tmp_path, num_messages, how, reconnect_ms):
    """What a client can still read that was busy while the engine sent and went."""
    path = tmp_path / "socket"
    address = f"ipc://{path}"
    server = subprocess.Popen([sys.executable, "-c", _SERVER, address, str(num_messages), how])
    while not path.exists():
        time.sleep(0.01)
    dealer.setsockopt(zmq.RECONNECT_IVL, reconnect_ms)
    monitor = dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    dealer.connect(address)
    dealer.send(b"here")
    assert monitor.poll(20_000), "the connection ends"
    server.wait()
    time.sleep(0.2)
    messages = []
    with contextlib.suppress(zmq.Again):
        while True:
            messages.append(dealer.recv(zmq.NOBLOCK))
    dealer.disable_monitor()
    monitor.close(linger=0)
    return messages


@pytest.mark.parametrize("how", ["close", "kill"])
def test_without_reconnection_unread_messages_are_dropped_at_the_end(dealer, tmp_path, how):
    messages = read_after_the_end(dealer, tmp_path, 2000, how, reconnect_ms=-1)
    # it drops them when it looks for commands, which `recv` does every 100 messages
    assert len(messages) <= PIPE_MESSAGES


@pytest.mark.parametrize("how", ["close", "kill"])
def test_with_a_late_reconnection_all_that_arrived_is_read(dealer, tmp_path, how):
    messages = read_after_the_end(dealer, tmp_path, 2000, how, reconnect_ms=3_600_000)
    assert len(messages) == 2000


def test_a_send_without_a_peer_is_again(dealer, tmp_path):
    dealer.setsockopt(zmq.IMMEDIATE, 0)
    with pytest.raises(zmq.Again):
        dealer.send(b"nobody is there", zmq.NOBLOCK)


def test_a_send_to_a_peer_that_is_gone_is_unreachable(dealer, tmp_path):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.bind(f"ipc://{tmp_path}/socket")
    dealer.connect(f"ipc://{tmp_path}/socket")
    dealer.send(b"here")
    identity, _ = router.recv_multipart()
    dealer.close(linger=0)
    error = None
    for _ in range(100):
        try:
            router.send_multipart([identity, b"hello"], zmq.NOBLOCK)
        except zmq.ZMQError as unreachable:
            error = unreachable.errno
            break
        time.sleep(0.02)
    router.close(linger=0)
    context.term()
    assert error == zmq.EHOSTUNREACH


def test_a_send_beyond_the_high_water_mark_is_again(dealer, tmp_path):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, 10)
    router.bind(f"ipc://{tmp_path}/socket")
    dealer.setsockopt(zmq.RCVHWM, 10)
    dealer.connect(f"ipc://{tmp_path}/socket")
    dealer.send(b"here")
    identity, _ = router.recv_multipart()
    with pytest.raises(zmq.Again):
        for _ in range(10_000):
            router.send_multipart([identity, os.urandom(10_000)], zmq.NOBLOCK)
    router.close(linger=0)
    context.term()


def test_a_full_queue_has_room_again_when_half_of_it_was_read(dealer, tmp_path):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, 10)
    router.bind(f"ipc://{tmp_path}/socket")
    dealer.setsockopt(zmq.RCVHWM, 1)
    dealer.connect(f"ipc://{tmp_path}/socket")
    dealer.send(b"here")
    identity, _ = router.recv_multipart()

    def num_sent():
        number = 0
        with contextlib.suppress(zmq.Again):
            while True:
                router.send_multipart([identity, os.urandom(1_000_000)], zmq.NOBLOCK)
                number += 1
        return number

    while num_sent():
        time.sleep(0.1)  # until the kernel's buffers are full, too
    rooms = []
    for _ in range(12):
        dealer.recv()
        time.sleep(0.1)
        rooms.append(num_sent())
    assert set(rooms) == {0, 5}, "never one at a time"
    router.close(linger=0)
    context.term()


def test_the_descriptor_signals_an_event_once(dealer, tmp_path):
    import select

    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/socket")
    dealer.connect(f"ipc://{tmp_path}/socket")
    dealer.send(b"here")
    identity, _ = router.recv_multipart()
    descriptor = dealer.getsockopt(zmq.FD)
    with pytest.raises(zmq.Again):
        dealer.recv(zmq.NOBLOCK)  # all has been read
    while select.select([descriptor], [], [], 0.05)[0]:
        dealer.getsockopt(zmq.EVENTS)
    router.send_multipart([identity, b"one"])
    assert select.select([descriptor], [], [], 5)[0], "a message arrived"
    dealer.send(b"a call takes the signal", zmq.NOBLOCK)
    assert not select.select([descriptor], [], [], 0.2)[0]
    assert dealer.getsockopt(zmq.EVENTS) & zmq.POLLIN, "and the message is there"
    router.close(linger=0)
    context.term()
