"""Outputs with tool calls in the manner of each model family, and what is in them.

The forms are those that the families' chat templates show to the model, and that the documents of
vLLM and SGLang name; texts are as models write them, their usual faults included."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Output:
    """A model's text; what of it is content; names and arguments of its calls."""

    text: str
    content: str
    calls: tuple[tuple[str, str], ...] = ()


PARIS = '{"city": "Paris", "unit": "celsius"}'

HERMES = {
    "one call": Output(
        f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>',
        "",
        (("get_weather", PARIS),),
    ),
    "text, then two calls": Output(
        "I'll look both up.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {"zone": "Europe/Paris"}}\n</tool_call>',
        "I'll look both up.\n",
        (("get_weather", '{"city": "Paris"}'), ("get_time", '{"zone": "Europe/Paris"}')),
    ),
    "nested arguments, escapes, other scripts": Output(
        '<tool_call>{"name": "write_file", "arguments": {"path": "a.py", "text": '
        '"print(\\"{hi}\\")\\n# \\u00e9 東京", "mode": {"append": [true, null, 1.5]}}}</tool_call>',
        "",
        (
            (
                "write_file",
                '{"path": "a.py", "text": "print(\\"{hi}\\")\\n# \\u00e9 東京", '
                '"mode": {"append": [true, null, 1.5]}}',
            ),
        ),
    ),
    "the end marker within an argument": Output(
        '<tool_call>{"name": "say", "arguments": {"text": "</tool_call> <tool_call>"}}</tool_call>',
        "",
        (("say", '{"text": "</tool_call> <tool_call>"}'),),
    ),
    "arguments as a string": Output(
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        (("f", '{"a": 1}'),),
    ),
    "a raw line break in a string": Output(
        '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>',
        "",
        (("f", '{"a": "x\\ny"}'),),
    ),
    "no end marker": Output('<tool_call>\n{"name": "f", "arguments": {}}\n', "", (("f", "{}"),)),
    "cut in the end marker": Output(
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_', "", (("f", "{}"),)
    ),
    "text behind a call": Output(
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\nDone.', "\nDone.", (("f", "{}"),)
    ),
    "no call": Output("It is <b>sunny</b> & a < b.\n", "It is <b>sunny</b> & a < b.\n"),
    "markers that are none": Output("a <tool> and a <tool_cal", "a <tool> and a <tool_cal"),
    "a missing brace": Output(
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}\n</tool_call>\n', "", (("f", '{"a": 1}'),)
    ),
    "cut in the arguments": Output(
        '<tool_call>\n{"name": "f", "arguments": {"a": "x',
        '<tool_call>\n{"name": "f", "arguments": {"a": "x',
    ),
    "a malformed call, then a good one": Output(
        '<tool_call>{"name": f}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": f}</tool_call>\n',
        (("g", "{}"),),
    ),
    "a string without its end, then a good call": Output(
        '<tool_call>{"name": "f}</tool_call> <tool_call>{"name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "f}</tool_call> ',
        (("g", "{}"),),
    ),
    "words between the markers": Output(
        "Write <tool_call>something</tool_call> to call.",
        "Write <tool_call>something</tool_call> to call.",
    ),
    "half of a surrogate pair": Output(
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "\\ud83d"}}</tool_call>',
    ),
    "no number of JSON": Output(
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    ),
    "too deep": Output(
        f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 5000}{"]" * 5000}}}}}</tool_call>',
        f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 5000}{"]" * 5000}}}}}</tool_call>',
    ),
}

LLAMA3_JSON = {
    "one call": Output(
        f'{{"name": "get_weather", "parameters": {PARIS}}}', "", (("get_weather", PARIS),)
    ),
    "with the tag of code": Output(
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
        "",
        (("get_weather", '{"city": "Paris"}'),),
    ),
    "several calls": Output(
        '{"name": "f", "parameters": {"a": "}{"}}; {"name": "g", "parameters": {}}',
        "",
        (("f", '{"a": "}{"}'), ("g", "{}")),
    ),
    "with a type first, over lines": Output(
        '\n{\n  "type": "function",\n  "name": "f",\n  "parameters": {\n    "a": [1, 2]\n  }\n}\n',
        "",
        (("f", '{\n    "a": [1, 2]\n  }'),),
    ),
    "on a line of its own": Output(
        'I need this:\n{"name": "f", "parameters": {}}', "I need this:\n", (("f", "{}"),)
    ),
    "words": Output("The set {1, 2} is small.", "The set {1, 2} is small."),
    "other JSON": Output('{"answer": {"name": "x"}}\n', '{"answer": {"name": "x"}}\n'),
    "JSON with a name alone": Output('{"name": "Ada", "is": 1}', '{"name": "Ada", "is": 1}'),
    "code": Output("{ x = 1; }\n{}", "{ x = 1; }\n{}"),
    "cut": Output('{"name": "f", "parameters": {"a"', '{"name": "f", "parameters": {"a"'),
    "a missing brace": Output('{"name": "f", "parameters": {"a": 1}\n', "", (("f", '{"a": 1}'),)),
    "the tag before code": Output('<|python_tag|>print("hi")', '<|python_tag|>print("hi")'),
    "a tag that is none": Output("<|python", "<|python"),
}  # fmt: skip

MISTRAL = {
    "a list": Output(
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}]',
        "",
        (("get_weather", PARIS),),
    ),
    "a list of two": Output(
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]',
        "",
        (("f", '{"a": "]"}'), ("g", "{}")),
    ),
    "a name before the arguments": Output(
        '[TOOL_CALLS]get_weather{"city": "Paris"}', "", (("get_weather", '{"city": "Paris"}'),)
    ),
    "with an id": Output(
        '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "",
        (("f", '{"a": 1}'), ("g", "{}")),
    ),
    "text before": Output('Let me see.[TOOL_CALLS]f{"a": 1}', "Let me see.", (("f", '{"a": 1}'),)),
    "no call": Output("[TOOL] and [TOOL_CALL", "[TOOL] and [TOOL_CALL"),
    "words behind the marker": Output(
        "[TOOL_CALLS] is a marker.\n{}", "[TOOL_CALLS] is a marker.\n{}"
    ),
    "a long name": Output(f"[TOOL_CALLS]{'x' * 300}{{}}", f"[TOOL_CALLS]{'x' * 300}{{}}"),
    "a list with a call that is none": Output(
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, 5]',
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, 5]',
    ),
    "cut": Output('[TOOL_CALLS]f{"a": [1', '[TOOL_CALLS]f{"a": [1'),
}

PYTHONIC = {
    "one call": Output(
        "[get_weather(city='Paris', unit=\"celsius\")]", "", (("get_weather", PARIS),)
    ),
    "several": Output(
        "[f(a=1, b=-2.5, c=[True, None], d={'k': (1, 2)}), math.g()]\n",
        "",
        (("f", '{"a": 1, "b": -2.5, "c": [true, null], "d": {"k": [1, 2]}}'), ("math.g", "{}")),
    ),
    "constants of JSON, brackets in strings": Output(
        "[f(a=true, b=null, c='])', d=\"it's\")]",
        "",
        (("f", '{"a": true, "b": null, "c": "])", "d": "it\'s"}'),),
    ),
    "on a line of its own": Output("Sure:\n[f(a=1)]", "Sure:\n", (("f", '{"a": 1}'),)),
    "words": Output("See [1] and [f](x).\n[2] too", "See [1] and [f](x).\n[2] too"),
    "a list": Output("[a, b(c=1)]", "[a, b(c=1)]"),
    "a positional argument": Output("[f(1)]", "[f(1)]"),
    "no value": Output("[f(a=open('x'))]", "[f(a=open('x'))]"),
    "bytes": Output("[f(a=b'x')]", "[f(a=b'x')]"),
    "a wrong escape": Output(r"[f(a='\d+')]", "", (("f", r'{"a": "\\d+"}'),)),
    "no Python": Output("[f(a=1 b=2)]", "[f(a=1 b=2)]"),
    "cut": Output("[f(a='x", "[f(a='x"),
}

_CALL = "<|channel|>commentary to=functions."
OPENAI = {
    "one call": Output(
        f"{_CALL}get_weather<|message|>{PARIS}<|call|>", "", (("get_weather", PARIS),)
    ),
    "text, then a call": Output(
        f'I look.{_CALL}f<|message|>{{"a": "}}<|call|>"}}<|call|>',
        "I look.",
        (("f", '{"a": "}<|call|>"}'),),
    ),
    "cut by its end": Output(f"{_CALL}f<|message|>{{}}", "", (("f", "{}"),)),
    "two calls": Output(
        f"{_CALL}f<|message|>{{}}<|call|>{_CALL}g<|message|>{{}}<|call|>",
        "",
        (("f", "{}"), ("g", "{}")),
    ),
    "no object": Output(f"{_CALL}f<|message|>5<|call|>", f"{_CALL}f<|message|>5<|call|>"),
    "cut": Output(f"{_CALL}f<|mes", f"{_CALL}f<|mes"),
    "no call": Output("Four <|channel|> 5.", "Four <|channel|> 5."),
}

OUTPUTS = {
    "hermes": HERMES,
    "llama3_json": LLAMA3_JSON,
    "mistral": MISTRAL,
    "openai": OPENAI,
    "pythonic": PYTHONIC,
}
