"""What gpt-oss may write: messages, of which the last one is what was asked for. See
`frontend.http.harmony`; a prompt has begun the first message."""

import json
from collections.abc import Sequence

from frontend.http.tools.rules import OfferedTool, Rules
from frontend.structured_outputs import StructuredOutputsParams
from frontend.text.tokenizer import Tokenizer
from protocol.structured_output import StructuredOutputKind


def harmony_rules(
    rules: Rules,
    tools: Sequence[OfferedTool],
    answer: str | None,
    *,
    must_call: bool,
    may_think: bool = True,
) -> None:
    """Adds what leads to one call, or to the answer.

    Args:
        answer: a rule; None: any text.
    """
    word = rules.word
    of_json = rules.new(f'{word(" <|constrain|>json")} | {word(" json")} | ""', kind="type")
    headers = ("<|channel|>commentary to=functions.{}", " to=functions.{}<|channel|>commentary")
    calls = []
    for tool in tools:
        arguments = rules.json(tool.parameters, tool.field, is_object=True)
        begun = " | ".join(word(each.format(tool.name)) for each in headers)
        calls.append(f"({begun}) {of_json} {word('<|message|>')} {arguments}")
    last = [rules.any_of(calls)] if calls else []
    if not must_call:
        begun = word("<|channel|>final")
        last.append(f"{begun} {of_json if answer else ''} {word('<|message|>')} {answer or 'TEXT'}")
    ended = rules.any_text("<|end|><|start|>assistant")
    before = " | ".join(
        f"{word(f'<|channel|>{name}<|message|>')} {ended}" for name in ("analysis", "commentary")
    )
    message = rules.new(before, kind="message")
    rules.add("start", (f"{message}* " if may_think else "") + f"({' | '.join(last)})")


def final_answer(
    asked: StructuredOutputsParams, tokenizer: Tokenizer
) -> StructuredOutputsParams | None:
    """The same in the channel `final`; None: what is asked for is no schema or choice."""
    wire = asked.to_wire()
    rules = Rules(tokenizer)
    if wire.whitespace_pattern is not None or wire.disable_any_whitespace:
        return None
    match wire.kind:
        case StructuredOutputKind.JSON:
            answer = rules.json(json.loads(wire.text), wire.name)
        case StructuredOutputKind.CHOICE:
            choices = [json.dumps(each, ensure_ascii=False) for each in json.loads(wire.text)]
            answer = rules.new(" | ".join(choices), kind="choice")
        case _:
            return None
    harmony_rules(rules, (), answer, must_call=False)
    return StructuredOutputsParams(grammar=rules.text(), field=wire.field)
