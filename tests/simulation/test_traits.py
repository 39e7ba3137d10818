"""What the simulated sockets do is what libzmq does, on real sockets of this machine."""

import contextlib
import os
import select
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


def connect(dealer, tmp_path, send_queue=1000, receive_queue=0):
    """A ROUTER that has heard from the DEALER, and the DEALER's identity."""
    router = dealer.context.socket(zmq.ROUTER)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.SNDHWM, send_queue)
    router.bind(f"ipc://{tmp_path}/socket")
    dealer.setsockopt(zmq.RCVHWM, receive_queue)
    dealer.connect(f"ipc://{tmp_path}/socket")
    dealer.send(b"here")
    return router, router.recv_multipart()[0]


def num_sent(router, identity, num_bytes, most=10_000):
    """How many messages go before one is Again."""
    for number in range(most):
        try:
            router.send_multipart([identity, os.urandom(num_bytes)], zmq.NOBLOCK)
        except zmq.Again:
            return number
    return most


def test_a_send_without_a_peer_is_again(dealer):
    dealer.setsockopt(zmq.IMMEDIATE, 0)
    with pytest.raises(zmq.Again):
        dealer.send(b"nobody is there", zmq.NOBLOCK)


def test_a_send_to_a_peer_that_is_gone_is_unreachable(dealer, tmp_path):
    router, identity = connect(dealer, tmp_path)
    dealer.close(linger=0)
    with pytest.raises(zmq.ZMQError) as unreachable:
        for _ in range(100):
            router.send_multipart([identity, b"hello"], zmq.NOBLOCK)
            time.sleep(0.02)
    assert unreachable.value.errno == zmq.EHOSTUNREACH


def test_a_full_queue_is_again_and_has_room_when_half_of_it_was_read(dealer, tmp_path):
    router, identity = connect(dealer, tmp_path, send_queue=10, receive_queue=1)
    while num_sent(router, identity, 1_000_000):
        time.sleep(0.1)  # until the kernel's buffers are full, too
    rooms = []
    for _ in range(12):
        dealer.recv()
        time.sleep(0.1)
        rooms.append(num_sent(router, identity, 1_000_000))
    assert set(rooms) == {0, 5}, "never one at a time"


def test_the_descriptor_signals_an_event_once(dealer, tmp_path):
    router, identity = connect(dealer, tmp_path)
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
