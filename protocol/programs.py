"""How one of our programs starts another, for both sides."""

import contextlib
import os
import sys
from typing import NoReturn


def python_module(module: str) -> list[str]:
    """The command `python -m module`. A folder `frontend` or `protocol` where the user stands does
    not hide ours, unless it is ours."""
    here = ""
    with contextlib.suppress(FileNotFoundError):  # the folder was removed
        here = os.getcwd()  # noqa: PTH109 - as in sys.path
    is_ours = not {"", here}.isdisjoint(sys.path)
    return [sys.executable, *([] if is_ours else ["-P"]), "-m", module]


def become(module: str, arguments: list[str]) -> NoReturn:
    """Be that program from here on, in this process."""
    command = python_module(module)
    os.execv(command[0], [*command, *arguments])
