"""The command line of a script: how its application is made, its errors and exit codes."""

import re
import sys

from cyclopts import App, CycloptsError

from frontend.load.interrupt import interrupted_by_sigterm


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
    try:
        with interrupted_by_sigterm():
            return int(app(arguments, exit_on_error=False, print_error=False) or 0)
    except (CycloptsError, *refused) as error:
        code, text = 2, str(error)
    except (*failed,) as error:
        code, text = 1, str(error)
    except KeyboardInterrupt:
        return 130
    print(f"{app.name[0]}: {' '.join(text.split())}", file=sys.stderr)
    return code
