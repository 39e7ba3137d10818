"""Reasoning at the start of recorded outputs, whole and cut at every character."""

import pytest

from frontend.http.harmony import HarmonyStream
from frontend.http.reasoning import ReasoningStream
from frontend.http.tools.stream import FORMATS
from frontend.reasoning_formats import REASONING_FORMATS, reasoning_format_of_template

QWEN3 = "<|im_start|>assistant\n"
OPENED = "<|Assistant|><think>\n"
CASES = {
    "Qwen3": (
        "qwen3",
        QWEN3,
        "<think>\nTwo and two.\n</think>\n\nFour.",
        "\nTwo and two.\n",
        "\n\nFour.",
    ),
    "opened by the template": ("qwen3", OPENED, "Two.\n</think>\n\n4", "Two.\n", "\n\n4"),
    "opened twice": ("qwen3", OPENED, "<think>\nTwo.\n</think>4", "\nTwo.\n", "4"),
    "not thinking": ("qwen3", "<think>\n\n</think>\n\n", "Four.", "", "Four."),
    "an empty block": ("qwen3", QWEN3, "<think>\n\n</think>\n\n4", "\n\n", "\n\n4"),
    "cut while it thinks": ("qwen3", QWEN3, "<think>\nTwo and </thi", "\nTwo and </thi", ""),
    "no block": ("qwen3", QWEN3, "  <thinking> is <b>hard</b>", "", "  <thinking> is <b>hard</b>"),
    "a block later": ("qwen3", QWEN3, "a <think>b</think>", "", "a <think>b</think>"),
    "part of a marker": ("qwen3", QWEN3, "\n<thi", "", "\n<thi"),
    "R1 without the first marker": ("deepseek_r1", QWEN3, "Two.</think>4", "Two.", "4"),
    "R1 without an end": ("deepseek_r1", QWEN3, "Two.", "Two.", ""),
    "Magistral": ("mistral", "[/INST]", "[THINK]Two.[/THINK]4", "Two.", "4"),
    "Gemma 4": ("gemma4", "model\n", "<|channel>thought\nTwo.<channel|>4", "\nTwo.", "4"),
    "closed at once": ("minimax_m3", "ai\n", "</mm:think>4", "", "4"),
    "Seed-OSS": ("seed_oss", "", "<seed:think>Two.</seed:think>4", "Two.", "4"),
    "Granite 3": (
        "granite",
        "",
        "Here is my thought process: Two.\n\nHere is my response: 4",
        " Two.\n\n",
        " 4",
    ),
    "Hunyuan": (
        "hunyuan_a13b",
        "",
        "<think>\nTwo.\n</think>\n<answer>\n4 < 5\n</answer>",
        "\nTwo.\n",
        "4 < 5",
    ),
    "an answer without its end": (
        "hunyuan_a13b",
        "",
        "<think></think><answer>4 </an",
        "",
        "4 </an",
    ),
    "an answer without markers": ("ernie45", "", "<think>Two.</think>\n\n4", "Two.", "\n\n4"),
}


def parted(name, prompt, pieces):
    markers = REASONING_FORMATS[name]
    stream = ReasoningStream(markers, is_open=markers.opens_in(prompt))
    parts = [stream.feed(piece) for piece in pieces] + [stream.close()]
    return tuple("".join(texts) for texts in zip(*parts, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_reasoning_and_content_are_parted_whole_and_at_every_cut(case):
    name, prompt, text, reasoning, content = CASES[case]
    assert parted(name, prompt, [text]) == (reasoning, content)
    assert parted(name, prompt, list(text)) == (reasoning, content)
    for cut in range(1, len(text)):
        assert parted(name, prompt, [text[:cut], text[cut:]]) == (reasoning, content)


CALLED_INSIDE = '<tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"<think>I call:{CALLED_INSIDE}", ("I call:", CALLED_INSIDE)),
        (f"<think>A{CALLED_INSIDE}B</think>C", ("AB", f"{CALLED_INSIDE}C")),
        ("<think>A <tool_call> is</think>C", ("A <tool_call> is", "C")),
        ("<think>A<tool_call>{", ("A<tool_call>{", "")),
    ],
)
def test_calls_inside_of_reasoning_are_content(text, parts):
    for pieces in ([text], list(text)):
        calls = FORMATS["hermes"]({})
        stream = ReasoningStream(REASONING_FORMATS["qwen3"], is_open=False, calls=calls)
        found = [*map(stream.feed, pieces), stream.close()]
        assert tuple(map("".join, zip(*found, strict=True))) == parts


ANALYSIS = "<|channel|>analysis<|message|>Two and <two>.<|end|>"
CALL = '<|channel|>commentary to=functions.f{}<|message|>{{"a": "<|end"}}'
CALLED = '<|channel|>commentary to=functions.f<|message|>{"a": "<|end"}<|call|>'
HARMONY = {
    f"{ANALYSIS}<|start|>assistant<|channel|>final<|message|>Four < 5.<|return|>": (
        "Two and <two>.",
        "Four < 5.",
    ),
    "<|channel|>final<|message|>Four<|e": ("", "Four<|e"),
    f"{ANALYSIS}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    f"{CALL.format(' <|constrain|>json')}<|call|>": ("Two and <two>.", f"I look.{CALLED}"),
    # as its template writes calls of before; cut by the stop token
    ' to=functions.f<|channel|>commentary json<|message|>{"a": "<|end"}<|call|>': ("", CALLED),
    f"{ANALYSIS}{CALL.format('')}": ("Two and <two>.", CALLED.removesuffix("<|call|>")),
    "<|channel|>analysis to=browser.search<|message|>{}<|call|>": ("{}", ""),
    "<|channel|>commentary to=python<|message|>1+1<|call|>": ("1+1", ""),
    "<|channel|>commentary to=get_weather <|constrain|>json<|message|>{}<|call|>": (
        "",
        "<|channel|>commentary to=functions.get_weather<|message|>{}<|call|>",
    ),
    "<|channel|>commentary to=assistant<|channel|>analysis<|message|>Hm": ("Hm", ""),
    "<|channel|>analysis<|message|>Two<|channel|>final<|message|>2": ("Two", "2"),
    f"{ANALYSIS}<|start|>assistant to=functions.functions<|channel|>analysis code<|message|>{{}}": (
        "Two and <two>.",
        "<|channel|>commentary to=functions.functions<|message|>{}",
    ),
    '<|channel|>commentary to=functions.f<|message|>{"a": "<|end|><|start|>"}<|call|>': (
        "",
        '<|channel|>commentary to=functions.f<|message|>{"a": "<|end|><|start|>"}<|call|>',
    ),
    " to=self<|message|>Two.<|eom|><|start|>assistant to=user<|message|>2<|eot|>": ("Two.", "2"),
    " to=f<|message|><atem:function_calls></atem:function_calls><|eom|>": (
        "",
        "<atem:function_calls></atem:function_calls>",
    ),
    "a resumed answer.<|return|>": ("", "a resumed answer."),
    "<|channel|>analysis<|message|>Two and": ("Two and", ""),
    "<|channel|>anal": ("", ""),
    "Total: 4 <|x|>": ("", "Total: 4 <|x|>"),
    "to": ("", "to"),
}


@pytest.mark.parametrize("text", HARMONY)
def test_channels_of_harmony_are_parted_whole_and_at_every_cut(text):
    cuts = [[text], list(text), *([text[:cut], text[cut:]] for cut in range(1, len(text)))]
    for pieces in cuts:
        stream = HarmonyStream({"get_weather"})
        parts = [stream.feed(piece) for piece in pieces] + [stream.close()]
        joined = tuple("".join(texts) for texts in zip(*parts, strict=True))
        assert joined == HARMONY[text], pieces


def test_the_format_is_known_by_the_template():
    assert reasoning_format_of_template("{{ '<|channel|>analysis<|message|>' }}").is_harmony
    assert reasoning_format_of_template("{{ '<think>\n\n</think>' }}").end == "</think>"
    assert reasoning_format_of_template("{{ '[THINK]' }}{{ '[/THINK]' }}").end == "[/THINK]"
    assert reasoning_format_of_template("{{ message.content }}") is None
