"""From the value of `--model` to `ModelFiles`: a folder, a .gguf file, a known name or a hub id."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from engine_core.model_files.download import KnownModel, Progress, fetch_known_model
from engine_core.model_files.errors import (
    BrokenModelFile,
    ModelFilesError,
    ModelNotFound,
    UnsupportedModelFile,
    unreadable,
)
from engine_core.model_files.file_url import FileUrl, fetch_url
from engine_core.model_files.gguf.config import GgufMetadata
from engine_core.model_files.gguf.file import GgufFile
from engine_core.model_files.gguf.header import read_gguf_header
from engine_core.model_files.gguf.mmproj import Mmproj
from engine_core.model_files.gguf.tokenizer import build_tokenizer
from engine_core.model_files.hf_folder import HfFolder
from engine_core.model_files.hf_tokenizer import read_folder_tokenizer
from engine_core.model_files.hub import NOT_OF_A_MODEL, HubName, download_from_hub
from engine_core.model_files.interface import ModelFiles, TokenizerFiles
from engine_core.model_files.names import find_model
from engine_core.model_files.stored import marked_as_used
from protocol.presets import model_of


class Located(NamedTuple):
    """The folder or file of a model, the name to show where the path does not tell it, and the
    encoder that came along with a GGUF text."""

    path: Path
    name: str | None = None
    mmproj: Path | None = None


_LATER_PART = re.compile(r".*-(?!00001)\d{5}-of-\d{5}\.gguf")


def open_model_files(
    model: str,
    *,
    tokenizer: str | None = None,
    option: str = "--model",
    mmproj: Path | None = None,
    finds_mmproj: bool = False,
    report: Callable[[str], None],
) -> ModelFiles:
    """Find the model, fetch it if need be, and check that its files are whole.
    Raises ModelFilesError: one of its kinds; the message says what to do.

    Args:
        model: in this order a folder, a .gguf file, a known name, an `org/name` of the hub, with
            `@revision` and the `:tag` of a GGUF file, or the address of a .gguf file.
        tokenizer: the same, or a tokenizer.json, to take the tokenizer from instead.
        option: that names the model, for messages.
        mmproj: the file of a GGUF text's encoder; with `finds_mmproj` that beside it, if one fits.
        report: gets a line before and during everything that takes seconds.
    """
    wants = finds_mmproj and mmproj is None
    found = locate_model(model, option=option, report=report, wants_mmproj=wants)
    files = _open(found, report)
    if isinstance(files, GgufFile) and (mmproj is not None or finds_mmproj):
        _add_encoder(files, mmproj, found.mmproj, report)
    elif mmproj is not None:
        raise UnsupportedModelFile(
            f"--mmproj {mmproj} is for a GGUF file, and {files.path} is a folder; omit it"
        )
    if tokenizer is not None:
        files.given_tokenizer = _open_tokenizer(tokenizer, report=report)
    return files


def _open(found: Located, report: Callable[[str], None]) -> ModelFiles:
    path = found.path
    try:
        if not path.is_dir():
            return GgufFile(path, report=report)
        if not (path / "config.json").is_file() and (gguf := _only_gguf(path)) is not None:
            return GgufFile(gguf, report=report)
        return HfFolder(path, name=found.name)
    except OSError as error:
        raise BrokenModelFile(unreadable(error, path)) from error


def _add_encoder(
    text: GgufFile, named: Path | None, fetched: Path | None, report: Callable[[str], None]
) -> None:
    """The encoder that is named, or else the one that was fetched with the text, or lies beside
    it, if it fits."""
    if named is not None:
        text.mmproj = Mmproj(named, text)
    else:
        found = []
        beside = sorted(text.path.parent.glob("*.[gG][gG][uU][fF]"))
        for file in [fetched] if fetched is not None else beside:
            if "mmproj" in file.name.lower():
                try:
                    found.append(Mmproj(file, text))
                except ModelFilesError as error:
                    report(f"no images by {file.name}: {error}")
        if len(found) > 1:
            names = ", ".join(each.file.name for each in found)
            report(f"no images: {text.path.parent} holds {names}; name one of them as --mmproj")
        text.mmproj = found[0] if len(found) == 1 else None
    if text.mmproj is not None:
        text.config = text.mmproj.config
        report(f"images by {text.mmproj.file.name}")


def locate_model(
    model: str,
    *,
    option: str,
    report: Callable[[str], None],
    progress: Progress | None = None,
    wants_mmproj: bool = True,
) -> Located:
    """A path as it is, else what the name means (`resolve_name`), fetched if need be.

    Raises:
        ModelNotFound, DownloadFailed.
    """
    match find_model(model, option):
        case Path() as path:
            return Located(path)
        case KnownModel() as known:
            return Located(
                marked_as_used(fetch_known_model(known, report=report, progress=progress))
            )
        case HubName() as name:
            fetched, mmproj = download_from_hub(
                name, report=report, progress=progress, wants_mmproj=wants_mmproj
            )
            return Located(marked_as_used(fetched), model_of(model), mmproj)
        case FileUrl() as url:
            return Located(marked_as_used(fetch_url(url, report=report, progress=progress)))


def _only_gguf(folder: Path) -> Path | None:
    """The model's .gguf file in a folder without config.json; None where there is none."""
    found = [
        file
        for file in sorted(folder.glob("*.gguf"))
        if not _LATER_PART.fullmatch(file.name)
        and not any(word in file.name.lower() for word in NOT_OF_A_MODEL)
    ]
    if len(found) > 1:
        raise UnsupportedModelFile(
            f"{folder} holds {len(found)} .gguf files ({', '.join(p.name for p in found[:5])}); "
            f"name one of them"
        )
    return found[0] if found else None


def _open_tokenizer(source: str, *, report: Callable[[str], None]) -> TokenizerFiles:
    path = locate_model(source, option="--tokenizer", report=report, wants_mmproj=False).path
    if path.is_dir():
        found = read_folder_tokenizer(path)
    elif path.suffix == ".gguf":
        meta = GgufMetadata(str(path), read_gguf_header(path).metadata)
        found = build_tokenizer(meta, report=report)
    elif path.name == "tokenizer.json":
        found = read_folder_tokenizer(path.parent)
    else:
        raise UnsupportedModelFile(
            f"{path} is not a tokenizer that is read; give a folder, its tokenizer.json or a .gguf "
            f"file as --tokenizer"
        )
    if found is None:
        raise ModelNotFound(f"{path} holds no tokenizer; give another as --tokenizer")
    return found
