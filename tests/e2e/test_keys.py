"""A daemon on TCP with keys, and client processes' own library: who may do what."""

import asyncio
import os
import socket
import stat
import subprocess
import sys

import pytest
from daemons import run_to_exit, running_daemon

from engine_core.errors import ExitCode
from engine_core.server.keys import KeyFolder
from frontend import LLM, AsyncLLM, SamplingParams
from frontend.errors import (
    CallRefused,
    EngineRefused,
    EngineUnavailable,
    InvalidInput,
    RequestRejected,
)
from protocol.errors import ErrorCode
from protocol.requests import Abort

pytestmark = pytest.mark.slow

PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = KeyFolder(tmp_path_factory.mktemp("keys"))
    folder.make()
    files = {name: folder.add(name, is_admin=name == "admin") for name in ("admin", "alice", "bob")}
    other = KeyFolder(tmp_path_factory.mktemp("others"))
    other.make()
    files["of another engine"] = other.add("alice", is_admin=False)
    files["taken back"] = folder.add("taken-back", is_admin=False)
    (folder.folder / "authorized" / "taken-back.key").unlink()
    return files | {"folder": folder.folder}


@pytest.fixture(scope="module")
def daemon(tiny_llama, keys):
    options = ["--num-blocks", 64, "--keys", keys["folder"]]
    with running_daemon(tiny_llama, *options, bind="tcp://0.0.0.0:0") as daemon:
        yield daemon


@pytest.fixture
def connect(daemon, keys):
    """Connects with a key of that name, over the address that clients see."""
    address = daemon.address.replace("0.0.0.0", "127.0.0.1")

    def connect(name, **options):
        return AsyncLLM(address, keys=name and keys[name], connect_timeout_s=10, **options)

    return connect


def request(llm, max_tokens=20, **options):
    params = SamplingParams(max_tokens=max_tokens, seed=3, ignore_eos=True, detokenize=False)
    return llm.generate({"prompt_token_ids": PROMPT}, params, **options)


async def tokens_of(stream):
    async for output in stream:
        last = output
    return last.outputs[0].token_ids


async def test_clients_with_keys_are_served_and_only_an_admin_may_change_the_engine(connect):
    async with connect("alice") as alice, connect("admin") as admin:
        assert await tokens_of(request(alice)) == await tokens_of(request(admin))
        for call in (alice.request_ids, alice.reset_prefix_cache, alice.drain):
            with pytest.raises(CallRefused, match="needs an admin's key") as refused:
                await call()
            assert refused.value.code is ErrorCode.PERMISSION_DENIED
        assert await alice.ping() and await alice.statistics()
        assert await admin.request_ids() == []
        assert await admin.reset_prefix_cache() > 0


async def test_a_client_cannot_end_or_see_another_ones_request(connect):
    async with connect("alice") as alice, connect("bob") as bob, connect("admin") as admin:
        expected = await tokens_of(request(alice, 100))
        stream = request(alice, 100)
        first = await anext(stream)
        wire_id = first.metrics.engine_request_id
        assert (await admin.request_info(wire_id)).tenant == "alice"
        assert (await alice.request_info(wire_id)).num_prompt_tokens == len(PROMPT)
        with pytest.raises(CallRefused, match="only its own are shown"):
            await bob.request_info(wire_id)
        bob.session._connection.send(Abort((wire_id,), ((wire_id, 0),)))
        assert list((await bob.statistics()).service_by_tenant) == []
        assert list((await admin.statistics()).service_by_tenant) == ["alice"]
        assert await tokens_of(stream) == expected
        assert (await alice.request_info(wire_id)).finish_reason == "length"


async def test_a_client_cannot_use_the_share_of_another_key(connect):
    async with connect("bob") as bob, connect("admin") as admin:
        with pytest.raises(RequestRejected, match=r"'alice'.*key is 'bob'") as refused:
            await tokens_of(request(bob, tenant="alice"))
        assert refused.value.code is ErrorCode.PERMISSION_DENIED
        assert await tokens_of(request(bob, tenant="bob"))
        assert await tokens_of(request(admin, tenant="alice")), "a gateway names its tenants"


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        (None, EngineUnavailable, "it may ask for a key"),
        ("of another engine", EngineUnavailable, "may be for another engine"),
        ("taken back", EngineRefused, "does not take the key 'taken-back'"),
    ],
)
async def test_a_wrong_key_is_refused_at_once_and_others_do_not_notice(
    daemon, connect, name, error, words
):
    async with connect("alice") as alice:
        expected = await tokens_of(request(alice))
        for _ in range(3):
            with pytest.raises(error, match=words):
                await asyncio.wait_for(connect(name).open(), 5)
        assert await tokens_of(request(alice)) == expected
    assert ("refused the key" in daemon.log()) or name != "taken back"


async def test_garbage_at_the_port_changes_nothing(daemon, connect):
    port = int(daemon.address.rsplit(":", 1)[1])
    async with connect("alice") as alice:
        stream = request(alice, 100)
        await anext(stream)
        for garbage in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(5000), b"\xff" * 64, b""):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(garbage)
        assert len(await tokens_of(stream)) == 100
    assert daemon.process.poll() is None


async def test_a_stream_goes_on_after_the_daemon_with_keys_was_killed(tiny_llama, keys):
    options = ["--num-blocks", 64, "--keys", keys["folder"]]
    with running_daemon(tiny_llama, *options, bind="tcp://127.0.0.1:0") as daemon:
        async with AsyncLLM(daemon.address, keys=keys["alice"]) as alice:
            expected = await tokens_of(request(alice, 150))
            stream = request(alice, 150)
            await anext(stream)
            daemon.kill()
            daemon.start()
            assert await tokens_of(stream) == expected


def test_an_open_address_without_keys_ends_the_start_before_the_model_is_read():
    ended = run_to_exit("--model", "/no/such/model", "--bind", "tcp://0.0.0.0:0")
    assert ended.returncode == ExitCode.WRONG_OPTIONS
    [line] = ended.stderr.splitlines()
    assert "engine-core keys" in line and "--insecure" in line


def test_keys_are_made_on_the_command_line_without_showing_secrets(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "engine_core.cli", "keys", *arguments]
        return subprocess.run(
            [*command, "--folder", tmp_path / "keys"], capture_output=True, text=True
        )

    made, added = run(), run("add", "carol")
    assert (made.returncode, added.returncode) == (0, 0), made.stderr + added.stderr
    assert run("add", "carol").returncode == run("add", "../x").returncode == 2
    assert run().returncode == 2
    folder = KeyFolder(tmp_path / "keys")
    assert {key.name: key.is_admin for key in folder.authorized().values()} == {
        "admin": True,
        "carol": False,
    }
    files = [path for path in folder.folder.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert folder.server_key().secret_key not in made.stdout + added.stdout
    assert str(folder.folder / "clients" / "carol.key") in added.stdout


async def test_an_insecure_daemon_serves_everybody_and_obeys_nobody(tiny_llama):
    options = ["--num-blocks", 64, "--insecure"]
    with running_daemon(tiny_llama, *options, bind="tcp://0.0.0.0:0") as daemon:
        assert "IS OPEN TO THE NETWORK" in daemon.log()
        async with AsyncLLM(daemon.address.replace("0.0.0.0", "127.0.0.1")) as llm:
            assert len(await tokens_of(request(llm))) == 20
            for call in (llm.request_ids, llm.reset_prefix_cache, llm.drain):
                with pytest.raises(CallRefused, match="needs an admin's key"):
                    await call()
        assert daemon.process.poll() is None


def test_a_script_joins_with_a_key(daemon, keys):
    address = daemon.address.replace("0.0.0.0", "127.0.0.1")
    with LLM(address=address, keys=keys["alice"]) as llm:
        params = SamplingParams(max_tokens=3, detokenize=False, ignore_eos=True)
        [output] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
    command = [sys.executable, "scripts/load_test.py", "--address", address, "--keys"]
    command += [keys["bob"], "--max-concurrency", "2", "--num-prompts", "4", "--input-len", "8"]
    done = subprocess.run([*command, "--output-len", "3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"num_requests": 4' in done.stdout


async def test_a_key_where_it_has_no_effect_is_refused(keys):
    with pytest.raises(InvalidInput, match="no effect"):
        AsyncLLM("ipc:///run/x", keys=keys["alice"])
    with pytest.raises(InvalidInput, match="cannot read the key"):
        AsyncLLM("tcp://127.0.0.1:1", keys="/no/such/file")
