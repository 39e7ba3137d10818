"""Every command and option, from their declarations."""

import re
from collections.abc import Iterable

from cyclopts import App

from protocol.addresses import default_address

_OPTION = re.compile(r"^\* `(--[\w.-]+)", re.M)
_ENGINE = """\
# engine-core
The options of the daemon, as `engine-core --help-all` prints them, and its commands. They may also
stand in a TOML file given with `--config`. Commands of [engine-client](engine-client.md) may be
typed behind `engine-core`, too.
"""
_CLIENT = """\
# engine-client
Commands that talk to a daemon, and the HTTP server.
"""


def engine_core_page() -> str:
    from engine_core.cli import app
    from engine_core.front_door import CLIENT_COMMANDS

    hidden, app.default_parameter = app.default_parameter, None  # which hides the rare ones
    try:
        return _page(_ENGINE, app, without=(*CLIENT_COMMANDS, "--help-all"))
    finally:
        app.default_parameter = hidden


def engine_client_page() -> str:
    from frontend.cli.app import app

    return _page(_CLIENT, app)


def _page(head: str, app: App, without: Iterable[str] = ()) -> str:
    """What cyclopts writes, less its contents, with an anchor for each option: #COMMAND--OPTION."""
    text = app.generate_docs(output_format="markdown", recursive=True).partition("\n")[2]
    text = re.sub(r"(?ms)^#+ Table of Contents.*?^\*\*", "**", text)
    text = re.sub(r"\n +(?=\S)", " ", text)  # wrapped as in a docstring
    text = re.sub(r"docs/(\w+/(\w+)\.md)", r"[\2](../\1)", text)
    text = text.replace(default_address(), "a socket in $XDG_RUNTIME_DIR")
    others = "|".join(map(re.escape, without)) or "-"
    text = re.sub(rf"(?m)^\* \[`({others})`\].*\n", "", text)
    parts = re.split(r"(?m)^(?=##+ )", text)
    shown = [part for part in parts if not re.match(rf"##+ \S+ ({others})\n", part)]
    return head + "".join(_with_anchors(part, app.name[0]) for part in shown)


def _with_anchors(part: str, name: str) -> str:
    heading = part.partition("\n")[0]
    command = heading.lstrip("# ").replace(" ", "-") if heading[:1] == "#" else name

    def anchor(found: re.Match[str]) -> str:
        return f'* <a id="{command}{found[1]}"></a>{found[0][2:]}'

    return _OPTION.sub(anchor, part)
