"""The engine's socket: addresses, locks, clients that come, go and die."""

import os
import socket
import stat
import time
from pathlib import Path

import pytest
import zmq

from engine_core.errors import AddressInUse, ConfigurationError
from engine_core.server.keys import KeyFolder
from engine_core.server.transport import ClientGone, ZmqTransport
from engine_core.server.unix_socket import make_private_folder


@pytest.fixture
def address(tmp_path):
    (tmp_path / "s").mkdir()
    return f"ipc://{tmp_path}/s/engine.sock"


def receive(engine, count, timeout_s=5.0):
    received = []
    deadline = time.monotonic() + timeout_s
    while len(received) < count and time.monotonic() < deadline:
        engine.wait(0.05)
        received += [
            (identity, [bytes(f) for f in frames]) for identity, frames in engine.receive_all()
        ]
    assert len(received) >= count
    return received


def test_frames_go_both_ways(address):
    with (
        ZmqTransport(address) as engine,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as client,
    ):
        client.connect(address)
        client.send_multipart([b"question", b"binary"])
        ((identity, frames),) = receive(engine, 1)
        assert frames == [b"question", b"binary"]
        engine.send(identity, [b"answer"])
        assert client.recv_multipart() == [b"answer"]


def test_the_default_socket_is_private_and_so_is_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "engine-core"
    with ZmqTransport(None):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "engine.sock").stat().st_mode) == 0o600
    assert not (folder / "engine.sock").exists()


def test_the_folder_of_an_address_by_hand_must_exist(tmp_path):
    with pytest.raises(ConfigurationError, match=r"new/dir is not a folder; make it, or choose"):
        ZmqTransport(f"ipc://{tmp_path}/new/dir/engine.sock")
    assert not any(tmp_path.iterdir())


def test_a_second_engine_on_a_unix_socket_is_told_that_it_is_in_use(address):
    with ZmqTransport(address) as first:
        with pytest.raises(AddressInUse, match="in use by another engine"):
            ZmqTransport(address)
        assert first.address == address
    ZmqTransport(address).close()  # free again


def test_a_socket_left_by_a_dead_engine_does_not_stand_in_the_way(address, tmp_path):
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "s" / "engine.sock"))
    stale.close()
    ZmqTransport(address).close()


def test_a_tcp_port_in_use_is_refused_and_port_zero_picks_one():
    with ZmqTransport("tcp://127.0.0.1:0") as engine:
        assert engine.address.startswith("tcp://127.0.0.1:")
        assert not engine.address.endswith(":0")
        with pytest.raises(AddressInUse, match="is in use"):
            ZmqTransport(engine.address)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("http://x", "use ipc://PATH or tcp://HOST:PORT"),
        ("localhost:5", "use ipc://PATH or tcp://HOST:PORT"),
        ("tcp://nonsense", "use ipc://PATH or tcp://HOST:PORT"),
        ("tcp://localhost:99999", "is '99999', it must be a number up to 65535"),
        ("tcp://localhost:65536", "is '65536'"),
        ("tcp://localhost:-1", "is '-1'"),
        ("tcp://localhost:80x", "is '80x'"),
        ("ipc:///dev/null/x", "/dev/null is not a folder"),
        ("ipc://@engine", "no permissions"),
        ("ipc://*", "not a path"),
    ],
)
def test_addresses_that_cannot_work_are_refused(wrong, words):
    """ZMQ takes port 99999 for 34463."""
    with pytest.raises(ConfigurationError, match=words):
        ZmqTransport(wrong)


@pytest.mark.parametrize(
    "bind",
    ["tcp://0.0.0.0:0", "tcp://*:*", "tcp://[::]:0", "tcp://eth0:0"],
)
def test_an_address_that_others_reach_needs_keys_or_is_said_to_be_insecure(bind, caplog):
    with pytest.raises(ConfigurationError, match=r"open to the network.*engine-core keys"):
        ZmqTransport(bind)
    assert not caplog.records
    if "eth0" not in bind:
        with ZmqTransport(bind, is_insecure=True) as engine:
            (warned,) = [record.getMessage() for record in caplog.records]
            assert f"{engine.address} IS OPEN TO THE NETWORK" in warned
            assert not engine.rights(b"anyone").is_admin


@pytest.mark.parametrize("bind", ["tcp://127.0.0.2:0", "tcp://localhost:0", "tcp://[::1]:0"])
def test_loopback_needs_no_keys_and_gives_no_rights_of_an_operator(bind, caplog):
    with ZmqTransport(bind) as engine:
        assert not caplog.records
        assert not engine.rights(b"anyone").is_admin
        assert engine.rights(b"anyone").key_name is None


def test_options_that_protect_nothing_are_refused(address, tmp_path):
    keys = KeyFolder(tmp_path)
    for bind, options, words in (
        (address, {"keys": keys}, "no effect on a Unix socket"),
        (address, {"is_insecure": True}, "no effect"),
        ("tcp://127.0.0.1:0", {"is_insecure": True}, "no effect"),
        ("tcp://0.0.0.0:0", {"is_insecure": True, "keys": keys}, "contradict"),
        ("tcp://0.0.0.0:0", {"keys": keys}, "cannot read the key"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            ZmqTransport(bind, **options)


def test_a_client_that_floods_is_held_back_and_the_others_take_turns_with_it(address, monkeypatch):
    """And nothing of what it sent is lost, though its heartbeats are not read either."""
    monkeypatch.setattr("engine_core.server.transport._RECEIVE_QUEUE_MESSAGES", 100)
    monkeypatch.setattr("engine_core.server.transport._PEER_HEARTBEAT_MS", 50)
    with ZmqTransport(address) as engine, zmq.Context() as context:
        flooding, other = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        flooding.setsockopt(zmq.SNDHWM, 100)
        flooding.setsockopt(zmq.SNDTIMEO, 300)
        num_sent = 0
        with flooding, other:
            flooding.connect(address)
            other.connect(address)
            with pytest.raises(zmq.Again):
                while num_sent < 5000:
                    flooding.send(num_sent.to_bytes(10_000))
                    num_sent += 1
            assert num_sent < 1000, "both queues and what the kernel holds"
            for number in range(5):
                other.send(b"other%d" % number)
            time.sleep(0.5)  # they arrive
            messages = engine.receive_all()
            turns = [bytes(next(messages)[1][0])[:5] == b"other" for _ in range(12)]
            assert turns.count(True) == 5
            received = [frames for _, frames in messages]
            while len(received) + 12 - 5 < num_sent:
                engine.wait(5)
                received += [frames for _, frames in engine.receive_all()]
        assert [int.from_bytes(frames[0]) for frames in received] == list(range(7, num_sent))


def test_a_unix_path_beyond_the_systems_limit_is_refused_with_the_limit(tmp_path):
    with pytest.raises(ConfigurationError, match="limit is 107"):
        ZmqTransport(f"ipc://{tmp_path}/{'x' * 120}")


def test_sending_to_a_client_that_left_says_so(address):
    with ZmqTransport(address) as engine, zmq.Context() as context:
        client = context.socket(zmq.DEALER)
        client.connect(address)
        client.send(b"hello")
        ((identity, _),) = receive(engine, 1)
        client.close(linger=0)
        deadline = time.monotonic() + 5
        with pytest.raises(ClientGone, match="connection closed"):
            while time.monotonic() < deadline:
                engine.send(identity, [b"there?"])
                time.sleep(0.01)


def test_raw_garbage_on_the_wire_leaves_the_others_alone():
    with ZmqTransport("tcp://127.0.0.1:0") as engine, zmq.Context() as context:
        port = int(engine.address.rsplit(":", 1)[1])
        for garbage in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), b"\xff\x00\x00"):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(garbage)
        with context.socket(zmq.DEALER) as client:
            client.connect(engine.address)
            client.send(b"still there?")
            # libzmq takes some garbage for messages of its first protocol version
            received = []
            deadline = time.monotonic() + 5
            while [b"still there?"] not in received and time.monotonic() < deadline:
                received += [frames for _, frames in receive(engine, 1)]
            assert [b"still there?"] in received


def test_the_socket_is_private_from_its_first_moment(tmp_path, monkeypatch):
    """Not only after a chmod: the umask says so already when it is bound."""
    modes = []
    path = tmp_path / "engine.sock"
    monkeypatch.setattr(Path, "chmod", lambda *_: pytest.fail("too late"))
    before = os.umask(0)
    try:
        with ZmqTransport(f"ipc://{path}"):
            modes = [stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()]
        assert os.umask(0) == 0, "the caller's umask is back"
    finally:
        os.umask(before)
    assert modes == [0o600, 0o600]


def test_a_folder_in_which_others_can_replace_the_socket_is_refused(tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    for mode in (0o777, 0o707, 0o702):
        folder.chmod(mode)
        with pytest.raises(ConfigurationError, match="other users may replace files in"):
            ZmqTransport(f"ipc://{folder}/engine.sock")
    assert not any(folder.iterdir())


@pytest.mark.parametrize("mode", [0o1777, 0o770])
def test_a_folder_like_tmp_or_of_a_group_is_said_loudly(tmp_path, caplog, mode):
    folder = tmp_path / "like-tmp"
    folder.mkdir()
    folder.chmod(mode)
    with ZmqTransport(f"ipc://{folder}/engine.sock"):
        assert "OTHER USERS MAY WRITE IN" in caplog.text
        assert stat.S_IMODE((folder / "engine.sock").stat().st_mode) == 0o600


def test_a_link_where_the_lock_belongs_is_not_followed(tmp_path):
    (tmp_path / "engine.sock.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigurationError, match="cannot listen"):
        ZmqTransport(f"ipc://{tmp_path}/engine.sock")
    assert not (tmp_path / "elsewhere").exists()


def test_somebody_elses_folder_is_not_trusted(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigurationError):
        make_private_folder(file)
    folder = tmp_path / "open"
    folder.mkdir(mode=0o777)
    make_private_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_binary_part_that_waits_for_many_clients_is_in_memory_once(address):
    """A client that says HELLO again and again is sent the tokenizer as often."""
    document = bytes(10_000_000)
    with (
        ZmqTransport(address) as engine,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as client,
    ):
        client.setsockopt(zmq.RCVHWM, 1)
        client.connect(address)
        client.send(b"hello")
        ((identity, _),) = receive(engine, 1)
        before = resident_bytes()
        for _ in range(50):
            engine.send(identity, [b"welcome", document])
        assert resident_bytes() - before < 10 * len(document)
        for _ in range(50):
            assert client.recv_multipart()[1] == document


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
