"""Ollama's Modelfile: presets as a text of instructions, a line each."""

from collections.abc import Iterator
from typing import Any

import msgspec

from protocol.presets import Parameters, Preset, PresetError

_INSTRUCTIONS = ("FROM", "PARAMETER", "TEMPLATE", "SYSTEM", "ADAPTER", "MESSAGE", "LICENSE")
_NAMED = ("PARAMETER", "MESSAGE")
_LISTS = ("stop", "samplers", "dry_sequence_breakers")


def read_modelfile(text: str, name: str = "Modelfile") -> Preset:
    """Instructions in any case and order; a value may stand between quotes, or between three of
    them, and then go on over lines, up to a line that ends with them. `#` begins a comment.
    Raises PresetError: an instruction, parameter or value that is not known, with its line."""
    fields: dict[str, Any] = {"messages": [], "parameters": {}}
    for line, instruction, key, value in _instructions(text, name):
        try:
            _add(fields, instruction, key, value)
            msgspec.convert({"from": "x", **fields}, Preset)
        except ValueError as error:
            why = str(error).partition(" - at ")[0]
            raise PresetError(f"{name}, line {line}: {why}") from None
    if "from" not in fields:
        raise PresetError(f"{name} has no line FROM; add one with a model, as FROM gemma3-270m")
    return msgspec.convert(fields, Preset)


def _instructions(text: str, name: str) -> Iterator[tuple[int, str, str, str]]:
    """Line, instruction, the name of a parameter or role, and value. Raises PresetError."""
    lines = text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n")
    at = 0
    while at < len(lines):
        line, at = lines[at], at + 1
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        first, (word, value), key = at, _first_word(line), ""
        if (instruction := word.upper()) in _NAMED:
            key, value = _first_word(value)
        while (found := _unquoted(value.strip())) is None:
            if at == len(lines):
                raise PresetError(f"{name}, line {first}: its quotes are not closed; add them")
            value, at = f"{value}\n{lines[at]}", at + 1
        if not found and not (value.strip() and instruction == "SYSTEM"):
            raise PresetError(f"{name}, line {first}: {word} has no value; omit it, or add one")
        yield first, instruction, key, found


def _first_word(text: str) -> tuple[str, str]:
    """The text's first word, and what is behind it."""
    word, *rest = text.split(None, 1) or [""]
    return word, "".join(rest)


def _unquoted(value: str) -> str | None:
    """None: its quotes are not closed."""
    for quotes in ('"""', '"'):
        if value.startswith(quotes):
            closed = len(value) >= 2 * len(quotes) and value.endswith(quotes)
            return value[len(quotes) : -len(quotes)] if closed else None
    return value


def _add(fields: dict[str, Any], instruction: str, key: str, value: str) -> None:
    """Raises ValueError: it is not known, or stands twice."""
    parameters, known = fields["parameters"], Parameters.__struct_fields__
    field = instruction.lower()
    if instruction not in _INSTRUCTIONS:
        there = ", ".join(_INSTRUCTIONS)
        raise ValueError(f"there is no instruction {instruction!r:.100}; there are {there}")
    if instruction == "MESSAGE" and key not in ("system", "user", "assistant"):
        raise ValueError(f"the role is {key!r:.100}, it must be system, user or assistant")
    if instruction == "MESSAGE":
        fields["messages"].append({"role": key, "content": value})
    elif instruction == "PARAMETER" and key not in known:
        raise ValueError(f"there is no parameter {key!r:.100}; omit it, or use {', '.join(known)}")
    elif key in _LISTS:
        parameters.setdefault(key, []).append(value)
    elif instruction == "LICENSE" and field in fields:
        fields[field] += f"\n{value}"
    elif (field in fields and instruction != "PARAMETER") or key in parameters:
        raise ValueError(f"{instruction} {key} stands twice; omit one".replace("  ", " "))
    elif instruction == "PARAMETER":
        try:
            read = msgspec.convert({key: value}, Parameters, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"PARAMETER {key} is {value!r:.100}: {error}") from None
        parameters[key] = getattr(read, key)
    else:
        fields[field] = value


def modelfile(preset: Preset) -> str:
    """The text that `read_modelfile` reads as this preset."""
    texts = {name: getattr(preset, name) for name in ("template", "system", "adapter", "license")}
    lines = [f"FROM {preset.from_}"]
    lines += [f"{n.upper()} {_quoted(text)}" for n, text in texts.items() if text is not None]
    lines += [f"PARAMETER {line}" for line in parameter_lines(preset.parameters)]
    lines += [f"MESSAGE {each.role} {_quoted(each.content)}" for each in preset.messages]
    return "\n".join(lines) + "\n"


def parameter_lines(parameters: Parameters) -> list[str]:
    """A line for each value that is set: its name and value."""
    lines = []
    for name, value in parameters.given().items():
        values = value if isinstance(value, list) else [value]
        lines += [f"{name} {_quoted(each) if name in _LISTS else each}" for each in values]
    return lines


def _quoted(text: str) -> str:
    return f'"""{text}"""' if '"' in text or "\n" in text else f'"{text}"'
