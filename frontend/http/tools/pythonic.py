"""Pythonic (Llama 3.2, ToolACE): an answer that is `[name(key="value"), other(key=1)]`."""

import ast
import re
import warnings

from frontend.http.tools.calls import (
    STRINGS,
    ArgumentsText,
    Parsed,
    ToolCall,
    bracket_end,
    find_at_line_start,
    finite,
    make_call,
)

_PART = re.compile(STRINGS + r"|[\[{()}\]]", re.DOTALL)
_MAY_BE_CALL = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(|$)|$)")
_CONSTANTS = {"true": True, "false": False, "null": None}


class PythonicFormat:
    shows_special_tokens = False
    is_marked = False
    separators = " \t\r\n"
    head = re.compile("(?!)")  # arguments are no JSON

    def find(self, text: str, before: str) -> int:
        """A bracket at the start of an answer or of a line."""
        return find_at_line_start(text, "[", before)

    def parse(self, text: str, *, at_end: bool) -> Parsed | None:
        if not _MAY_BE_CALL.match(text):
            return Parsed(1)
        end = bracket_end(text, _PART)
        if end is None:
            return Parsed(1) if at_end else None
        return Parsed(end, calls_of_python(text[:end]))

    def arguments(self, name: str) -> ArgumentsText:
        return ArgumentsText()


def calls_of_python(source: str) -> tuple[ToolCall, ...]:
    """Calls in a Python list, or one a line; none if any of them is malformed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a model's wrong escapes
            tree = _Constants().visit(ast.parse(_one_line_strings(source.strip())))
        values = [each.value for each in tree.body]
        nodes = [
            n for each in values for n in (each.elts if isinstance(each, ast.List) else [each])
        ]
        calls = [_call(node) for node in nodes]
    except (SyntaxError, ValueError, TypeError, AttributeError, RecursionError, MemoryError):
        return ()
    found = tuple(call for call in calls if call is not None)
    return found if len(found) == len(calls) else ()


def _call(node: ast.expr) -> ToolCall | None:
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {each.arg: ast.literal_eval(each.value) for each in node.keywords}
    return None if None in arguments else make_call(ast.unparse(node.func), arguments)


def _one_line_strings(source: str) -> str:
    """With raw line breaks in strings, which models write, escaped."""
    return re.sub(STRINGS, lambda each: each[0].replace("\n", "\\n"), source, flags=re.DOTALL)


class _Constants(ast.NodeTransformer):
    """JSON's names of constants, which models mix in."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        is_float = isinstance(node.value, float)
        return ast.Constant(finite(str(node.value))) if is_float else node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node
