"""How families of models write calls, as data: `formats.toml`, one table a format.

family       who writes so
names        other names of it, vLLM's
calls        a call, or a list of them; the first that a template shows is what is forced, any is
             read. In braces what stands in its place:

    {name}          of the tool                 {arguments}   a JSON object
    {id}, {index}   letters, digits; a number   {parameters}  each as `parameter` says
    {object}        a JSON object of name and arguments; {objects}: a list of these, with
                    {object_lines} one a line
    {python}        [f(a=1), g()]; {python_lines} without brackets, one a line
    {braces}        {a:1,b:[true],c:<quote>text<quote>}

parameter    with {key}, {value}: text as it is, all else as JSON, by the tool's schema; or
             {type} says which ("true", "string": text)
begin, end   around all calls; models leave them out
between      two calls
keys         of name and arguments in objects; none: an object is {name: arguments}
quote        around text in braces
wrapped      what may stand around text in tags
are_special  whether markers are tokens that texts leave out otherwise
shown        what a chat template has that writes so: all of one of the lists
hidden       and what it has not
"""

import dataclasses
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

_FIELD = re.compile(
    r"\{(name|id|index|arguments|objects?|object_lines|python|python_lines|braces|parameters|key"
    r"|type|value)\}"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A name in braces, in whose place something of a call stands."""

    name: str


Part = str | Field
"""A piece of a written call: text as it is, or a field."""


def parts_of(written: str) -> tuple[Part, ...]:
    """Text and fields, in turn."""
    pieces = _FIELD.split(written)
    parts: list[Part] = [Field(each) if at % 2 else each for at, each in enumerate(pieces)]
    return tuple(part for part in parts if part)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallSyntax:
    """One format. For the fields see the module."""

    family: str
    calls: tuple[tuple[Part, ...], ...]
    names: tuple[str, ...] = ()
    parameter: tuple[Part, ...] = ()
    begin: str = ""
    end: str = ""
    between: str = ""
    keys: tuple[str, ...] = ("name", "arguments")
    quote: str = ""
    wrapped: tuple[str, ...] = ("", "")
    are_special: bool = True
    shown: tuple[list[str], ...] = ()
    hidden: str = ""

    def is_shown_in(self, template: str) -> bool:
        """Whether a chat template writes calls so."""
        if self.hidden and self.hidden in template:
            return False
        return any(all(each in template for each in shown) for shown in self.shown)

    def spelled(self, template: str) -> tuple[Part, ...]:
        """A call as a chat template shows it."""
        for call in self.calls:
            if all(part.strip() in template for part in call if isinstance(part, str)):
                return call
        return self.calls[0]


def _read(table: dict[str, Any]) -> CallSyntax:
    table["calls"] = [parts_of(call) for call in table["calls"]]
    table["parameter"] = parts_of(table.get("parameter", ""))
    listed: dict[str, Any] = {
        key: tuple(each) if isinstance(each, list) else each for key, each in table.items()
    }
    return CallSyntax(**listed)


@cache
def call_syntaxes() -> dict[str, CallSyntax]:
    """All formats by their first names, in the file's order."""
    with Path(__file__).with_name("formats.toml").open("rb") as stream:
        return {name: _read(table) for name, table in tomllib.load(stream).items()}


def first_name(name: str) -> str:
    """The one in the file, of a format by any of its names."""
    found = (first for first, each in call_syntaxes().items() if name in each.names)
    return next(found, name)
