"""Chat templates against transformers' own rendering."""

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from frontend.errors import ChatTemplateError
from frontend.text.chat_template import render_chat
from tests.covering import covering_pairs
from tests.frontend.text import template_samples as samples

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>"}
CHATS = {
    "one": [{"role": "user", "content": "Hello"}],
    "turns": [
        {"role": "user", "content": "  What is 2 < 3 & 'x'?  "},
        {"role": "assistant", "content": "True"},
        {"role": "user", "content": "漢字\n🎉"},
    ],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
    ],
    "answered": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " So, "}],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "says <b>weather</b> & more",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


def reference(template, chat, *, continue_final_message=False, tools=None, **options):
    options = {"add_generation_prompt": True, **options}
    rendered, _ = render_jinja_template(
        [chat],
        chat_template=template,
        continue_final_message=continue_final_message,
        tools=tools,
        **options,
        **VARIABLES,
    )
    return rendered[0]


@covering_pairs(
    template=samples.TEMPLATES, chat=CHATS, add_generation_prompt=[True, False], tools=[None, TOOLS]
)
def test_rendering_equals_that_of_transformers(template, chat, add_generation_prompt, tools):
    source = samples.TEMPLATES[template]
    options = {"add_generation_prompt": add_generation_prompt}
    if tools is not None and "tools" in source:  # else they are refused
        options["tools"] = tools
    try:
        expected = reference(source, CHATS[chat], **options)
    except jinja2.TemplateError as refusal:
        with pytest.raises(ChatTemplateError) as error:
            render_chat(source, CHATS[chat], special_tokens=VARIABLES, **options)
        assert str(refusal) in str(error.value)
    else:
        assert render_chat(source, CHATS[chat], special_tokens=VARIABLES, **options) == expected


@pytest.mark.parametrize("template", samples.TEMPLATES)
def test_continuing_the_final_message_equals_that_of_transformers(template):
    source = samples.TEMPLATES[template]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    expected = reference(source, CHATS["answered"], **options)
    rendered = render_chat(source, CHATS["answered"], special_tokens=VARIABLES, **options)
    assert rendered == expected
    assert rendered.endswith(("So,", "So, "))


@pytest.mark.parametrize("template", samples.PART_TEMPLATES)
def test_lists_of_parts_go_as_they_are_to_a_template_that_reads_them(template):
    source = samples.PART_TEMPLATES[template]
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
    assert render_chat(source, chat, special_tokens=VARIABLES) == reference(source, chat)


def test_lists_of_text_parts_are_joined_for_a_template_that_takes_texts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = render_chat(samples.TEMPLATES["chatml"], [{"role": "user", "content": parts}])
    assert joined == reference(samples.TEMPLATES["chatml"], [{"role": "user", "content": "a\nb"}])


def test_image_for_a_template_that_takes_texts_is_refused_by_name():
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(ChatTemplateError, match="message 0 has a part of type 'image_url'"):
        render_chat(samples.TEMPLATES["chatml"], chat)
    chat = [{"role": "user", "content": [{"type": "text"}]}]
    with pytest.raises(ChatTemplateError, match="part of type 'text' without a text"):
        render_chat(samples.TEMPLATES["chatml"], chat)


def test_reasoning_fields_are_aliased_like_in_transformers():
    source = "{{ messages[0].thinking }}|{{ messages[0].reasoning_content }}"
    chat = [{"role": "assistant", "content": "c", "reasoning": "r"}]
    assert render_chat(source, chat) == reference(source, chat) == "r|r"


def test_none_valued_fields_are_missing_for_the_template():
    source = "{% if messages[0].tool_calls is defined %}calls{% endif %}{{ messages[0].content }}"
    assert render_chat(source, [{"role": "a", "content": "c", "tool_calls": None}]) == "c"


def test_callers_messages_are_left_alone():
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    for source in (samples.TEMPLATES["chatml"], samples.PART_TEMPLATES["parts"]):
        assert render_chat(source, chat, **options).endswith("a")
    assert chat == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% set n = namespace(__class__=1) %}",
        "{{ dict.__class__.__base__.__subclasses__() }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_template_that_tries_to_leave_the_sandbox_is_refused(escape):
    with pytest.raises(ChatTemplateError, match=r"template (tried.*do not trust|failed|refuses)"):
        render_chat(escape, CHATS["one"])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("Hello", "messages is str, it must be a list"),
        ({"role": "user"}, "messages is dict, it must be a list"),
        ([], "messages is empty"),
        (["Hello"], "message 0 is str, it must be a mapping"),
        ([{"content": "Hello"}], "message 0 has role None"),
        ([{"role": "user", "content": "a"}, {"role": 3, "content": "b"}], "message 1 has role 3"),
        ([{"role": "user", "content": 5}], "the content of message 0 is int"),
    ],
)
def test_wrong_messages_are_refused_in_words(messages, words):
    with pytest.raises(ChatTemplateError, match=words):
        render_chat(samples.TEMPLATES["chatml"], messages)


def test_wrong_options_are_refused_in_words():
    with pytest.raises(ChatTemplateError, match="add_generation_prompt=False"):
        render_chat("x", CHATS["one"], continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="tool 0 is function"):
        render_chat("{{ tools }}", CHATS["one"], tools=[lambda: None])
    with pytest.raises(ChatTemplateError, match="does not parse, line 1"):
        render_chat("{% if %}", CHATS["one"])
    with pytest.raises(ChatTemplateError, match="no text to continue"):
        render_chat(
            "x",
            [{"role": "assistant", "tool_calls": []}],
            add_generation_prompt=False,
            continue_final_message=True,
        )
    with pytest.raises(ChatTemplateError, match="leaves out or changes"):
        render_chat("x", CHATS["one"], add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("template", samples.TEMPLATES)
def test_tools_and_variables_that_the_template_does_not_read_are_refused_by_name(template):
    source = samples.TEMPLATES[template]
    with pytest.raises(ChatTemplateError, match=r"does not use return_tensors:.* omit it"):
        render_chat(source, CHATS["one"], return_tensors="pt")
    if "tools" not in source:
        with pytest.raises(ChatTemplateError, match="does not use tools"):
            render_chat(source, CHATS["one"], tools=TOOLS)
    render_chat(source, CHATS["one"], tools=[])  # no tools: nothing would be lost


def test_a_variable_counts_as_read_wherever_the_template_reads_it():
    source = (
        "{% if not mood is defined %}{% set mood = 'calm' %}{% endif %}"
        "{% macro say() %}{{ voice }}{% endmacro %}{{ mood }}{{ say() }}"
    )
    assert render_chat(source, CHATS["one"], mood="loud", voice="!") == "loud!"


def test_template_that_fails_on_the_messages_is_no_traceback():
    with pytest.raises(ChatTemplateError, match="chat template"):
        render_chat("{{ messages[0].content + 1 }}", CHATS["one"])
