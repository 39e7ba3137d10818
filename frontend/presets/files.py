"""Files that were sent to a server, by their SHA-256, and folders of them: models and adapters of
presets. A folder's files are hard links, so that a blob is deleted with the last that uses it."""

import asyncio
import contextlib
import hashlib
import json
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterable, Mapping
from pathlib import Path

from protocol.presets import PresetError, all_presets, presets_folder
from protocol.private_files import create_private_file, make_private_folder

_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9_][\w.+-]{0,199}")
_SPARE_BYTES = 1 << 30
"""Stay free on the disk."""
_AT_ONCE = 1 << 20
_UNUSED_S = 86400.0
"""A blob that no folder has, and a folder that no preset has, is deleted after that."""


class NoSpace(PresetError):
    """The disk has no room for a file."""


def blob_file(digest: str) -> Path:
    """Where the file of this digest is, or would be. Raises PresetError: it is none."""
    if (found := _DIGEST.fullmatch(digest)) is None:
        raise PresetError(f"the digest is {digest!r:.100}, it must be sha256: and 64 hex digits")
    return presets_folder().parent / "blobs" / f"sha256-{found[1]}"


async def receive_blob(digest: str, pieces: AsyncIterable[bytes], num_bytes: int) -> None:
    """Keep a file that comes in pieces, if it is what its digest says.

    Args:
        num_bytes: as many as are to come; 0: not known.

    Raises:
        PresetError: it is another file, or there is no room for it. OSError: it cannot be written.
    """
    target = blob_file(digest)
    await asyncio.to_thread(_make_room, target.parent, num_bytes)
    found = hashlib.sha256()
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as scratch:
        whole = Path(scratch, target.name)
        with create_private_file(whole) as file:

            def write(data: bytes) -> None:
                if shutil.disk_usage(target.parent).free < _SPARE_BYTES + len(data):
                    raise _no_space(target.parent, len(data))
                found.update(data)
                file.write(data)

            held = bytearray()
            async for piece in pieces:
                held += piece
                if len(held) >= _AT_ONCE:
                    await asyncio.to_thread(write, bytes(held))
                    held.clear()
            await asyncio.to_thread(write, bytes(held))
        if f"sha256-{found.hexdigest()}" != target.name:
            raise PresetError(
                f"digest mismatch, expected {digest!r}, got 'sha256:{found.hexdigest()}'; send the "
                "file again"
            )
        whole.replace(target)


def _make_room(folder: Path, num_bytes: int) -> None:
    make_private_folder(folder)
    for each in (*_folders().glob("sha256-*"), *folder.glob("sha256-*")):
        with contextlib.suppress(FileNotFoundError):
            status = each.stat()
            if time.time() - status.st_mtime < _UNUSED_S:
                continue
            if each.parent == folder and status.st_nlink == 1:
                each.unlink()
            remove_unused(str(each))
    if shutil.disk_usage(folder).free < _SPARE_BYTES + num_bytes:
        raise _no_space(folder, num_bytes)


def _no_space(folder: Path, num_bytes: int) -> NoSpace:
    free = shutil.disk_usage(folder).free
    return NoSpace(
        f"{num_bytes:,} bytes are to come, {free:,} are free on the disk, and {_SPARE_BYTES:,} "
        "stay so; delete models"
    )


def folder_of(files: Mapping[str, str]) -> Path:
    """A folder of blobs by these names, the same for the same files.
    Raises PresetError: a name that is none of a file in a folder, or a blob that is not there."""
    for name in files:
        if not _NAME.fullmatch(name):
            raise PresetError(f"{name!r:.100} cannot be a file's name in the model's folder")
    listed = json.dumps(sorted(files.items())).encode()
    folder = _folders() / f"sha256-{hashlib.sha256(listed).hexdigest()[:12]}"
    if folder.exists():
        return folder
    make_private_folder(folder.parent)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as scratch:
        made = Path(scratch, "files")
        made.mkdir()
        for name, digest in files.items():
            try:
                (made / name).hardlink_to(blob_file(digest))
            except FileNotFoundError:
                what = f"there is no blob {digest!r:.100}; send it to /api/blobs first"
                raise PresetError(what) from None
        with contextlib.suppress(OSError):  # somebody else has made it
            made.rename(folder)
    return folder


def model_of_files(files: Mapping[str, str]) -> str:
    """The path of a model of these blobs. Raises PresetError: they are none."""
    ends = [Path(name).suffix.lower() for name in files]
    if ".gguf" not in ends and not ("config.json" in files and ".safetensors" in ends):
        raise PresetError(
            "files are no model; send a .gguf file, or config.json, .safetensors files and the "
            "tokenizer's"
        )
    return str(folder_of(files))


def adapter_of_files(files: Mapping[str, str]) -> str:
    """The path of an adapter of these blobs. Raises PresetError: they are none."""
    if "adapter_config.json" in files:
        return str(folder_of(files))
    if len(files) != 1 or not next(iter(files)).lower().endswith(".gguf"):
        raise PresetError(
            "adapters are no adapter; send one .gguf file, or adapter_config.json and "
            "adapter_model.safetensors"
        )
    return str(folder_of(files) / next(iter(files)))


def sent_models() -> list[str]:
    """The paths of models that presets have of files that were sent."""
    paths = {each.from_ for each in all_presets().values() if _folder(each.from_) is not None}
    return sorted(each for each in paths if Path(each).exists())


def remove_unused(path: str | None) -> bool:
    """Delete the folder of a model or adapter that was sent and that no preset has, and its blobs.
    False: it stays."""
    folder = None if path is None else _folder(path)
    used = [path for each in all_presets().values() for path in (each.from_, each.adapter) if path]
    if folder is None or folder in map(_folder, used):
        return False
    numbers = [file.stat().st_ino for file in folder.iterdir()]
    shutil.rmtree(folder)
    for blob in (presets_folder().parent / "blobs").glob("sha256-*"):
        status = blob.stat()
        if status.st_nlink == 1 and status.st_ino in numbers:
            blob.unlink()
    return True


def _folders() -> Path:
    return presets_folder().parent.resolve() / "files"


def _folder(path: str) -> Path | None:
    """The folder of sent files in which a path is; None: in none."""
    given = Path(path)
    return next((each for each in (given, given.parent) if each.parent == _folders()), None)
