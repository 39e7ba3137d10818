"""Models of the Hugging Face hub: which of a repository's files are the model, and their
download."""

import functools
import glob
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from engine_core.model_files.download import DISK_IS_FULL, Progress
from engine_core.model_files.errors import (
    DownloadFailed,
    ModelFilesError,
    ModelNotFound,
    UnsupportedModelFile,
)
from engine_core.model_files.transfer import RemoteFile, fetch_files, patiently

_NAME = re.compile(
    r"(?P<host>(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)?"
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w./-]+))?(?::(?P<tag>[\w./-]+))?"
)
_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)/"
    r"(?:resolve|blob|raw|tree)/(?P<revision>refs/[a-z]+/[^/]+|[^/]+)/?(?P<file>.*\.gguf)?.*"
)
"""The address of a repository's page, or of one of its files."""
_DEFAULT_TAG = "Q4_K_M"
"""Ollama's and llama.cpp's, too."""

_SMALL_FILES = re.compile(
    r".*\.(json|jinja|spm)|(.*/)?(tokenizer\.model|merges\.txt)|"
    r"(sparse|colbert)_linear\.pt|\d+_Dense/pytorch_model\.bin"  # layers, read as tensors alone
)
_SAFETENSORS = re.compile(r"(\d+_[^/]+/)?[^/]+\.safetensors")
"""Names of weights at the top, or of a module of sentence-transformers."""
_SAME_AGAIN = re.compile(
    r"consolidated.*|.*\.(fp16|bf16|fp32|non_ema)(-\d{5}-of-\d{5})?\.safetensors"
)
"""Weights that a repository has a second time."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
_GGUF = re.compile(r"(?P<stem>.+?)(?:-\d{5}-of-\d{5})?\.gguf", re.IGNORECASE)
_MMPROJ = re.compile(r"(.*/)?[^/]*mmproj[^/]*\.gguf", re.IGNORECASE)
_LOG_IN = "log in with `hf auth login`"
NOT_OF_A_MODEL = ("mmproj", "imatrix")
"""Words in the names of GGUF files that go beside a model's."""
_TYPE = re.compile(r"(?:UD-)?(?:I?Q\d|TQ\d|MXFP4|BF16|F16|F32)\w*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class HubName:
    """`org/name@revision:tag`; the tag says which GGUF file of several, by its type or name."""

    id: str
    revision: str | None = None
    tag: str | None = None


def parse_hub_name(name: str) -> HubName | None:
    """As typed, also behind hf.co/ or the address of its page; None: it is none, or rather a
    path."""
    if (address := _ADDRESS.fullmatch(unquote(name))) is not None:
        revision = address["revision"]
        return HubName(address["id"], None if revision == "main" else revision, address["file"])
    found = _NAME.fullmatch(name.removesuffix(":latest"))
    is_path = name.endswith((".gguf", ".json"))
    if found is None or (is_path and not (found["host"] or found["tag"])):
        return None
    return HubName(found["id"], found["revision"], found["tag"])


def choose_files(hub_name: HubName, names: Sequence[str]) -> tuple[str, ...]:
    """Those of a repository's files that are the model: parts of one GGUF file, in their order, or
    safetensors with what describes them.
    Raises ModelFilesError: there is none that can be read, or several and no tag that says which.
    """
    ggufs = gguf_files(names)
    weights = [name for name in names if _SAFETENSORS.fullmatch(name)]
    if hub_name.tag is not None or (ggufs and not weights):
        return tuple(choose_gguf(hub_name, ggufs))
    if not weights:
        raise _unreadable(hub_name, names)
    if "config.json" not in names:
        is_adapter = "adapter_config.json" in names
        raise UnsupportedModelFile(
            f"{hub_name.id} has no config.json: it is "
            + (
                "an adapter; serve its base model with --adapter NAME=FOLDER"
                if is_adapter
                else "no model in Hugging Face's layout; name a repository that is"
            )
        )
    if "model.safetensors" in weights and "model.safetensors.index.json" not in names:
        weights = [name for name in weights if "/" in name or name == "model.safetensors"]
    once = [name for name in weights if not _SAME_AGAIN.fullmatch(PurePosixPath(name).name)]
    return (*(once or weights), *(name for name in names if _SMALL_FILES.fullmatch(name)))


def gguf_files(names: Iterable[str]) -> dict[str, list[str]]:
    """A repository's GGUF files of models: by the stem of its name each one, or its parts."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        match = _GGUF.fullmatch(name)
        if match and not any(word in PurePosixPath(name).name.lower() for word in NOT_OF_A_MODEL):
            found[match["stem"]].append(name)
    for stem, files in found.items():
        if f"{stem}.gguf" in files:  # whole, and in parts again
            found[stem] = [f"{stem}.gguf"]
    return found


def gguf_tags(stems: Sequence[str]) -> list[str]:
    """What to call each of a repository's GGUF files: by their types, if these are different."""
    labels = [match[0] if (match := _TYPE.search(stem)) else stem for stem in stems]
    return labels if len(set(labels)) == len(labels) else list(stems)


def choose_gguf(hub_name: HubName, ggufs: dict[str, list[str]]) -> list[str]:
    """The parts of the one that a name means. Raises ModelNotFound: none has that tag, or several
    have."""
    if hub_name.tag is None and len(ggufs) == 1:
        return next(iter(ggufs.values()))
    tag = hub_name.tag or _DEFAULT_TAG
    ends = re.compile(rf"(.*[-._/])?{re.escape(tag)}", re.IGNORECASE)
    inside = re.compile(rf"(.*[-._/])?{re.escape(tag)}([-._/].*)?", re.IGNORECASE)
    for found in (
        [stem for stem, files in ggufs.items() if tag in (stem, *files)],
        [stem for stem in ggufs if ends.fullmatch(stem)],
        [stem for stem in ggufs if inside.fullmatch(stem)],
    ):
        if len(found) == 1:
            return ggufs[found[0]]
        if found:
            break
    if not ggufs:
        raise ModelNotFound(f"{hub_name.id} has no GGUF file; name it without :{hub_name.tag}")
    choices = gguf_tags([*ggufs])
    raise ModelNotFound(
        f"{hub_name.id} has {'several' if found else 'no'} GGUF files of type {tag}; name one of "
        f"{', '.join(choices)}, as {hub_name.id}:{choices[0]}"
    )


def _unreadable(hub_name: HubName, names: Sequence[str]) -> Exception:
    pickle = next((name for name in names if name.endswith(_PICKLES)), None)
    if pickle is None:
        return ModelNotFound(f"{hub_name.id} holds no weights (*.safetensors or *.gguf)")
    return UnsupportedModelFile(
        f"{hub_name.id} has its weights as {pickle} only, which is refused because loading it can "
        f"run code; name a revision with safetensors (its page on the hub may list one under "
        f"Community) as {hub_name.id}@refs/pr/NUMBER, or convert it with transformers' "
        "save_pretrained and give the folder"
    )


def choose_mmproj(names: Iterable[str]) -> str | None:
    """Of a repository's files the encoder that goes with its GGUF text, if any."""
    found = sorted(name for name in names if _MMPROJ.fullmatch(name))
    for kind in ("F16", "BF16", "Q8_0"):
        for name in found:
            if re.search(rf"[-._]{kind}\.gguf$", name, re.IGNORECASE):
                return name
    return found[0] if found else None


def download_from_hub(
    hub_name: HubName,
    *,
    report: Callable[[str], None],
    progress: Progress | None = None,
    wants_mmproj: bool = True,
) -> tuple[Path, Path | None]:
    """The folder of a snapshot, or a GGUF file (the first part) and the mmproj file that goes with
    it, from the hub's cache where it is complete.

    What is large comes into the cache by `fetch_files`, which resumes it and checks its SHA-256;
    the hub's own client then has small files to fetch, and links to make.
    Raises ModelFilesError: nothing there can be read; or no such model, no access, no network."""
    from huggingface_hub import snapshot_download  # half a second, and only needed here

    model_id = hub_name.id
    report(f"looking for {model_id} on the Hugging Face hub")
    try:
        commit, names, large = _listing(hub_name, report)
        try:
            files = choose_files(hub_name, names)
        except ModelFilesError as error:
            if commit is not None:
                raise
            raise DownloadFailed(
                f"the hub's cache does not have it ({error}), and the Hugging Face hub cannot be "
                "reached; check the network and HF_HUB_OFFLINE"
            ) from error
        is_gguf = _GGUF.fullmatch(files[0]) is not None
        mmproj = choose_mmproj(names) if is_gguf and wants_mmproj else None
        wanted = [*files, *([mmproj] if mmproj else [])]
        if commit is not None:
            missing = _missing(hub_name, commit, wanted, large)
            fetch_files(missing, report=report, progress=progress)
        link = functools.partial(
            snapshot_download,
            model_id,
            revision=hub_name.revision,
            local_files_only=commit is None,
            allow_patterns=[glob.escape(name) for name in wanted],
        )
        folder = Path(patiently(link, report))
        return folder / files[0] if is_gguf else folder, folder / mmproj if mmproj else None
    except ModelFilesError:
        raise
    except Exception as error:  # the hub's client and its HTTP stack raise of many kinds
        raise DownloadFailed(_why(hub_name, error)) from error


def _why(hub_name: HubName, error: Exception) -> str:
    """For a user: what a failure of the hub's client means, and what to do."""
    from huggingface_hub import errors

    model_id, hub = hub_name.id, "the Hugging Face hub"
    match error:
        case errors.GatedRepoError():
            return (
                f"{model_id} on {hub} asks for consent first; accept its terms there and {_LOG_IN}"
            )
        case errors.RevisionNotFoundError():
            return (
                f"{model_id} has no revision {hub_name.revision} on {hub}; check its name (the "
                f"type of a GGUF file follows a colon: {model_id}:{_DEFAULT_TAG})"
            )
        case errors.RepositoryNotFoundError():
            return f"{model_id} is not on {hub}, or private; check the name, or {_LOG_IN}"
        case errors.LocalEntryNotFoundError():
            return (
                f"{model_id} is not in the hub's cache, and {hub} cannot be reached; check the "
                "network and HF_HUB_OFFLINE, or pass a folder or .gguf file as --model"
            )
        case OSError(errno=number) if number in DISK_IS_FULL:
            return (
                f"the disk is full: {model_id} could not be fetched whole ({error.strerror}); free "
                "some space, or set HF_HOME to a folder on another disk"
            )
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    advice = f"check HF_TOKEN, or {_LOG_IN}" if "401" in reason else "check the name"
    return (
        f"{model_id} could not be downloaded from {hub}: {reason}; {advice}, or pass a folder or "
        ".gguf file as --model"
    )


def _listing(
    hub_name: HubName, report: Callable[[str], None]
) -> tuple[str | None, list[str], dict[str, tuple[str, int]]]:
    """The commit of a repository, its files, and SHA-256 and bytes of the large ones; without a
    commit the files that the cache has, where the hub cannot say it."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def ask() -> Any:
        return HfApi().repo_info(hub_name.id, revision=hub_name.revision, files_metadata=True)

    try:
        info = ask()
    except Exception:  # as below
        try:
            cached = snapshot_download(
                hub_name.id, revision=hub_name.revision, local_files_only=True, allow_patterns=["-"]
            )
        except LocalEntryNotFoundError:
            info = patiently(ask, report)
        else:
            files = (path for path in Path(cached).rglob("*") if path.is_file())
            return None, [path.relative_to(cached).as_posix() for path in files], {}
    large = {each.rfilename: (each.lfs.sha256, each.lfs.size) for each in info.siblings if each.lfs}
    return info.sha, [each.rfilename for each in info.siblings], large


def _missing(
    hub_name: HubName, commit: str, wanted: Iterable[str], large: dict[str, tuple[str, int]]
) -> Iterator[RemoteFile]:
    """Large files that the hub's cache does not have. Those that only Xet has are left to the hub's
    client."""
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import build_hf_headers

    folder = repo_folder_name(repo_id=hub_name.id, repo_type="model")
    cache, headers = Path(constants.HF_HUB_CACHE), build_hf_headers()
    for name in [each for each in wanted if each in large]:
        sha256, num_bytes = large[name]
        is_here = isinstance(try_to_load_from_cache(hub_name.id, name, revision=commit), str)
        if is_here or num_bytes > constants.MAX_HTTP_DOWNLOAD_SIZE:
            continue
        blob = cache / folder / "blobs" / sha256
        partial = blob.with_name(f"{sha256}.incomplete")
        url = hf_hub_url(hub_name.id, name, revision=commit)
        yield RemoteFile(url, blob, partial, num_bytes, sha256, headers)
