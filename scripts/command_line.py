"""The command line of a script: how its application is made, its errors and exit codes."""

import re
import signal
import sys
from collections.abc import Iterable
from typing import Any

from cyclopts import App, CycloptsError, Parameter
from cyclopts.validators import Number


def make_app(name: str, help_text: str) -> App:
    """An application whose commands return exit codes.

    Help shows the first paragraph above the options and the others below; indented lines stay as
    they are, others flow to the terminal's width.
    """
    summary, _, rest = re.sub(r"(?<=\S)\n(?=\S)", " ", help_text).partition("\n\n")
    return App(
        name=name,
        help=summary,
        help_epilogue=rest,
        help_format="plaintext",
        version_flags=[],
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )


def option(text: str, **limits: float) -> Parameter:
    """A number's help, and its limits."""
    return Parameter(help=text, validator=Number(**limits))


def refuse_without_effect(options: Any, names: Iterable[str], reason: str) -> None:
    """Raises ValueError: one of these was given. `options`: a dataclass with defaults."""
    for name in names:
        value = getattr(options, name)
        if value != getattr(type(options), name):
            option_name = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option_name} is {value} and does nothing, as {reason}; leave it out"
            )


def run_app(
    app: App,
    arguments: list[str],
    *,
    refused: tuple[type[Exception], ...] = (ValueError,),
    failed: tuple[type[Exception], ...] = (),
) -> int:
    """Run one command line. The exit code is the command's; 2 after wrong options and errors in
    `refused`, 1 after those in `failed` (each is one line on stderr), 130 after Ctrl-C or SIGTERM,
    which ends the processes that were started."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        return int(app(arguments, exit_on_error=False, print_error=False) or 0)
    except (CycloptsError, *refused) as error:
        code, text = 2, str(error)
    except (*failed,) as error:
        code, text = 1, str(error)
    except KeyboardInterrupt:
        return 130
    print(f"{app.name[0]}: {' '.join(text.split())}", file=sys.stderr)
    return code


def _stop(number: int, _frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # a second one must not cut the cleaning up short
    raise KeyboardInterrupt
