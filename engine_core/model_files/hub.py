"""Models of the Hugging Face hub: which of a repository's files are the model, and their
download."""

import glob
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from engine_core.model_files.download import DISK_IS_FULL, Progress
from engine_core.model_files.errors import (
    DownloadFailed,
    ModelFilesError,
    ModelNotFound,
    UnsupportedModelFile,
)

_NAME = re.compile(
    r"(?P<host>(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/|hf://)?"
    r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?:@(?P<revision>[\w./-]+))?(?::(?P<tag>[\w./-]+))?"
)
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
    found = _NAME.fullmatch(name.removesuffix(":latest"))
    if found is None:
        return None
    if name.endswith((".gguf", ".json")) and not (found["host"] or found["tag"]):
        return None
    return HubName(found["id"], found["revision"], found["tag"])


def choose_files(hub_name: HubName, names: Sequence[str]) -> tuple[str, ...]:
    """Those of a repository's files that are the model: parts of one GGUF file, in their order, or
    safetensors with what describes them.
    Raises ModelFilesError: there is none that can be read, or several and no tag that says which.
    """
    ggufs: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        match = _GGUF.fullmatch(name)
        if match and not any(word in PurePosixPath(name).name.lower() for word in NOT_OF_A_MODEL):
            ggufs[match["stem"]].append(name)
    weights = [name for name in names if _SAFETENSORS.fullmatch(name)]
    if hub_name.tag is not None or (ggufs and not weights):
        return tuple(_choose_gguf(hub_name, ggufs))
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


def _choose_gguf(hub_name: HubName, ggufs: dict[str, list[str]]) -> list[str]:
    """Raises ModelNotFound: none has that tag, or several have."""
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
    labels = [match[0] if (match := _TYPE.search(stem)) else stem for stem in ggufs]
    choices = labels if len(set(labels)) == len(labels) else list(ggufs)
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


def download_from_hub(
    hub_name: HubName, *, report: Callable[[str], None], progress: Progress | None = None
) -> Path:
    """The folder of a snapshot, or a GGUF file (the first part), from the hub's cache where it is
    complete.
    Raises ModelFilesError: nothing there can be read; or no such model, no access, no network."""
    from huggingface_hub import snapshot_download  # half a second, and only needed here
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    model_id = hub_name.id
    report(f"looking for {model_id} on the Hugging Face hub")
    try:
        files = choose_files(hub_name, _file_names(hub_name))
        bars = None if progress is None else _bars_to(progress)
        folder = snapshot_download(
            model_id,
            revision=hub_name.revision,
            allow_patterns=[glob.escape(name) for name in files],
            tqdm_class=bars,
        )
        return Path(folder, files[0]) if _GGUF.fullmatch(files[0]) else Path(folder)
    except ModelFilesError:
        raise
    except GatedRepoError as error:
        raise DownloadFailed(
            f"{model_id} on the Hugging Face hub asks for consent first; accept its terms there "
            f"and log in with `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise DownloadFailed(
            f"{model_id} has no revision {hub_name.revision} on the Hugging Face hub; check its "
            f"name (the type of a GGUF file follows a colon: {model_id}:{_DEFAULT_TAG})"
        ) from error
    except RepositoryNotFoundError as error:
        raise DownloadFailed(
            f"{model_id} is not on the Hugging Face hub, or private; check the name, or log in "
            "with `hf auth login`"
        ) from error
    except LocalEntryNotFoundError as error:
        raise DownloadFailed(
            f"{model_id} is not in the hub's cache, and the Hugging Face hub cannot be reached; "
            f"check the network and HF_HUB_OFFLINE, or pass a folder or .gguf file as --model"
        ) from error
    except Exception as error:  # the hub's client and its HTTP stack raise of many kinds
        if isinstance(error, OSError) and error.errno in DISK_IS_FULL:
            raise DownloadFailed(
                f"the disk is full: {model_id} could not be fetched whole; free some space, or set "
                "HF_HOME to a folder on another disk"
            ) from error
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise DownloadFailed(
            f"{model_id} could not be downloaded from the Hugging Face hub: {reason}; check the "
            f"name, or pass a folder or .gguf file as --model"
        ) from error


def _file_names(hub_name: HubName) -> list[str]:
    """Of the repository; where the hub cannot say it, of what its cache holds."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return list(HfApi().list_repo_files(hub_name.id, revision=hub_name.revision))
    except Exception as error:  # as below
        try:
            cached = snapshot_download(
                hub_name.id, revision=hub_name.revision, local_files_only=True, allow_patterns=["-"]
            )
        except LocalEntryNotFoundError:
            if isinstance(error, HfHubHTTPError):
                raise error from None
            raise
        files = (path for path in Path(cached).rglob("*") if path.is_file())
        return [path.relative_to(cached).as_posix() for path in files]


def _bars_to(progress: Progress) -> type:
    """A progress bar for the hub's client that shows nothing and passes its bytes on."""
    from tqdm.auto import tqdm

    lock = threading.Lock()  # files are fetched by several threads
    most = 0  # the hub's client has two bars: of bytes that came, and of those that were written

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **more: Any) -> None:
            self._counts_bytes = more.get("unit") == "B"
            super().__init__(*args, **{**more, "disable": True})

        def update(self, n: float | None = 1) -> None:
            nonlocal most
            with lock:
                self.n += n or 0
                if self._counts_bytes and self.total:
                    most = max(most, min(int(self.n), int(self.total)))
                    progress(most, int(self.total))

    return Bar
