"""`engine-core pull`, `list` and `rm`: models that are fetched, without a daemon; and `stop`."""

import dataclasses
import functools
import json as json_format
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar, cast

from cyclopts import Parameter

from engine_core.errors import ConfigurationError, StartupError
from engine_core.installation import missing_engine
from protocol.presets import PresetError, all_presets, preset_file, remove_preset

if TYPE_CHECKING:
    from tqdm import tqdm

    from engine_core.model_files import ModelFiles
    from kernels.interface.weights import WeightPart

P = ParamSpec("P")
T = TypeVar("T")

_LINE_EVERY_S = 2.0
_POLL_S = 0.05

Json = Annotated[bool, Parameter(help="Print JSON.", negative="", show=True)]
_Name = Annotated[
    str,
    Parameter(
        help="A known name (qwen3:8b), an org/name of the Hugging Face hub (org/name:Q4_K_M of "
        "GGUF files), or the address of a .gguf file.",
        show=True,
    ),
]


def check_engine_installed() -> None:
    """Raises StartupError: the client is installed alone; with what to type."""
    from engine_core.startup.before_torch import has_nvidia_driver

    if missing := missing_engine(has_gpu=has_nvidia_driver()):
        raise StartupError(missing)


def until_nobody_reads(command: Callable[P, T]) -> Callable[P, T | None]:
    """Who reads may have seen enough, as `head` has: that is no fault."""

    @functools.wraps(command)
    def run(*args: P.args, **more: P.kwargs) -> T | None:
        try:
            return command(*args, **more)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return None

    return run


def with_one_error(command: Callable[P, T]) -> Callable[P, T | None]:
    @functools.wraps(command)
    def run(*args: P.args, **more: P.kwargs) -> T | None:
        check_engine_installed()
        from engine_core.model_files import ModelFilesError

        try:
            return until_nobody_reads(command)(*args, **more)
        except PresetError as error:
            raise ConfigurationError(str(error)) from error
        except (ModelFilesError, OSError) as error:
            raise StartupError(str(error)) from error

    return run


@with_one_error
def pull(name: _Name, /, *, json: Json = False) -> None:
    """Fetch a model and pack its quantised weights for this CPU, so that a daemon need not."""
    from engine_core.model_files.open import locate_model
    from engine_core.model_files.stored import size_bytes

    shown = Shown(name, prints_json=json)
    try:
        path = locate_model(name, option="NAME", report=shown.text, progress=shown.bytes).path
    finally:
        shown.close()
    _pack_ahead(name, prints_json=json)
    num_bytes = size_bytes(path)
    done = {"status": "success", "path": str(path), "bytes": num_bytes}
    print_line(json_format.dumps(done) if json else f"{path} ({num_bytes / 1e6:,.0f} MB)")


def _pack_ahead(name: str, *, prints_json: bool) -> None:
    """Pack the quantised weights of a model that is here as a daemon without options would, unless
    some are kept; if they cannot be packed, its start says why."""
    from engine_core.model_files import ModelFilesError, open_model_files
    from engine_core.model_files.download import cache_folder
    from kernels.cpu.packed_header import origins

    try:
        files = open_model_files(name, finds_mmproj=True, report=lambda _line: None)
    except ModelFilesError:
        return
    if not files.quantised_types:
        return
    sources = {str(file.resolve()) for file in files.weight_files}
    if any(sources == set(its) for its in origins(cache_folder() / "weights").values()):
        return
    from engine_core.options.engine import EngineOptions  # torch, from here on
    from engine_core.startup.device import choose_device
    from engine_core.startup.model import load_any_model
    from engine_core.startup.pooled_files import pooled_files
    from kernels.cpu.library import NativeLibraryUnavailable, load_library

    options = EngineOptions(model=name)
    shown = Shown(f"{name}, packed", prints_json=prints_json)
    try:
        counted = _CountedFiles(files, shown.bytes)
        pooled = pooled_files(cast("ModelFiles", counted), options.pooling)
        device, _ = choose_device(options, pooled)
        if device.type == "cpu":
            load_library(report=shown.text)
            load_any_model(options, pooled, device)  # the process ends when they are on the disk
    except (StartupError, NativeLibraryUnavailable):
        return
    finally:
        shown.close()


class _CountedFiles:
    """`ModelFiles` that tell how many bytes of all were read."""

    def __init__(self, files: "ModelFiles", progress: Callable[[int, int], None]) -> None:
        self._files = files
        self._progress = progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def tensors(self, *, keeps_blocks: bool = False) -> "Iterator[tuple[str, WeightPart]]":
        done = told = 0
        total = sum(file.stat().st_size for file in self._files.weight_files)
        for name, part in self._files.tensors(keeps_blocks=keeps_blocks):
            yield name, part
            arrays = getattr(part, "arrays", {"": part}).values()
            done = min(total, done + sum(array.numel() * array.itemsize for array in arrays))
            if (done - told) * 100 >= total:
                told = done
                self._progress(done, total)
        self._progress(total, total)


@with_one_error
def list_models(*, json: Json = False) -> None:
    """List the models that were fetched, and your own names: bytes, those kept packed, format, when
    last used."""
    from engine_core.model_files.stored import StoredModel, stored_models

    found = []
    for name, preset in all_presets().items():
        file = preset_file(name)
        kind, status = f"preset of {preset.from_}", file.stat()
        found.append(StoredModel(name, file, status.st_size, kind, status.st_mtime))
    found += stored_models()
    if json:
        print_line(json_format.dumps([dataclasses.asdict(each) for each in found], default=str))
        return
    width = max(len(name) for name in ["NAME", *(each.name for each in found)])
    most = max(20, *(len(each.format) for each in found), 0)
    print_line(f"{'NAME':<{width}}  {'BYTES':>15}  {'PACKED':>15}  {'FORMAT':<{most}}  LAST USED")
    for each in found:
        used = f"{datetime.fromtimestamp(each.last_used_s):%Y-%m-%d %H:%M}"
        sizes = f"{each.num_bytes:>15,}  {each.packed_bytes:>15,}"
        print_line(f"{each.name:<{width}}  {sizes}  {each.format:<{most}}  {used}")


@with_one_error
def rm(name: _Name, /, *more: _Name) -> None:
    """Delete a name of your own, or a fetched model and its packed weights, unless a daemon uses
    it; also several."""
    from engine_core.model_files.stored import remove_stored_model

    for each in (name, *more):
        if remove_preset(each):
            print_line(f"removed {each}; the files of its model stay")
            continue
        model = remove_stored_model(each)
        megabytes = (model.num_bytes + model.packed_bytes) / 1e6
        print_line(f"removed {model.name}: {megabytes:,.0f} MB are free again")


def stop(
    name: Annotated[
        str | None, Parameter(help="Its model, address or pid; default: at the default address.")
    ] = None,
    /,
) -> None:
    """Stop a daemon of this user; running requests end first."""
    from protocol.addresses import default_address
    from protocol.running_daemons import running_daemons

    daemons = running_daemons()
    names = [{each.model, each.asked, each.address, str(each.pid)} for each in daemons]
    wanted = default_address() if name is None else name
    found = [each for each, its in zip(daemons, names, strict=True) if wanted in its]
    if name is None and not found:
        found = daemons
    if len(found) != 1:
        listed = ", ".join(f"{each.pid} ({each.model})" for each in daemons)
        if not listed:
            raise StartupError("no daemon of this user runs")
        which = "several daemons run" if found else f"no daemon {name} runs"
        raise StartupError(f"{which}; name one by its pid: {listed}")
    os.kill(found[0].pid, signal.SIGTERM)
    while any(each.pid == found[0].pid for each in running_daemons()):
        time.sleep(_POLL_S)
    print_line(f"stopped {found[0].model}")


class Shown:
    """What a download says: a bar on a terminal, else a line now and then. JSON has Ollama's
    names."""

    def __init__(self, name: str, *, prints_json: bool) -> None:
        self._name = name
        self._json = prints_json
        self._started_s = time.monotonic()
        self._said_s = 0.0
        self._bar: tqdm[Any] | None = None

    def text(self, line: str) -> None:
        if self._json:
            print_line(json_format.dumps({"status": line}))
        elif self._bar is None:
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    def bytes(self, done: int, total: int, digest: str = "") -> None:
        if self._json:
            what = digest.removeprefix("sha256:")[:12] or self._name
            status = {"status": f"pulling {what}", "completed": done, "total": total}
            print_line(json_format.dumps(status | ({"digest": digest} if digest else {})))
        elif sys.stderr.isatty():
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(desc=self._name, total=total, unit="B", unit_scale=True)
            self._bar.update(done - self._bar.n)
        elif (elapsed_s := time.monotonic() - self._started_s) >= self._said_s + _LINE_EVERY_S:
            self._said_s = elapsed_s
            megabytes = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
            self.text(f"{self._name}: {megabytes}, {elapsed_s:.0f} s")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def print_line(text: str) -> None:
    print(text, flush=True)  # noqa: T201
