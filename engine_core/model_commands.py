"""`engine-core pull`, `list` and `rm`: models that are fetched, without a daemon."""

import dataclasses
import json as json_format
import sys
import time
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

if TYPE_CHECKING:
    from tqdm import tqdm

_LINE_EVERY_S = 2.0

_Json = Annotated[bool, Parameter(help="Print JSON.", negative="", show=True)]
_Name = Annotated[
    str, Parameter(help="A known name, or an org/name of the Hugging Face hub.", show=True)
]


def add_model_commands(app: App, failed: Callable[[str], int]) -> None:
    """
    Args:
        failed: says why a command fails; returns the exit code.
    """

    @app.command
    def pull(name: _Name, /, *, json: _Json = False) -> int:
        """Fetch a model, so that a daemon need not."""
        return _pull(name, json, failed)

    @app.command(name="list")
    def list_models(*, json: _Json = False) -> int:
        """List the models that were fetched: bytes, format, when last used."""
        return _list(json, failed)

    @app.command
    def rm(name: _Name, /) -> int:
        """Delete a fetched model, unless a daemon uses it."""
        return _remove(name, failed)


def _pull(name: str, prints_json: bool, failed: Callable[[str], int]) -> int:
    from engine_core.model_files import ModelFilesError
    from engine_core.model_files.open import locate_model
    from engine_core.model_files.stored import size_bytes

    shown = Shown(name, prints_json)
    try:
        path, _ = locate_model(name, option="NAME", report=shown.text, progress=shown.bytes)
        num_bytes = size_bytes(path)
    except (ModelFilesError, OSError) as error:
        shown.close()
        return failed(str(error))
    shown.close()
    done: dict[str, Any] = {"status": "success", "path": str(path), "bytes": num_bytes}
    text = f"{path} ({num_bytes / 1e6:,.0f} MB)"
    print(json_format.dumps(done) if prints_json else text, flush=True)  # noqa: T201
    return 0


class Shown:
    """What a download says: a bar on a terminal, else a line now and then. JSON has Ollama's
    names."""

    def __init__(self, name: str, prints_json: bool) -> None:
        self._name = name
        self._json = prints_json
        self._started_s = time.monotonic()
        self._said_s = 0.0
        self._bar: tqdm[Any] | None = None

    def text(self, line: str) -> None:
        if self._json:
            self._say({"status": line})
        elif self._bar is None:
            print(line, file=sys.stderr, flush=True)  # noqa: T201

    def bytes(self, done: int, total: int) -> None:
        is_terminal = sys.stderr.isatty() and not self._json
        if is_terminal:
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(desc=self._name, unit="B", unit_scale=True)
            self._bar.total = total
            self._bar.update(done - self._bar.n)
            return
        elapsed_s = time.monotonic() - self._started_s
        if elapsed_s - self._said_s < (_LINE_EVERY_S if not self._json else 0.0):
            return
        self._said_s = elapsed_s
        if self._json:
            self._say({"status": f"pulling {self._name}", "completed": done, "total": total})
        else:
            megabytes = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
            self.text(f"{self._name}: {megabytes}, {elapsed_s:.0f} s")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _say(self, document: dict[str, Any]) -> None:
        print(json_format.dumps(document), flush=True)  # noqa: T201


def _list(prints_json: bool, failed: Callable[[str], int]) -> int:
    from engine_core.model_files import ModelFilesError
    from engine_core.model_files.stored import stored_models

    try:
        found = stored_models()
    except ModelFilesError as error:
        return failed(str(error))
    if prints_json:
        documents = [{**dataclasses.asdict(each), "path": str(each.path)} for each in found]
        print(json_format.dumps(documents))  # noqa: T201
        return 0
    rows = [("NAME", "BYTES", "FORMAT", "LAST USED")]
    for each in found:
        used = datetime.fromtimestamp(each.last_used_s).strftime("%Y-%m-%d %H:%M")
        rows.append((each.name, f"{each.num_bytes:,}", each.format, used))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *others in rows:
        cells = [f"{name:<{widths[0]}}", f"{others[0]:>{widths[1]}}", f"{others[1]:<{widths[2]}}"]
        print("  ".join([*cells, others[2]]))  # noqa: T201
    return 0


def _remove(name: str, failed: Callable[[str], int]) -> int:
    from engine_core.model_files import ModelFilesError
    from engine_core.model_files.stored import remove_stored_model

    try:
        model = remove_stored_model(name)
    except ModelFilesError as error:
        return failed(str(error))
    print(f"removed {model.name}: {model.num_bytes / 1e6:,.0f} MB are free again")  # noqa: T201
    return 0
