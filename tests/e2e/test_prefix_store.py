"""Prefix blocks on disk: the same tokens and log-probabilities after kill -9, and much less to
compute."""

import contextlib
import stat
import time

import pytest
from daemons import run_to_exit, running_daemon
from processes import wait_until
from raw_client import RawClient

from protocol.calls import GetRequestInfo, ResetPrefixCache

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_BLOCKS = ("--num-blocks", 200)
PROMPTS = [
    [5 + (number * 13 + place * 7) % 90 for place in range(length)]
    for number, length in enumerate((200, 170, 97, 64, 40))
]
PROMPTS.append(PROMPTS[0][:128] + [3] * 60)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "prefixes"


def answers(client, prompts=PROMPTS, prefix=""):
    """Tokens and the bytes of their log-probabilities, of each prompt, one after the other."""
    found = []
    for number, prompt in enumerate(prompts):
        name = f"{prefix}{number}"
        client.request(name, prompt, max_tokens=8, logprobs=3)
        tokens, _ = client.collect(name, timeout_s=300)[name]
        assert client.logprobs[name]
        found.append((tokens, client.logprobs.pop(name)))
    return found


@contextlib.contextmanager
def serving(model, *options):
    with running_daemon(model, *options) as daemon, RawClient(daemon.address) as client:
        yield daemon, client


@pytest.fixture(scope="module")
def expected(tiny_llama):
    """Without a disk."""
    with serving(tiny_llama, *NUM_BLOCKS) as (_, client):
        return answers(client)


def kill(daemon, client):
    """SIGKILL, once what a prompt left is on disk."""
    wait_until(lambda: client.statistics().num_disk_blocks)
    time.sleep(0.5)
    daemon.kill()


@pytest.mark.parametrize(
    "options",
    [
        ("--block-size", 4, "--num-blocks", 900),
        ("--num-blocks", 20, "--host-cache-memory", "100KB", "--preemption-mode", "swap"),
        ("--quantization", "int4", "--kv-cache-dtype", "int8"),
    ],
    ids=str,
)
def test_answers_are_the_same_bits_after_a_kill_and_prompts_come_from_disk(
    tiny_llama, folder, options
):
    from tests.native_kernels import native_library_or_skip

    native_library_or_skip()
    options = (*NUM_BLOCKS, *options) if "--num-blocks" not in options else options
    options = (*options, "--prefix-cache-dir", folder)
    with serving(tiny_llama, *options) as (daemon, client):
        expected = answers(client)
        kill(daemon, client)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    with serving(tiny_llama, *options) as (_, client):
        assert answers(client) == expected
        statistics = client.statistics()
    assert statistics.num_disk_cached_prompt_tokens >= 150
    assert statistics.num_cached_prompt_tokens >= statistics.num_disk_cached_prompt_tokens


def test_gemma_3_goes_on_from_disk_within_its_windows(folder):
    from engine_core.model_files import open_model_files

    model = open_model_files("gemma3-270m", report=print).path
    prompts = [[2, *(1000 + place * 17 % 9001 for place in range(700))]]
    prompts.append(prompts[0][:600] + [77] * 40)
    options = ("--num-blocks", 400, "--prefix-cache-dir", folder)
    with serving(model, *options) as (daemon, client):
        expected = answers(client, prompts)
        kill(daemon, client)
    with serving(model, *options) as (daemon, client):
        assert answers(client, prompts) == expected
        assert client.call(GetRequestInfo("0")).cache_lookup.num_disk_tokens >= 500
        assert "Traceback" not in daemon.log()


def test_spoiled_and_cut_files_cost_only_time(tiny_llama, folder, expected):
    options = (*NUM_BLOCKS, "--prefix-cache-dir", folder)
    with serving(tiny_llama, *options) as (daemon, client):
        assert answers(client) == expected
        kill(daemon, client)
    for number, path in enumerate(sorted(folder.iterdir())):
        spoiled = bytearray(path.read_bytes())
        if number % 3 == 0:
            spoiled[number * 997 % len(spoiled)] ^= 8
        elif number % 3 == 1:
            del spoiled[number * 997 % len(spoiled) :]
        path.write_bytes(spoiled)
    with serving(tiny_llama, *options) as (daemon, client):
        assert answers(client) == expected
        assert daemon.log().count("is computed anew") >= 1
        assert "Traceback" not in daemon.log()


def test_other_settings_and_changed_weights_find_nothing(tiny_llama, folder, tmp_path):
    import shutil

    changed = shutil.copytree(tiny_llama, tmp_path / "changed")
    weights = changed / "model.safetensors"
    spoiled = bytearray(weights.read_bytes())
    spoiled[-3] ^= 1
    weights.write_bytes(spoiled)
    with serving(tiny_llama, *NUM_BLOCKS, "--prefix-cache-dir", folder) as (daemon, client):
        answers(client)
        kill(daemon, client)
    for model, options in (
        (changed, ()),
        (tiny_llama, ("--block-size", 8)),
        (tiny_llama, ("--quantization", "int8")),
        (tiny_llama, ("--dtype", "bfloat16")),
    ):
        options = (*NUM_BLOCKS, *options, "--prefix-cache-dir", folder)
        with serving(model, *options) as (daemon, client):
            assert client.statistics().num_disk_blocks == 0
            assert "files there are ignored" in daemon.log()


def size_of(path):
    """0: it has vanished, or is still being written and vanishes."""
    try:
        return 0 if path.suffix == ".tmp" else path.stat().st_size
    except FileNotFoundError:
        return 0


def test_two_daemons_share_a_folder(tiny_llama, folder, expected):
    options = (*NUM_BLOCKS, "--prefix-cache-dir", folder, "--prefix-cache-disk", "400KB")
    with (
        serving(tiny_llama, *options) as (one, first),
        serving(tiny_llama, *options) as (other, second),
    ):
        for turn in range(3):
            assert answers(first, prefix=str(turn)) == expected
            assert answers(second, prefix=str(turn)) == expected
            assert sum(map(size_of, folder.iterdir())) <= 400_000
        for daemon in (one, other):
            assert daemon.stop() == 0
            assert "Traceback" not in daemon.log()


def test_a_reset_empties_the_disk_and_a_drain_writes_what_is_queued(tiny_llama, folder):
    options = (*NUM_BLOCKS, "--prefix-cache-dir", folder)
    with serving(tiny_llama, *options) as (daemon, client):
        answers(client)
        client.call(ResetPrefixCache())
        wait_until(lambda: not list(folder.iterdir()))
        answers(client, PROMPTS[:1], prefix="again")
        assert daemon.stop() == 0
    assert len(list(folder.iterdir())) >= 12


def test_prompts_of_a_killed_writer_are_answered_as_before(tiny_llama, folder, expected):
    with running_daemon(tiny_llama, *NUM_BLOCKS, "--prefix-cache-dir", folder) as daemon:
        for _ in range(2):
            with RawClient(daemon.address) as client:
                client.request("a", PROMPTS[0], max_tokens=40)
                client.receive()
                daemon.kill()
            daemon.start()
        with RawClient(daemon.address) as client:
            assert answers(client) == expected


def test_an_unsafe_folder_a_file_and_too_little_room_are_refused_by_name(tiny_llama, tmp_path):
    unsafe = tmp_path / "unsafe"
    unsafe.mkdir()
    unsafe.chmod(0o777)
    file = tmp_path / "file"
    file.write_text("")
    for options, text in (
        (("--prefix-cache-dir", unsafe), "chmod it to 700"),
        (("--prefix-cache-dir", file), f"cannot use {file}"),
        (("--prefix-cache-dir", tmp_path / "a", "--prefix-cache-disk", "1KB"), "at least 16 blo"),
        (("--prefix-cache-disk", "1GiB"), "no effect without --prefix-cache-dir"),
        (("--prefix-cache-dir", tmp_path / "a", "--no-enable-prefix-caching"), "no effect with"),
        (("--prefix-cache-dir", tmp_path / "a", "--trace", tmp_path / "t"), "cannot be replayed"),
        (("--prefix-cache-dir", tmp_path / "a", "--device", "cuda"), "--device cpu"),
    ):
        ended = run_to_exit("--model", tiny_llama, *options)
        assert (ended.returncode, ended.stdout) == (2, ""), text
        assert text in ended.stderr
        assert "Traceback" not in ended.stderr
