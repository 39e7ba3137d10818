"""Models that were fetched: which there are, how large, when last used; and their removal."""

import contextlib
import dataclasses
import glob
import json
import os
import re
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from engine_core.model_files.download import KNOWN_MODELS, cache_folder
from engine_core.model_files.errors import ModelFilesError, ModelNotFound
from engine_core.model_files.file_url import fetched_urls
from engine_core.model_files.gguf.header import read_gguf_header
from engine_core.model_files.hub import HubName, choose_gguf, gguf_files, gguf_tags
from engine_core.model_files.names import resolve_name
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
    """Revisions in the hub's cache that go with it whole."""
    files: tuple[Path, ...] = ()
    """What goes with it, where that is neither whole revisions nor `path`."""
    packed_files: tuple[Path, ...] = ()
    """Its quantised weights as CPUs run them, for the next start."""
    packed_bytes: int = 0


def stored_models() -> list[StoredModel]:
    """The last used first.

    Raises:
        ModelFilesError: this user has no home folder.
    """
    of_hub = (model for repo in _hub_repos() for model in _hub_models(repo))
    found = _with_packed([*_known_models(), *_models_of_urls(), *of_hub])
    return sorted(found, key=lambda model: -model.last_used_s)


def _with_packed(models: Iterable[StoredModel]) -> list[StoredModel]:
    from kernels.cpu.packed_header import origins

    made_of, found = origins(cache_folder() / "weights"), []
    for model in models:
        whole = model.path.resolve()
        files = [
            file
            for file, its in made_of.items()
            if any(Path(each).is_relative_to(whole) for each in its)
        ]
        num_bytes = sum(file.stat().st_size for file in files if file.exists())
        found.append(dataclasses.replace(model, packed_files=tuple(files), packed_bytes=num_bytes))
    return found


def remove_stored_model(name: str) -> StoredModel:
    """A model of the user's cache, one of a repository's GGUF files, or all that the hub's cache
    has of a repository, or of a revision. What another revision has, too, stays.
    Raises ModelFilesError: it was not fetched, a daemon uses it, or it cannot be deleted."""
    (model,) = _with_packed([find_stored_model(name)])
    for daemon in running_daemons():
        if Path(daemon.files).is_relative_to(model.path.resolve()):
            raise ModelFilesError(
                f"{model.name} is in use by the daemon with pid {daemon.pid} at {daemon.address}; "
                f"stop it first: kill {daemon.pid}"
            )
    try:
        for packed in model.packed_files:
            packed.unlink(missing_ok=True)
        if model.revisions:
            from huggingface_hub import scan_cache_dir

            scan_cache_dir().delete_revisions(*model.revisions).execute()
        elif model.path.is_dir():
            shutil.rmtree(model.path)
        else:
            for file in model.files or [model.path]:
                file.unlink(missing_ok=True)
    except OSError as error:
        raise ModelFilesError(f"{model.path} cannot be deleted: {error.strerror}") from error
    return model


def find_stored_model(name: str) -> StoredModel:
    """Raises ModelNotFound: it was not fetched."""
    meant, stored = resolve_name(name), stored_models()
    if isinstance(meant, HubName):
        repos = (repo for repo in _hub_repos() if repo.repo_id == meant.id)
        found = [model for repo in repos for model in _hub_models(repo, meant)]
    else:
        found = [model for model in stored if meant is not None and model.path == meant.path]
    if found:
        return found[0]
    names = ", ".join(model.name for model in stored) or "none"
    raise ModelNotFound(
        f"{name!r} is not a fetched model ({names}); a file or folder of your own is yours to "
        "delete"
    )


def marked_as_used(path: Path) -> Path:
    """Its files' access times are now: many systems keep them no longer."""
    for file in [path] if path.is_file() else path.glob("*.safetensors"):
        with contextlib.suppress(OSError):
            os.utime(file, ns=(time.time_ns(), file.stat().st_mtime_ns))
    return path


def size_bytes(path: Path) -> int:
    """Bytes of a model's weights; of a GGUF file in parts all of them."""
    if path.is_dir():
        files = [file for kind in ("safetensors", "gguf") for file in path.glob(f"*.{kind}")]
    else:
        files = _parts(path)
    return sum(file.stat().st_size for file in files)


def _parts(first: Path) -> list[Path]:
    numbered = re.sub(r"-\d{5}(-of-\d{5}\.gguf)$", r"-?????\1", glob.escape(first.name))
    return sorted(first.parent.glob(numbered))


def _known_models() -> Iterator[StoredModel]:
    for known in KNOWN_MODELS:
        path = known.path
        with contextlib.suppress(FileNotFoundError):
            if not known.is_stored:
                continue
            files = path.glob("*.safetensors") if path.is_dir() else [path]
            used_s = max(file.stat().st_atime for file in files)
            kind = "safetensors" if path.is_dir() else gguf_format(path)
            yield StoredModel(known.name, path, size_bytes(path), kind, used_s)


def gguf_format(file: Path) -> str:
    """The format's name, with the type that most of its bytes have."""
    with contextlib.suppress(ModelFilesError):
        sizes: Counter[str] = Counter()
        for tensor in read_gguf_header(file).tensors:
            sizes[tensor.quant_type.name] += tensor.num_bytes
        return f"gguf {sizes.most_common(1)[0][0]}"
    return "gguf, damaged"


def _models_of_urls() -> Iterator[StoredModel]:
    for url in fetched_urls():
        path, files = url.path, tuple(part.path for part in url.parts)
        kind, used_s = gguf_format(path), path.stat().st_atime
        yield StoredModel(url.url, path, size_bytes(path), kind, used_s, files=files)


def _hub_repos() -> list[Any]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []


def _hub_models(repo: Any, meant: HubName | None = None) -> Iterator[StoredModel]:
    """Each model that the hub's cache has of a repository; or what a name means, which without a
    tag is all of it. Raises ModelNotFound: none that is here has the name's tag."""
    asked = meant and meant.revision
    revisions = [each for each in repo.revisions if asked in (None, each.commit_hash, *each.refs)]
    files: defaultdict[str, list[Any]] = defaultdict(list)
    for each in revisions:
        for file in each.files:
            files[file.file_path.relative_to(each.snapshot_path).as_posix()].append(file)
    hashes = tuple(each.commit_hash for each in revisions)
    ggufs = gguf_files(files)
    has_safetensors = any(name.endswith(".safetensors") for name in files)
    if meant is not None and meant.tag is not None:
        chosen = choose_gguf(meant, ggufs)
    for names, tag in zip(ggufs.values(), gguf_tags([*ggufs]), strict=True):
        if meant is None or (meant.tag is not None and names == chosen):
            own = {file.file_path: file for name in names for file in files[name]}
            others = (file for each in repo.revisions for file in each.files)
            kept = {_blob(file.file_path) for file in others if file.file_path not in own}
            yield StoredModel(
                f"{repo.repo_id}:{tag}",
                files[names[0]][0].file_path,
                _num_bytes(own.values()),
                gguf_format(files[names[0]][0].file_path),
                max(file.blob_last_accessed for file in own.values()),
                revisions=hashes if len(ggufs) + has_safetensors == 1 else (),
                files=(*own, *({_blob(link) for link in own} - kept)),
            )
    if hashes and (has_safetensors if meant is None else meant.tag is None):
        kind = "safetensors"
        with contextlib.suppress(LookupError, OSError, ValueError, TypeError):
            config = json.loads(files["config.json"][0].file_path.read_bytes())
            quantised = config.get("quantization_config") or {}
            kind += " " + (
                quantised.get("quant_method") or config.get("dtype") or config["torch_dtype"]
            )
        every = (file for each in files.values() for file in each)
        yield StoredModel(
            repo.repo_id, repo.repo_path, _num_bytes(every), kind, repo.last_accessed, hashes
        )


def _blob(link: Path) -> Path:
    """What a file of a snapshot is in its repository's cache: itself, or where its link leads."""
    target = link.parent / link.readlink() if link.is_symlink() else link
    return target.parent.resolve() / target.name


def _num_bytes(files: Iterable[Any]) -> int:
    return sum({_blob(file.file_path): file.size_on_disk for file in files}.values())
