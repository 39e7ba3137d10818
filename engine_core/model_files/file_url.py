"""A GGUF file at an address of the web: fetched once, resumed, checked, kept under its address."""

import functools
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from engine_core.model_files.download import Progress, models_folder
from engine_core.model_files.errors import DownloadFailed, ModelFilesError, ModelNotFound
from engine_core.model_files.transfer import RemoteFile, fetch_files, patiently, sha256_of

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_TIMEOUT_S = 30.0
_HERE = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class FileUrl:
    """The address of a file, of its first part where it has several, and the SHA-256 that it must
    have, if one was given."""

    url: str
    sha256: str | None = None


def parse_file_url(name: str) -> FileUrl | None:
    """`https://HOST/PATH.gguf`, maybe with `#sha256=DIGEST`; None: it is no address.

    Raises:
        ModelNotFound: an address that is not of a GGUF file, or not safe to fetch from.
    """
    if not re.match(r"https?://", name):
        return None
    url, _, fragment = name.partition("#")
    parts = urlsplit(url)
    digest = re.fullmatch(r"sha256=([0-9a-fA-F]{64})", fragment)
    if parts.scheme == "http" and parts.hostname not in _HERE:
        raise ModelNotFound(f"{url} could be changed on the way; give an https address")
    if not parts.path.endswith(".gguf") or {".", ".."} & {*parts.path.split("/")}:
        raise ModelNotFound(f"{url} is not the address of a .gguf file; give one, or an org/name")
    if fragment and digest is None:
        raise ModelNotFound(f"#{fragment} is not #sha256= and 64 hexadecimal digits; correct it")
    part = _PART.search(parts.path)
    if part is not None and int(part[1]) != 1:
        raise ModelNotFound(f"{url} is part {int(part[1])}; give the address of part 1")
    if part is not None and digest is not None:
        raise ModelNotFound(f"#sha256= is of one file, {url} has {int(part[2])} parts; omit it")
    return FileUrl(url, digest and digest[1].lower())


def fetch_url(
    asked: FileUrl, *, report: Callable[[str], None], progress: Progress | None = None
) -> Path:
    """The file, or its first part, downloaded first if it is not there.

    Raises:
        DownloadFailed: there is none, no network, no room, or it is not the file that was meant.
    """
    target = stored_path(asked.url)
    if asked.sha256 is not None and target.is_file() and sha256_of(target) != asked.sha256:
        target.unlink()  # an older one, which nobody had checked
    missing = [url for url in _part_urls(asked.url) if not stored_path(url).is_file()]
    if not missing:
        return target
    report(f"fetching {asked.url}")
    try:
        ask = functools.partial(_remote_file, sha256=asked.sha256)
        files = [patiently(functools.partial(ask, url), report) for url in missing]
        fetch_files(files, report=report, progress=progress)
    except ModelFilesError:
        raise
    except Exception as error:  # the HTTP client raises of many kinds
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise DownloadFailed(
            f"{asked.url} could not be fetched: {reason}; check the address, the network and the "
            f"room in {target.parent}; what is here of it is kept for the next try"
        ) from error
    return target


def stored_path(url: str) -> Path:
    """Where the file of an address is kept: in a folder for its host, and those of its path."""
    parts = urlsplit(url)
    host = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
    return models_folder() / parts.scheme / host / parts.path.lstrip("/")


def stored_urls() -> Iterator[tuple[str, Path]]:
    """The address of each file that was fetched, of several parts the first, and its path."""
    for scheme in ("https", "http"):
        root = models_folder() / scheme
        for path in sorted(root.rglob("*.gguf")):
            part = _PART.search(path.name)
            if part is None or int(part[1]) == 1:
                yield f"{scheme}://{path.relative_to(root).as_posix()}", path


def _part_urls(url: str) -> list[str]:
    parts = urlsplit(url)
    part = _PART.search(parts.path)
    if part is None:
        return [url]
    names = (f"-{number:05d}-of-{part[2]}.gguf" for number in range(1, int(part[2]) + 1))
    return [parts._replace(path=_PART.sub(name, parts.path)).geturl() for name in names]


def _remote_file(url: str, sha256: str | None) -> RemoteFile:
    """What is kept of a file has a name by the version that its server has: another version is
    fetched anew."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    headers = {"accept-encoding": "identity"}
    # some servers answer no HEAD
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_S) as response:
        hf_raise_for_status(response)
        said = response.headers
    version = said.get("etag") or said.get("last-modified") or sha256
    num_bytes = int(said["content-length"]) if "content-length" in said and version else None
    target = stored_path(url)
    key = hashlib.sha256(f"{version} {num_bytes}".encode()).hexdigest()[:16]
    return RemoteFile(
        url=url,
        target=target,
        partial=target.with_name(f"{target.name}.{key}.incomplete"),
        lock=models_folder() / ".locks" / f"{key}.lock",
        num_bytes=num_bytes,
        sha256=sha256,
        headers=headers,
    )
