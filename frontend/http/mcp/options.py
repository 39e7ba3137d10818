"""Servers of tools that `--mcp` names by command or URL."""

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from frontend.errors import InvalidInput

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


@dataclass(frozen=True)
class ToolServerOption:
    """It has either a `url` or a `command`."""

    name: str
    url: str | None = None
    command: tuple[str, ...] = ()

    @property
    def token(self) -> str | None:
        """A bearer token for the URL: the variable MCP_NAME_TOKEN."""
        name = self.name.upper().replace("-", "_")
        return os.environ.get(f"MCP_{name}_TOKEN")


def parse_servers(given: Sequence[str]) -> list[ToolServerOption]:
    """
    Raises:
        InvalidInput: one is not NAME=COMMAND or NAME=URL, a name occurs twice, or the package `mcp`
            is not installed.
    """
    servers: dict[str, ToolServerOption] = {}
    for text in given:
        name, _, what = text.partition("=")
        if not _NAME.fullmatch(name):
            raise InvalidInput(
                f"--mcp is {text!r:.200}, it must be NAME=COMMAND or NAME=URL, with a NAME of "
                "letters, digits, - and _ (32 at most, a letter first)"
            )
        if name in servers:
            raise InvalidInput(f"--mcp {name} is given twice; give each server its own name")
        if what.startswith(("http://", "https://")):
            servers[name] = ToolServerOption(name, url=what)
            continue
        try:
            command = tuple(shlex.split(what))
        except ValueError as error:
            raise InvalidInput(f"--mcp {name}: {error} in {what!r:.200}") from None
        if not command:
            raise InvalidInput(f"--mcp {name} has no command; give NAME=COMMAND or NAME=URL")
        servers[name] = ToolServerOption(name, command=command)
    if servers:
        try:
            from mcp import Client  # noqa: F401
        except ImportError as error:
            raise InvalidInput(
                f"--mcp needs the package mcp from 2 on ({error}); install it with "
                "`pip install 'engine-core[mcp]'`"
            ) from None
    return list(servers.values())
