"""A GGUF file at an address of the web: fetched once, resumed, checked, kept under its address."""

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from engine_core.model_files.download import Progress, models_folder
from engine_core.model_files.errors import DownloadFailed, ModelFilesError, ModelNotFound
from engine_core.model_files.transfer import RemoteFile, fetch_files, sha256_of

_ADDRESS = re.compile(
    r"https?://(?P<host>[\w.-]+)(:\d+)?/(?!(.*/)?\.{1,2}/)[^?]*\.gguf(\?.*)?", re.ASCII
)
_PART = re.compile(r"-\d{5}-of-(?!00000)(\d{5})\.gguf$")
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class FileUrl:
    """The address of a file, of several parts the first, and the SHA-256 that was given for it."""

    url: str
    sha256: str | None = None

    @property
    def path(self) -> Path:
        """Where it is kept: in a folder for its host, and those of its path."""
        parts = urlsplit(self.url)
        return models_folder() / parts.scheme / parts.netloc / parts.path.lstrip("/")

    @property
    def parts(self) -> "list[FileUrl]":
        """The file, or each part of it."""
        url = urlsplit(self.url)
        part = _PART.search(url.path)
        if part is None:
            return [self]
        names = (f"-{number:05d}-of-{part[1]}.gguf" for number in range(1, int(part[1]) + 1))
        return [FileUrl(url._replace(path=_PART.sub(name, url.path)).geturl()) for name in names]


def parse_file_url(name: str) -> FileUrl | None:
    """`https://HOST/PATH.gguf`, maybe with `#sha256=DIGEST`; None: it is no address.
    Raises ModelNotFound: it is not that of a GGUF file, or not safe to fetch from."""
    if not re.match(r"https?://", name):
        return None
    url, _, fragment = name.partition("#")
    found = _ADDRESS.fullmatch(url)
    digest = re.fullmatch(r"(sha256=([0-9a-f]{64}))?", fragment.lower())
    if found is None:
        raise ModelNotFound(f"{url} is not the address of a .gguf file; give one, or an org/name")
    if url.startswith("http:") and found["host"] not in ("localhost", "127.0.0.1"):
        raise ModelNotFound(f"{url} could be changed on the way; give an https address")
    if digest is None:
        raise ModelNotFound(f"#{fragment} is not #sha256= and 64 hexadecimal digits; correct it")
    return FileUrl(FileUrl(url).parts[0].url, digest[2])


def fetch_url(
    asked: FileUrl, *, report: Callable[[str], None], progress: Progress | None = None
) -> Path:
    """The file, or its first part, downloaded first if it is not there.
    Raises DownloadFailed: there is none, no network, no room, or it is not what was meant."""
    if asked.sha256 and asked.path.is_file() and sha256_of(asked.path) != asked.sha256:
        asked.path.unlink()  # an older one, which nobody had checked
    missing = [part for part in asked.parts if not part.path.is_file()]
    if not missing:
        return asked.path
    report(f"fetching {asked.url}")
    try:
        files = [_remote_file(asked if part.url == asked.url else part) for part in missing]
        fetch_files(files, report=report, progress=progress)
    except ModelFilesError:
        raise
    except Exception as error:  # the HTTP client raises of many kinds
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise DownloadFailed(
            f"{asked.url} could not be fetched: {reason}; check the address, the network and the "
            f"room in {asked.path.parent}; what is here of it is kept for the next try"
        ) from error
    return asked.path


def fetched_urls() -> Iterator[FileUrl]:
    """Each file that is here, of several parts the first."""
    for scheme in ("https", "http"):
        root = models_folder() / scheme
        for path in sorted(root.rglob("*.gguf")):
            url = FileUrl(f"{scheme}://{path.relative_to(root).as_posix()}")
            if url.parts[0].url == url.url:
                yield url


def _remote_file(file: FileUrl) -> RemoteFile:
    """What is kept of a file has a name by the version that its server has: another version is
    fetched anew."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    headers = {"accept-encoding": "identity"}
    # some servers answer no HEAD
    with get_session().stream("GET", file.url, headers=headers, timeout=_TIMEOUT_S) as response:
        hf_raise_for_status(response)
        said = response.headers
    version = said.get("etag") or said.get("last-modified") or file.sha256
    num_bytes = int(said["content-length"]) if "content-length" in said and version else None
    key = hashlib.sha256(f"{version} {num_bytes}".encode()).hexdigest()[:16]
    partial = file.path.with_name(f"{file.path.name}.{key}.incomplete")
    return RemoteFile(file.url, file.path, partial, num_bytes, file.sha256, headers)
