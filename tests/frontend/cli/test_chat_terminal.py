"""`engine-client chat` at a pseudo-terminal, against a scripted engine: what is typed, and what
stands on the screen."""

import json
import signal
import time

import pytest
from fake_engine import wait_until
from fake_model import TOKENIZER, ids_of, saying

pytest.importorskip("prompt_toolkit")
pytest.importorskip("pyte")

from tests.frontend.cli.pseudo_terminal import PseudoTerminal

pytestmark = pytest.mark.slow

PASTE_BEGINS, PASTE_ENDS = "\x1b[200~", "\x1b[201~"


@pytest.fixture
def terminal(address, tmp_path):
    """Starts chats; all of them end with the test."""
    sessions = []

    def start(*options, prompts=1, **size):
        arguments = ["chat", "--address", address, *options]
        sessions.append(PseudoTerminal(*arguments, state=tmp_path / "state", **size))
        sessions[-1].wait_for("\n>", times=prompts)
        return sessions[-1]

    yield start
    for session in sessions:
        session.close()


def asked(engine, number=-1):
    return TOKENIZER.decode(engine.requests[number].prompt_token_ids)


def test_interrupt_stops_the_answer_and_not_the_program(start_engine, terminal):
    engine = start_engine(next_token=saying("tick "), step_s=0.01)
    session = terminal()
    session.type("Hi\r")
    session.wait_for("tick tick")
    session.process.send_signal(signal.SIGINT)
    session.wait_for("[stopped]", "tokens/s, first token after")
    wait_until(lambda: engine.num_live == 0)
    session.wait_for("\n>", times=2)
    session.type("more\r")
    session.wait_for("tick tick", times=2)
    session.process.send_signal(signal.SIGINT)
    session.wait_for("\n>", times=3)
    # what was seen of the stopped answer is part of the conversation
    assert asked(engine).startswith("user:Hi;assistant:tick tick")
    assert asked(engine).endswith(";user:more;")
    session.type("/exit\r")
    assert session.process.wait(30) == 0


def test_what_is_typed_during_an_answer_stands_at_the_next_prompt(start_engine, terminal):
    """Also if Ctrl-C ends the answer, which a terminal takes as an order to forget it."""
    engine = start_engine(next_token=saying("tick "), step_s=0.01)
    session = terminal()
    session.type("Hi\r")
    session.wait_for("tick tick")
    session.type("typed meanwhile\x03")
    session.wait_for("[stopped]", "> typed meanwhile")
    session.type("\r")
    deadline = time.monotonic() + 30  # the first answer may have said it twice already
    while not asked(engine).endswith(";user:typed meanwhile;"):
        assert time.monotonic() < deadline, asked(engine)
        time.sleep(0.01)


def test_interrupt_at_the_prompt_does_not_leave_and_end_of_input_does(start_engine, terminal):
    start_engine()
    session = terminal()
    session.type("half a line")
    session.wait_for("half a line")
    session.process.send_signal(signal.SIGINT)
    session.wait_for("\n>", "Ctrl-D leaves", times=2)
    session.type("\x04")
    assert session.process.wait(30) == 0


def test_chat_at_a_terminal_continues_after_the_engine_came_back(start_engine, terminal):
    first = start_engine(next_token=saying("one", then_eos=True))
    session = terminal()
    session.type("Hi\r")
    session.wait_for("first token after")
    first.stop()
    second = start_engine(next_token=saying("two", then_eos=True))
    session.type("again\r")
    session.wait_for("first token after", times=2)
    assert second.requests[0].prompt_token_ids == ids_of("user:Hi;assistant:one;user:again;")


PASTED = "def f():\n    return 1\n\n# end"


@pytest.mark.parametrize(
    "typed",
    [PASTE_BEGINS + PASTED.replace("\n", "\r") + PASTE_ENDS + "\r", PASTED + "\r"],
    ids=["bracketed", "all keys at once"],
)
def test_a_paste_of_several_lines_is_one_message_as_it_is(start_engine, terminal, typed):
    engine = start_engine(next_token=saying("ok", then_eos=True))
    session = terminal()
    session.type(typed)
    session.wait_for("first token after")
    assert asked(engine) == f"user:{PASTED};"


def leave(session):
    """Ctrl-D, again if it came before the next line was read."""
    deadline_s = time.monotonic() + 30
    while session.process.poll() is None and time.monotonic() < deadline_s:
        session.type("\x04")
        time.sleep(0.2)
    assert session.process.wait(1) == 0


def test_alt_enter_begins_a_line_and_history_is_there_in_the_next_run(
    start_engine, terminal, tmp_path
):
    engine = start_engine(next_token=saying("ok", then_eos=True))
    session = terminal()
    session.type("first line\x1b\r")
    session.type("second line\r")
    session.wait_for("first token after")
    leave(session)
    [file] = (tmp_path / "state").rglob("chat_history")
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    again = terminal()
    again.type("\x1b[A")  # up
    again.wait_for("second line")
    again.type("\r")
    again.wait_for("first token after")
    assert asked(engine) == "user:first line\nsecond line;"
    again.type('"""one\r')
    again.wait_for('"""one\n')
    again.type('two"""\r')
    again.wait_for("first token after", times=2)
    assert asked(engine).endswith("user:one\ntwo;")
    again.type("/bye\r")
    assert again.process.wait(30) == 0
    assert file.stat().st_mode & 0o777 == 0o600


def test_without_a_place_for_the_history_the_chat_says_so_and_goes_on(
    start_engine, terminal, tmp_path
):
    start_engine(next_token=saying("ok", then_eos=True))
    (tmp_path / "state").write_text("no folder")
    session = terminal()
    session.type("Hi\r")
    session.wait_for("the history of this chat is not kept", "first token after")


ANSWER = """# Title

Some **bold** words\nand a [link](http://example.org).

1. one
2. two

```python
print("x")
```

<think>kept</think>\x1b]0;new title\x07\x1b[2J
"""
RENDERED = """\
Some bold words
and a link (http://example.org).

 1 one
 2 two

 print("x")

<think>kept</think>]0;new title[2J
["""


@pytest.mark.parametrize("step_s", [0.0, 0.01])
def test_markdown_is_rendered_and_nothing_of_an_answer_commands_the_terminal(
    start_engine, terminal, step_s
):
    """Also where many blocks arrive at once."""
    start_engine(next_token=saying(ANSWER, then_eos=True), step_s=step_s)
    session = terminal()
    session.type("Hi\r")
    text = session.wait_for("first token after", "  Title\n\n" + RENDERED)
    assert text.count(RENDERED) == 1


def test_an_answer_longer_than_the_screen_stands_there_once_and_whole(start_engine, terminal):
    rows = [f"- p{number}." for number in range(40)]
    start_engine(next_token=saying("\n".join(rows), then_eos=True), step_s=0.005)
    session = terminal(rows=12)
    session.type("Hi\r")
    text = session.wait_for("first token after")
    assert [text.count(f"p{number}.") for number in range(40)] == [1] * 40, text


def test_without_markdown_the_text_stands_as_it_came(start_engine, terminal):
    start_engine(next_token=saying("**a**\n- b\x1b[2J", then_eos=True))
    session = terminal("--no-markdown")
    session.type("Hi\r")
    session.wait_for("**a**\n- b[2J\n", "first token after")


def test_commands_change_what_is_sent_and_save_what_was_said(start_engine, terminal, tmp_path):
    engine = start_engine(next_token=saying("yes", then_eos=True))
    session = terminal(columns=200)
    for line in ("/system Be short", "/set temperature 0", "/set max-tokens 7", "/set stop a b"):
        session.type(line + "\r")
    session.wait_for("system message: Be short", "temperature 0.0", "max_tokens 7", "stop ['a b']")
    session.type("one\r")
    session.wait_for("first token after")
    params = engine.requests[0].sampling_params
    assert (params.temperature, params.max_tokens, params.top_k) == (0.0, 7, 7)
    session.type("/set top_p 9\r")
    session.wait_for("top_p is 9.0, it must be")
    session.type("/set top_k many\r")
    session.wait_for("top_k is 'many': Expected `int | null`")
    session.type("/set wisdom 1\r")
    session.wait_for("there is no parameter wisdom; /set takes max_tokens, ")
    session.type("/set temperature default\r")
    session.wait_for("temperature 0.25")
    for number, name in enumerate(("talk.json", "talk.md"), 1):
        session.type(f"/save {tmp_path / name}\r")
        session.wait_for("3 messages are in", times=number)
    messages = json.loads((tmp_path / "talk.json").read_text())
    assert [each["content"] for each in messages] == ["Be short", "one", "yes"]
    assert (tmp_path / "talk.md").read_text() == (
        "## system\n\nBe short\n\n## user\n\none\n\n## assistant\n\nyes\n"
    )
    (tmp_path / "other").write_text("precious")
    session.type(f"/save {tmp_path / 'other'}\r")
    session.wait_for("is there already; give another name")
    assert (tmp_path / "other").read_text() == "precious"
    session.type("/save ~nobody-of-this-name/talk\r")
    session.wait_for("Could not determine home directory")
    session.type("/clear\r/system -\r")
    session.wait_for("system message: none")
    session.type(" /usr/bin/env is what?\r")
    session.wait_for("first token after", times=2)
    assert asked(engine) == "user: /usr/bin/env is what?;"
    session.type("/help\r")
    session.wait_for("/set NAME VALUE", "Alt-Enter")
