"""What systemd is told. A datagram socket stands for systemd's."""

import os
import socket
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(params=["a path", "abstract"])
def systemd(request, tmp_path):
    """The socket, and the environment that systemd would give."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        address = str(tmp_path / "notify") if request.param == "a path" else f"\0{tmp_path}"
        listener.bind(address)
        listener.settimeout(20)
        yield listener, os.environ | {"NOTIFY_SOCKET": address.replace("\0", "@")}


def start(program, environment, **more):
    return subprocess.Popen(
        [sys.executable, "-c", BEGIN + program], env=environment | more, stdin=subprocess.DEVNULL
    )


BEGIN = """
import os, sys, time
from engine_core.process.service_manager import ALIVE, READY, STOPPING, ServiceManager
manager = ServiceManager()
"""


def test_messages_arrive_as_they_are_and_children_do_not_inherit_the_address(systemd):
    listener, environment = systemd
    program = "manager.notify(READY, 'STATUS=' + str('NOTIFY_SOCKET' in os.environ))"
    start(program, environment).wait()
    assert listener.recv(4096) == b"READY=1\nSTATUS=False"


@pytest.mark.parametrize("address", ["", "vsock:2:1", "/no/such/socket", "@nobody-listens-here"])
def test_without_a_listener_nothing_is_sent_and_nothing_fails(address):
    program = "manager.notify(READY)\nwith manager.pings(lambda: 1): pass"
    environment = os.environ | {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000"}
    assert start(program, environment).wait() == 0


def test_pings_come_while_there_is_progress_and_end_with_it(systemd):
    listener, environment = systemd
    program = """
steps = 0
with manager.pings(lambda: steps):
    for _ in range(20):
        steps += 1
        time.sleep(0.05)
    manager.notify("STATUS=hangs")
    time.sleep(1)
manager.notify("STATUS=over")
"""
    start(program, environment, WATCHDOG_USEC="300000")
    messages = []
    while not messages or messages[-1] != b"STATUS=over":
        messages.append(listener.recv(4096))
    hangs = messages.index(b"STATUS=hangs")
    assert messages[:hangs] == [b"WATCHDOG=1"] * hangs
    assert hangs >= 3
    assert len(messages) - hangs <= 3  # at most the step that was not told yet


def test_a_watchdog_of_another_process_is_none_of_ours(systemd):
    _listener, environment = systemd
    program = "print(manager.ping_interval_s)"
    more = {"WATCHDOG_USEC": "3000000"}
    for pid, expected in (("1", "None"), (None, "1.0")):
        environment = environment | more | ({"WATCHDOG_PID": pid} if pid else {})
        if pid is None:
            del environment["WATCHDOG_PID"]
        done = subprocess.run(
            [sys.executable, "-c", BEGIN + program], env=environment, capture_output=True, text=True
        )
        assert done.stdout.strip() == expected, done.stderr


SUPERVISED = """
from pathlib import Path
from engine_core.process.owner import Owner
from engine_core.process.supervisor import supervise

folder = Path(sys.argv[1])

def serve(suspects):
    number = len(list(folder.glob("start*")))
    (folder / f"start{number}").touch()
    time.sleep(1.2)  # a start takes longer than systemd's limit
    manager.notify(READY, f"STATUS=engine {number}")
    if number:
        manager.notify(STOPPING)
        return 0
    return 1

owner = Owner(watches_stdin=False, pid=None)
sys.exit(supervise(serve, max_restarts=3, drain_timeout_s=0.0, owner=owner,
                   service_manager=manager))
"""


def test_under_supervise_the_parent_speaks_for_the_engine_and_pings_while_it_starts(
    systemd, tmp_path
):
    """So NotifyAccess=main is enough, and a restart is not taken for a hang."""
    listener, environment = systemd
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    environment |= {"WATCHDOG_USEC": "900000"}
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + SUPERVISED, str(tmp_path)], env=environment
    )
    seen = []
    while not seen or seen[-1] != "STOPPING=1":
        data, control, _, _ = listener.recvmsg(4096, socket.CMSG_SPACE(12))
        assert int.from_bytes(control[0][2][:4], sys.byteorder) == process.pid
        seen.append(data.decode())
    assert process.wait(20) == 0
    told = [text for text in seen if text != "WATCHDOG=1"]
    assert told == [
        "READY=1\nSTATUS=engine 0",
        "WATCHDOG=1\nSTATUS=the engine died (exit code 1); it is started again",
        "READY=1\nSTATUS=engine 1",
        "STOPPING=1",
    ]
    begin, end = seen.index(told[1]), seen.index(told[2])
    assert end - begin > 2, "pings while the second engine starts"
