"""What an answer must be, so that its tool calls are what was asked for: a grammar, in Lark's
format, of calls as the model's family writes them."""

from collections.abc import Sequence
from dataclasses import replace

from frontend.http.api_errors import ApiError
from frontend.http.tools.harmony_grammar import harmony_rules
from frontend.http.tools.marked_grammar import marked_calls
from frontend.http.tools.nested_grammar import nested_calls
from frontend.http.tools.rules import OfferedTool, Rules, several
from frontend.http.tools.schema_cases import Schema
from frontend.http.tools.syntax import call_syntaxes, first_name
from frontend.text.tokenizer import Tokenizer


def chosen_tool(tools: Sequence[OfferedTool], name: str) -> list[OfferedTool]:
    """
    Raises:
        ApiError: there is none of this name.
    """
    found = [tool for tool in tools if tool.name == name]
    if not found:
        names = ", ".join(tool.name for tool in tools) or "none"
        raise ApiError(
            400, f"tool_choice names {name!r:.100}, the tools are {names}", param="tool_choice"
        )
    return found


def calls_grammar(
    call_format: str,
    tools: Sequence[OfferedTool],
    tokenizer: Tokenizer,
    *,
    must_call: bool,
    has_one_call: bool,
    template: str,
    answer: Schema | None,
    answer_field: str = "answer",
    may_think: bool = True,
) -> str | None:
    """None: the answer needs none.

    Args:
        call_format: a name in `stream.FORMATS`.
        must_call: there is no answer without a call, and all arguments follow their schemas.
        answer: what it must be if it calls nothing.
        answer_field: what errors call that.
        may_think: reasoning that is a part of the format (harmony's) may stand before.

    Raises:
        ApiError: a schema that this format cannot hold.
    """
    if not must_call and answer is None and not any(tool.is_strict for tool in tools):
        return None
    rules = Rules(tokenizer)
    followed = [
        replace(tool, parameters=tool.parameters if must_call or tool.is_strict else None)
        for tool in tools
    ]
    if call_format == "openai":
        schema = None if answer is None else rules.json(answer, answer_field)
        harmony_rules(rules, followed, schema, must_call=must_call, may_think=may_think)
        return rules.text()
    syntax = call_syntaxes().get(first_name(call_format))
    if syntax is not None:
        head, calls = marked_calls(rules, syntax, followed, has_one_call, template)
    elif call_format == "minimax_m3":
        head, calls = nested_calls(rules, followed, has_one_call)
    elif call_format == "pythonic":
        head, calls = "", rules.python_list(followed, has_one_call)
    else:
        call = rules.json_objects(followed, ("name", "parameters"))
        head, calls = "", several(call, f"/; ?/ {call}", has_one_call)
    if must_call:
        rules.add("start", f"{head} {calls}")
    elif answer is not None:
        rules.add("start", f"{head} {calls} | {rules.json(answer, answer_field)}")
    elif head and head.startswith("<"):
        rules.add("start", f"TEXT {head} {calls} TEXT | TEXT")
    elif head:
        rules.add("start", f"begun {calls} TEXT | TEXT")
        rules.add("begun[lazy]", f"TEXT {head}")
    else:
        rules.add("start", f"{calls} | OTHER")
        opening = "{" if call_format == "llama3_json" else "\\["
        rules.add("OTHER", rf"/([^{opening}\s](.|\n)*)?/")
    return rules.text()
