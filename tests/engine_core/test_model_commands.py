"""`engine-core pull`, `list` and `rm`, on a catalogue of one model and a hub's cache of another."""

import json
import os
import sys

import pytest
from fetched import fetched_hub_model, tiny_model

from engine_core.model_commands import Shown
from engine_core.model_files import download, stored
from engine_core.model_files.file_url import FileUrl
from kernels.cpu.packed_file import PackedFileWriter
from protocol.running_daemons import RunningDaemon, listed


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    model = tiny_model(tmp_path, monkeypatch)
    for module in (download, stored):
        monkeypatch.setattr(module, "KNOWN_MODELS", (model,))
    cache_manager = "huggingface_hub.utils._cache_manager.HF_HUB_CACHE"
    monkeypatch.setattr(cache_manager, str(tmp_path / "hub"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def file():
    """Of the model, as if it had been pulled."""
    path = download.models_folder() / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF first second")
    return path


def names(run):
    return [each["name"] for each in json.loads(run("list", "--json")[1])]


@pytest.mark.slow
def test_what_is_pulled_is_listed_and_can_be_removed(run):
    assert run("list")[1].split() == ["NAME", "BYTES", "PACKED", "FORMAT", "LAST", "USED"]
    code, out, err = run("pull", "tiny")
    assert code == 0
    assert out.endswith("tiny.gguf (0 MB)\n")
    assert "fetching tiny (part 1 of 2)" in err
    listing = run("list")[1].splitlines()
    assert listing[1].split()[:2] == ["tiny", "17"]
    code, out, _ = run("rm", "TINY")
    assert (code, out) == (0, "removed tiny: 0 MB are free again\n")
    assert names(run) == []


@pytest.mark.slow
def test_pull_says_in_json_what_ollamas_clients_show(run, monkeypatch):
    monkeypatch.setattr(download, "_PROGRESS_EVERY_S", 0.001)
    code, out, err = run("pull", "tiny", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert any(line.get("total") == 17 and "completed" in line for line in lines)
    assert lines[-1]["status"] == "success"
    assert lines[-1]["bytes"] == 17
    assert len(run("pull", "tiny", "--json")[1].splitlines()) == 1  # it is here


def test_a_terminal_gets_a_bar_with_bytes_and_time(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown = Shown("tiny", prints_json=False)
    for done in (0, 30_000_000, 98_000_000):
        shown.bytes(done, 98_000_000)
    shown.close()
    said = capsys.readouterr().err
    assert "98.0M/98.0M [00:00<00:00" in said
    assert "100%" in said


def test_what_cannot_be_had_or_was_not_fetched_is_one_line_and_exit_code_3(run):
    code, out, err = run("pull", "nothing")
    assert (code, out) == (3, "")
    assert err.startswith("engine-core: 'nothing' is neither a file")
    code, _, err = run("rm", "nothing")
    assert code == 3
    assert err.count("\n") == 1
    assert "'nothing' is not a fetched model (none)" in err


@pytest.mark.parametrize("arguments", [["pull"], ["--no-such-option"], ["--max-num-seqs", "many"]])
def test_wrong_options_are_one_line_in_a_log(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("engine-core: ")


def test_a_model_is_not_removed_while_a_daemon_uses_its_files(run, file):
    daemon = RunningDaemon(pid=4711, model="tiny", address="ipc:///x", files=str(file))
    with listed(daemon):
        code, _, err = run("rm", "tiny")
        assert code == 3
        assert "in use by the daemon with pid 4711" in err
    assert names(run) == ["tiny"]
    assert run("rm", "tiny")[0] == 0


def test_its_packed_weights_are_listed_and_go_with_it(run, file):
    folder = download.cache_folder() / "weights"
    for name, source in (("mine", file), ("other", file.with_name("other.gguf"))):
        PackedFileWriter(folder, 100).finish(folder / f"{name}.weights", {}, [str(source)])()
    (folder / "old.weights").write_bytes(b"of another version")
    packed_bytes = (folder / "mine.weights").stat().st_size
    assert run("list")[1].splitlines()[1].split()[:3] == ["tiny", "17", str(packed_bytes)]
    assert run("rm", "tiny")[0] == 0
    assert {each.name for each in folder.iterdir()} == {"other.weights", "old.weights"}


def test_a_model_of_the_hub_is_listed_with_its_format_and_removed_whole(run, machine):
    snapshot = fetched_hub_model(machine / "hub", "org/name")
    (found,) = json.loads(run("list", "--json")[1])
    assert (found["name"], found["format"]) == ("org/name", "safetensors bfloat16")
    assert found["num_bytes"] > 100
    with listed(RunningDaemon(pid=4711, model="n", address="ipc:///x", files=str(snapshot))):
        assert "4711" in run("rm", "org/name")[2]
    assert run("rm", "org/name")[0] == 0
    assert names(run) == []
    assert not snapshot.exists()


def test_one_of_a_repositorys_files_is_removed_and_what_others_share_stays(run, machine):
    old, new = (
        fetched_hub_model(machine / "hub", "org/name", contents, revision=number * 40)
        for number, contents in (
            ("a", {"m-Q4_K_M.gguf": "four", "m-Q8_0.gguf": "eight", "x-Q6_K.gguf": "same"}),
            ("b", {"m-Q4_K_M.gguf": "four and more", "m-Q6_K.gguf": "same", "mmproj.gguf": "eye"}),
        )
    )
    kinds = ("m-Q4_K_M", "m-Q6_K", "m-Q8_0", "x-Q6_K")
    assert sorted(names(run)) == [f"org/name:{kind}" for kind in kinds]
    served = str((old / "m-Q8_0.gguf").resolve())
    with listed(RunningDaemon(pid=4711, model="n", address="ipc:///x", files=served)):
        assert "4711" in run("rm", "org/name:Q8_0")[2]
        code, out, _ = run("rm", "org/name:q4_k_m")
    assert (code, out) == (0, "removed org/name:m-Q4_K_M: 0 MB are free again\n")
    blobs = sorted(file.read_text() for file in (machine / "hub/models--org--name/blobs").iterdir())
    assert blobs == ["eight", "eye", "same"]
    assert run("rm", "org/name:m-Q6_K")[0] == 0
    assert (old / "x-Q6_K.gguf").read_text() == "same"
    assert not (new / "m-Q6_K.gguf").is_symlink()
    assert "no GGUF files of type Q5_0; name one of" in run("rm", "org/name:Q5_0")[2]
    assert run("rm", f"org/name@{'b' * 40}")[0] == 0
    assert not new.exists()
    assert run("rm", "hf.co/org/name")[0] == 0
    assert names(run) == []
    assert not old.exists()


def test_a_model_is_removed_by_the_name_that_it_was_asked_for_by(run, machine):
    fetched_hub_model(machine / "hub", "Qwen/Qwen3-0.6B-GGUF", {"Qwen3-0.6B-Q8_0.gguf": "eight"})
    url = "https://example.com/a/m-00001-of-00002.gguf"
    for number in (1, 2):
        part = FileUrl(url.replace("00001", f"0000{number}")).path
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text("GGUF")
    found = {each["name"]: each["num_bytes"] for each in json.loads(run("list", "--json")[1])}
    assert found == {"Qwen/Qwen3-0.6B-GGUF:Q8_0": 5, url: 8}
    assert run("rm", "qwen3:0.6b", url)[0] == 0
    assert names(run) == []
    assert list((machine / "hub").iterdir()) == list(FileUrl(url).path.parent.iterdir()) == []


def test_the_last_use_is_a_daemons_not_the_files_own(run, file):
    os.utime(file, (1000.0, 1000.0))
    assert json.loads(run("list", "--json")[1])[0]["last_used_s"] == 1000.0
    stored.marked_as_used(file)
    assert json.loads(run("list", "--json")[1])[0]["last_used_s"] > 10**9
    assert file.stat().st_mtime == 1000.0


def test_a_gguf_file_in_parts_is_as_large_as_all_of_them(tmp_path):
    for number in (1, 2):
        (tmp_path / f"m[1]-0000{number}-of-00002.gguf").write_bytes(b"12345")
    (tmp_path / "m[1]-00001-of-00003.gguf").write_bytes(b"1")
    (tmp_path / "other.gguf").write_bytes(b"123")
    assert stored.size_bytes(tmp_path / "m[1]-00001-of-00002.gguf") == 10
    assert stored.size_bytes(tmp_path / "other.gguf") == 3
