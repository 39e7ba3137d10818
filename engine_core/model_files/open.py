"""From the value of `--model` to `ModelFiles`: a folder, a .gguf file, a known name or a hub id."""

import re
from collections.abc import Callable
from pathlib import Path

from engine_core.model_files.download import (
    Progress,
    describe_known_models,
    fetch_known_model,
    find_known_model,
)
from engine_core.model_files.errors import (
    BrokenModelFile,
    ModelFilesError,
    ModelNotFound,
    UnsupportedModelFile,
    unreadable,
)
from engine_core.model_files.gguf.config import GgufMetadata
from engine_core.model_files.gguf.file import GgufFile
from engine_core.model_files.gguf.header import read_gguf_header
from engine_core.model_files.gguf.mmproj import Mmproj
from engine_core.model_files.gguf.tokenizer import build_tokenizer
from engine_core.model_files.hf_folder import HfFolder
from engine_core.model_files.hf_tokenizer import read_folder_tokenizer
from engine_core.model_files.hub import NOT_OF_A_MODEL, download_from_hub, parse_hub_name
from engine_core.model_files.interface import ModelFiles, TokenizerFiles
from engine_core.model_files.stored import marked_as_used

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
            `@revision` and the `:tag` of a GGUF file.
        tokenizer: the same, or a tokenizer.json, to take the tokenizer from instead.
        option: that names the model, for messages.
        mmproj: the file of a GGUF text's encoder; with `finds_mmproj` that beside it, if one fits.
        report: gets a line before and during everything that takes seconds.
    """
    files = _open(model, option=option, report=report)
    if isinstance(files, GgufFile) and (mmproj is not None or finds_mmproj):
        _add_encoder(files, mmproj, report)
    elif mmproj is not None:
        raise UnsupportedModelFile(
            f"--mmproj {mmproj} is for a GGUF file, and {files.path} is a folder; omit it"
        )
    if tokenizer is not None:
        files.given_tokenizer = _open_tokenizer(tokenizer, report=report)
    return files


def _open(model: str, *, option: str, report: Callable[[str], None]) -> ModelFiles:
    path, name = locate_model(model, option=option, report=report)
    try:
        if not path.is_dir():
            return GgufFile(path, report=report)
        if not (path / "config.json").is_file() and (gguf := _only_gguf(path)) is not None:
            return GgufFile(gguf, report=report)
        return HfFolder(path, name=name)
    except OSError as error:
        raise BrokenModelFile(unreadable(error, path)) from error


def _add_encoder(text: GgufFile, named: Path | None, report: Callable[[str], None]) -> None:
    """The encoder that is named, or else the one beside the text that fits it."""
    if named is not None:
        text.mmproj = Mmproj(named, text)
    else:
        found = []
        for file in sorted(text.path.parent.glob("*.[gG][gG][uU][fF]")):
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
) -> tuple[Path, str | None]:
    """Path of the folder or file, fetched if need be, and the name to show where the path does not
    tell it.

    Raises:
        ModelNotFound, DownloadFailed.
    """
    if not model.strip():
        raise ModelNotFound(f"{option} is empty; name a model folder, a .gguf file or a known name")
    try:
        path = Path(model).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # ~nobody, a NUL, a loop of links
        raise ModelNotFound(f"{model!r} cannot be looked at: {error}; check it") from error
    if exists:
        return path, None
    known = find_known_model(model)
    if known is not None:
        return marked_as_used(fetch_known_model(known, report=report, progress=progress)), None
    hub_name = parse_hub_name(model)
    if hub_name is not None:
        return marked_as_used(download_from_hub(hub_name, report=report, progress=progress)), model
    if _looks_like_a_path(model):
        raise ModelNotFound(f"{path} does not exist; check the path given as {option}")
    raise ModelNotFound(
        f"{model!r} is neither a file or folder here nor a known name; "
        f"{describe_known_models(model)}; or give a path, or a hub id such as org/name or "
        "org/name:Q4_K_M"
    )


def _looks_like_a_path(model: str) -> bool:
    return (
        model.startswith(("/", "./", "../", "~"))
        or model.endswith((".gguf", ".json", "/"))
        or model.count("/") > 1
    )


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
    path, _ = locate_model(source, option="--tokenizer", report=report)
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
