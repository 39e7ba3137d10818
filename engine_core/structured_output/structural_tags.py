"""Structural tags, in vLLM's older form and in xgrammar's formats, as a grammar in Lark's form."""

from collections.abc import Callable, Sequence
from typing import Any

from llguidance import regex_to_lark

from engine_core.structured_output.regexes import check_regex, with_ascii_classes

_DEFAULTS: dict[str, dict[str, Any]] = {
    "const_string": {"value": ""},
    "json_schema": {"json_schema": {}, "style": "json"},
    "regex": {"pattern": "", "excludes": []},
    "any_text": {"excludes": []},
    "token": {"token": ""},
    "sequence": {"elements": []},
    "or": {"elements": []},
    "tag": {"begin": "", "content": {}, "end": ""},
    "triggered_tags": {
        "triggers": [],
        "tags": [],
        "at_least_one": False,
        "stop_after_first": False,
        "excludes": [],
    },
    "tags_with_separator": {
        "tags": [],
        "separator": "",
        "at_least_one": False,
        "stop_after_first": False,
    },
    "optional": {"content": {}},
    "star": {"content": {}},
    "plus": {"content": {}},
    "repeat": {"content": {}, "min": 0, "max": 0},
}
"""Fields of each format."""
_COUNTS = {"optional": "?", "star": "*", "plus": "+"}


def structural_tag_grammar(
    given: Any, marker: Callable[[str], Sequence[str]], json_rule: Callable[[Any], str]
) -> str:
    """
    Args:
        given: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, or
            `{"format": ...}`.
        marker: a text as strings and special tokens of a grammar.
        json_rule: what follows a schema.

    Raises:
        ValueError: it is neither, or has something that cannot be enforced; the text names it.
    """
    if not isinstance(given, dict):
        raise ValueError("it must be an object")
    known = ("structures", "triggers") if "format" not in given else ("format",)
    if unknown := given.keys() - {*known, "type"}:
        raise ValueError(f"it has no {', '.join(sorted(unknown))}; its fields are {known}")
    if "format" not in given:
        tags = [
            {"begin": each["begin"], "content": {"type": "json_schema", "json_schema": schema}}
            | {"end": each["end"]}
            for each in given.get("structures") or ()
            for schema in (each.get("schema") or each.get("structural_tag") or {},)
        ]
        triggers = given.get("triggers")
        given = {"format": {"type": "triggered_tags", "triggers": triggers, "tags": tags}}
    formats = _Formats(marker, json_rule)
    try:
        start = formats.rule(given["format"], ends=("",))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a format or tag is not of its form: {error}") from None
    return "\n".join([f"start: {start}", r"TEXT: /(.|\n)*/", *formats.lines])


class _Formats:
    """`lines`: the rules of what was asked for so far."""

    def __init__(
        self, marker: Callable[[str], Sequence[str]], json_rule: Callable[[Any], str]
    ) -> None:
        self.lines: list[str] = []
        self._marker = marker
        self._json_rule = json_rule

    def rule(self, given: Any, ends: Sequence[str] | None = None) -> str:
        """The name of the rule of a format.

        Args:
            ends: any of these texts follows it, and is a part of the rule: free text ends there,
                and with the whole answer at "". None: something else follows, and it is not free.
        """
        kind = given.get("type") if isinstance(given, dict) else None
        if kind not in _DEFAULTS:
            raise ValueError(
                f"its format {kind!r:.50} is not supported; there are {', '.join(_DEFAULTS)}"
            )
        defaults = _DEFAULTS[kind]
        if unknown := given.keys() - defaults.keys() - {"type"}:
            raise ValueError(f"its format {kind!r} has no {', '.join(sorted(unknown))}")
        fields = defaults | given
        for name, only in (("excludes", []), ("style", "json")):
            if fields.get(name, only) != only:
                raise ValueError(
                    f"its format {kind!r} has {name} {fields[name]!r:.50}, which is not enforced"
                )
        if kind in ("any_text", "triggered_tags"):
            if ends is None:
                raise ValueError(
                    f"its format {kind!r} has no end where it stands; let it be all or the last "
                    "part of the answer, or all or the last part of a tag"
                )
            return self._free_text(fields, ends)
        if kind == "sequence":
            *parts, last = fields["elements"]
            return self._add(" ".join([*map(self.rule, parts), self.rule(last, ends)]))
        if kind == "or":
            return self._add(" | ".join(self.rule(part, ends) for part in fields["elements"]))
        found = self._closed(kind, fields)
        return found if ends is None else self._add(f"{found} {self._any(ends)}")

    def _closed(self, kind: str, fields: dict[str, Any]) -> str:
        """A format that says itself where it ends."""
        match kind:
            case "const_string":
                return self._add(self._text(fields["value"]))
            case "json_schema":
                return self._add(self._json_rule(fields["json_schema"]))
            case "regex":
                check_regex(fields["pattern"])
                pattern = regex_to_lark(with_ascii_classes(fields["pattern"]), "")
                return self._add(f"/{pattern}/")
            case "token":
                token = fields["token"]
                return self._add(f"<[{token}]>" if isinstance(token, int) else self._text(token))
            case "tag":
                return self._tag(fields)
            case "tags_with_separator":
                tag = self._add(" | ".join(self._tag(each) for each in fields["tags"]))
                more = (
                    ""
                    if fields["stop_after_first"]
                    else f"({self._text(fields['separator'])} {tag})*"
                )
                return self._add(f"{tag} {more}" if fields["at_least_one"] else f"({tag} {more})?")
        count = _COUNTS.get(kind) or f"{{{int(fields['min'])},{int(fields['max'])}}}"
        return self._add(f"{self.rule(fields['content'])}{count}")

    def _tag(self, fields: dict[str, Any], *, behind: str = "") -> str:
        """`behind`: a part of its beginning that was written."""
        begin, end = fields["begin"], fields["end"]
        if isinstance(begin, dict):
            begin = begin["token"]
        ends = [end] if isinstance(end, str) else end
        ends = [each["token"] if isinstance(each, dict) else each for each in ends]
        return self._add(f"{self._text(begin[len(behind) :])} {self.rule(fields['content'], ends)}")

    def _free_text(self, fields: dict[str, Any], ends: Sequence[str]) -> str:
        stops = " | ".join(self._up_to(end) for end in ends)
        if fields["type"] == "any_text":
            return self._add(stops)
        by_trigger: dict[str, list[str]] = {}
        for tag in fields["tags"]:
            begin = tag["begin"]
            trigger = next((t for t in fields["triggers"] if t and begin.startswith(t)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins {begin!r:.100}; name one in triggers")
            by_trigger.setdefault(trigger, []).append(self._tag(tag, behind=trigger))
        if not by_trigger:
            raise ValueError("it has no tags; name some, and triggers")
        name = f"r{len(self.lines)}"
        self.lines.append("")
        then = self._any(ends) if fields["stop_after_first"] else name
        calls = [f"{self._up_to(t)} ({' | '.join(tags)}) {then}" for t, tags in by_trigger.items()]
        self.lines[int(name[1:])] = f"{name}: {' | '.join([*calls, stops])}"
        if not fields["at_least_one"]:
            return name
        return self._add(f"({' | '.join(self._tag(tag) for tag in fields['tags'])}) {then}")

    def _up_to(self, end: str) -> str:
        """Any text, to the first of this one."""
        if not end:
            return "TEXT"
        first, *more = self._marker(end)
        if first.startswith("<"):
            return " ".join(["TEXT", first, *more])
        begun = self._add(f"TEXT {first}", attributes="[lazy]")
        return " ".join([begun, *more])

    def _any(self, texts: Sequence[str]) -> str:
        return f"({' | '.join(map(self._text, texts))})"

    def _text(self, text: str) -> str:
        return " ".join(self._marker(text)) if text else '""'

    def _add(self, body: str, attributes: str = "") -> str:
        self.lines.append(f"r{len(self.lines)}{attributes}: {body}")
        return self.lines[-1].partition(attributes + ":")[0]
