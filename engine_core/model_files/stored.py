"""Models that were fetched: which there are, how large, when last used; and their removal."""

import contextlib
import dataclasses
import glob
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from engine_core.model_files.download import KNOWN_MODELS, find_known_model
from engine_core.model_files.errors import ModelFilesError, ModelNotFound
from engine_core.model_files.gguf.header import read_gguf_header
from protocol.running_daemons import running_daemons


@dataclasses.dataclass(frozen=True, slots=True)
class StoredModel:
    """`path` is its file, or its folder in the hub's cache; `last_used_s` is since the epoch."""

    name: str
    path: Path
    num_bytes: int
    format: str
    last_used_s: float
    revisions: tuple[str, ...] = ()


def stored_models() -> list[StoredModel]:
    """The last used first.

    Raises:
        ModelFilesError: this user has no home folder.
    """
    found = [*_known_models(), *_hub_models()]
    return sorted(found, key=lambda model: -model.last_used_s)


def remove_stored_model(name: str) -> StoredModel:
    """
    Raises:
        ModelNotFound: it was not fetched.
        ModelFilesError: a daemon uses it, or it cannot be deleted.
    """
    known = find_known_model(name)
    stored = stored_models()
    model = next((each for each in stored if each.name == (known.name if known else name)), None)
    if model is None:
        names = ", ".join(each.name for each in stored) or "none"
        raise ModelNotFound(
            f"{name!r} is not a fetched model ({names}); a file or folder of your own is yours to "
            "delete"
        )
    for daemon in running_daemons():
        if Path(daemon.files).is_relative_to(model.path.resolve()):
            raise ModelFilesError(
                f"{model.name} is in use by the daemon with pid {daemon.pid} at {daemon.address}; "
                f"stop it first: kill {daemon.pid}"
            )
    try:
        if model.revisions:
            from huggingface_hub import scan_cache_dir

            scan_cache_dir().delete_revisions(*model.revisions).execute()
        elif model.path.is_dir():
            shutil.rmtree(model.path)
        else:
            model.path.unlink()
    except OSError as error:
        raise ModelFilesError(f"{model.path} cannot be deleted: {error.strerror}") from error
    return model


def marked_as_used(path: Path) -> Path:
    """Its files' access times are now: many systems keep them no longer."""
    for file in [path] if path.is_file() else path.glob("*.safetensors"):
        with contextlib.suppress(OSError):
            os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))
    return path


def size_bytes(path: Path) -> int:
    """Bytes of a model's weights; of a GGUF file in parts all of them."""
    if path.is_file():
        numbered = re.sub(r"-\d{5}(-of-\d{5}\.gguf)$", r"-?????\1", glob.escape(path.name))
        return sum(part.stat().st_size for part in path.parent.glob(numbered))
    return sum(
        file.stat().st_size for kind in ("safetensors", "gguf") for file in path.glob(f"*.{kind}")
    )


def _known_models() -> Iterator[StoredModel]:
    for known in KNOWN_MODELS:
        path = known.path
        with contextlib.suppress(FileNotFoundError):
            if not known.is_stored:
                continue
            files = path.glob("*.safetensors") if path.is_dir() else [path]
            used_s = max(file.stat().st_atime for file in files)
            kind = "safetensors" if path.is_dir() else _gguf_format(path)
            yield StoredModel(known.name, path, size_bytes(path), kind, used_s)


def _gguf_format(file: Path) -> str:
    """The format's name, with the type that most of its bytes have."""
    with contextlib.suppress(ModelFilesError):
        sizes: Counter[str] = Counter()
        for tensor in read_gguf_header(file).tensors:
            sizes[tensor.quant_type.name] += tensor.num_bytes
        return f"gguf {sizes.most_common(1)[0][0]}"
    return "gguf, damaged"


def _hub_models() -> Iterator[StoredModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repo in repos:
        files = {file.file_name: file for each in repo.revisions for file in each.files}
        ggufs = [file.file_path for name, file in files.items() if name.endswith(".gguf")]
        if repo.repo_type != "model" or not (
            ggufs or any(name.endswith(".safetensors") for name in files)
        ):
            continue
        kind = _gguf_format(min(ggufs)) if ggufs else "safetensors"
        if len(ggufs) > 1:
            kind += f" and {len(ggufs) - 1} more"
        with contextlib.suppress(KeyError, OSError, ValueError, TypeError):
            config = json.loads(files["config.json"].file_path.read_bytes())
            quantised = config.get("quantization_config") or {}
            kind += " " + (
                quantised.get("quant_method") or config.get("dtype") or config["torch_dtype"]
            )
        revisions = tuple(each.commit_hash for each in repo.revisions)
        yield StoredModel(
            repo.repo_id, repo.repo_path, repo.size_on_disk, kind, repo.last_accessed, revisions
        )
