"""Keys over TCP, on real sockets: who gets in, as whom, and what a stranger can do."""

import os
import socket
import stat
import time

import pytest
import zmq

from engine_core.errors import ConfigurationError
from engine_core.server.keys import KeyFolder
from engine_core.server.transport import ZmqTransport
from protocol.errors import InvalidParameter
from protocol.keys import ClientKey, read_secret_file


@pytest.fixture
def folder(tmp_path):
    folder = KeyFolder(tmp_path / "keys")
    folder.make()
    folder.add("alice", is_admin=False)
    folder.add("root", is_admin=True)
    return folder


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context


@pytest.fixture
def engine(folder):
    with ZmqTransport("tcp://127.0.0.1:0", keys=KeyFolder(folder.folder)) as engine:
        yield engine


def key_of(folder, name):
    return read_secret_file(folder.folder / "clients" / f"{name}.key", ClientKey)


def dealer(context, engine, key=None, **options):
    client = context.socket(zmq.DEALER)
    client.linger = 0
    if key is not None:
        client.curve_serverkey = key.server_public_key.encode()
        client.curve_publickey = key.public_key.encode()
        client.curve_secretkey = key.secret_key.encode()
    for name, value in options.items():
        setattr(client, name, value)
    client.connect(engine.address)
    client.send(b"hello")
    return client


def receive(engine, seconds):
    """Who is heard within this time: (identity, frames)."""
    heard = []
    deadline = time.monotonic() + seconds
    while not heard and time.monotonic() < deadline:
        engine.wait(0.02)
        heard = [(who, [bytes(frame) for frame in frames]) for who, frames in engine.receive_all()]
    return heard


def test_a_client_is_known_by_the_name_of_its_key(folder, engine, context):
    for name, is_admin in (("alice", False), ("root", True)):
        with dealer(context, engine, key_of(folder, name)) as client:
            ((identity, frames),) = receive(engine, 10)
            assert frames == [b"hello"]
            rights = engine.rights(identity)
            assert (rights.key_name, rights.is_admin) == (name, is_admin)
            engine.send(identity, [b"answer"])
            assert client.recv_multipart() == [b"answer"]


@pytest.mark.parametrize(
    "stranger",
    ["no key", "plain", "unknown key", "another engine's key", "a chosen id", "five bytes of id"],
)
def test_a_stranger_is_not_heard_and_the_others_do_not_notice(
    folder, engine, context, stranger, caplog
):
    with dealer(context, engine, key_of(folder, "alice")) as client:
        ((identity, _),) = receive(engine, 10)
        pair = [key.decode() for key in zmq.curve_keypair()]
        alice = key_of(folder, "alice")
        options = {
            "no key": {},
            "plain": {"plain_username": b"alice", "plain_password": b"secret"},
            "unknown key": {"key": ClientKey("x", alice.server_public_key, *pair)},
            "another engine's key": {
                "key": ClientKey("x", pair[0], alice.public_key, alice.secret_key)
            },
            # which could be that of a client that has just left
            "a chosen id": {"key": alice, "routing_id": b"chosen"},
            "five bytes of id": {"key": alice, "routing_id": b"abcde"},
        }[stranger]
        with dealer(context, engine, **options):
            assert not receive(engine, 0.5)
            engine.send(identity, [b"answer"])
            assert client.recv_multipart() == [b"answer"]
            client.send(b"more")
            assert receive(engine, 10) == [(identity, [b"more"])]
    lines = [record.getMessage() for record in caplog.records]
    assert bool(lines) == (stranger == "unknown key")
    assert all("refused the key" in line and pair[1] not in line for line in lines)


def test_a_flood_of_strangers_writes_few_lines(folder, engine, context, caplog):
    alice = key_of(folder, "alice")
    for _ in range(30):
        public, secret = (key.decode() for key in zmq.curve_keypair())
        key = ClientKey("x", alice.server_public_key, public, secret)
        dealer(context, engine, key).close()
        with dealer(context, engine, key, handshake_ivl=200):
            receive(engine, 0.02)
    assert 1 <= len(caplog.records) <= 4


def test_raw_bytes_at_a_port_with_keys_change_nothing(folder, engine, context):
    host, port = engine.address.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + bytes(32)
    for garbage in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(4096), b"\xff", greeting * 3):
        with socket.create_connection((host, int(port))) as raw:
            raw.sendall(garbage)
    silent = socket.create_connection((host, int(port)))
    with silent, dealer(context, engine, key_of(folder, "alice")):
        heard = receive(engine, 10)
        assert [frames for _, frames in heard] == [[b"hello"]]


def test_keys_are_added_and_taken_back_while_the_engine_runs(folder, engine, context):
    key_file = folder.add("bob", is_admin=False)
    bob = read_secret_file(key_file, ClientKey)
    with dealer(context, engine, bob):
        assert receive(engine, 10)
    (folder.folder / "authorized" / "bob.key").unlink()
    with dealer(context, engine, bob):
        assert not receive(engine, 0.5)


@pytest.mark.parametrize("wrong", ["others may read it", "it is being written"])
def test_a_key_that_cannot_be_used_locks_out_no_other_until_it_can(
    folder, engine, context, wrong, caplog
):
    with dealer(context, engine, key_of(folder, "alice")) as client:
        ((identity, _),) = receive(engine, 10)
        bob = read_secret_file(folder.add("bob", is_admin=False), ClientKey)
        file = folder.folder / "authorized" / "bob.key"
        text = file.read_bytes()
        if wrong == "others may read it":
            file.chmod(0o644)
        else:
            file.write_bytes(b"")
        assert engine.rights(identity).key_name == "alice"
        assert "bob.key" in caplog.text
        with dealer(context, engine, bob):
            assert not receive(engine, 0.5)
        file.chmod(0o600)
        file.write_bytes(text)
        with dealer(context, engine, bob):
            assert receive(engine, 10)
        client.send(b"more")
        assert receive(engine, 10) == [(identity, [b"more"])]


def test_without_its_folder_an_engine_takes_no_key_and_serves_those_it_has(folder, engine, context):
    with dealer(context, engine, key_of(folder, "root")) as client:
        ((identity, _),) = receive(engine, 10)
        (folder.folder / "authorized").rename(folder.folder / "gone")
        assert not engine.rights(identity).is_admin
        with dealer(context, engine, key_of(folder, "alice")):
            assert not receive(engine, 0.5)
        client.send(b"more")
        assert receive(engine, 10) == [(identity, [b"more"])]


def test_secrets_are_in_private_files_only(folder, capsys, caplog):
    files = [path for path in folder.folder.rglob("*") if path.is_file()]
    assert len(files) == 5
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert all(
        stat.S_IMODE(path.stat().st_mode) == 0o700
        for path in folder.folder.rglob("*")
        if path.is_dir()
    )
    server, alice = folder.server_key(), key_of(folder, "alice")
    for secret in (server.secret_key, alice.secret_key):
        assert secret not in repr((server, alice))
        assert [path for path in files if secret in path.read_text()] != []
    assert server.secret_key not in "".join(
        path.read_text() for path in files[1:] if path.name != "server.key"
    )


def test_what_is_no_key_is_refused_with_the_next_action(folder, tmp_path):
    file = folder.folder / "clients" / "alice.key"
    text = file.read_text()
    file.chmod(0o644)
    with pytest.raises(InvalidParameter, match=r"others may read it.*chmod 600"):
        read_secret_file(file, ClientKey)
    file.chmod(0o600)
    too_long = text.replace('_key": "', '_key": "x')
    for wrong in ("", "{}", text[:-9], too_long, text.replace("name", "nome")):
        file.write_text(wrong)
        with pytest.raises(InvalidParameter, match="engine-core keys"):
            read_secret_file(file, ClientKey)
    with pytest.raises(ConfigurationError, match="exists already"):
        folder.make()
    with pytest.raises(ConfigurationError, match="exists already"):
        folder.add("root", is_admin=False)
    for name in ("", "../x", "a/b", ".hidden", "x" * 65, "é"):
        with pytest.raises(ConfigurationError, match="cannot be a key's name"):
            folder.add(name, is_admin=False)
    with pytest.raises(ConfigurationError, match="cannot read the key"):
        KeyFolder(tmp_path / "none").add("x", is_admin=False)
