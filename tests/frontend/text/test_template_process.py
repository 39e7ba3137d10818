"""The limits of chat templates, in the process that renders them."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from fake_engine import wait_until

from frontend import AsyncLLM, SamplingParams
from frontend.errors import ChatTemplateError
from frontend.shared_threads import current_owner
from frontend.text.chat_template import (
    close_renderers,
    own_renderers,
    render_chat,
    request_renderers,
)
from frontend.text.template_process import TemplateRenderers

pytestmark = pytest.mark.slow

CHAT = [{"role": "user", "content": "hi"}]
PLAIN = "{{ messages[0].content }}"
DOUBLED = (
    "{%% set n = namespace(x=%s) %%}{%% for i in range(99) %%}{%% set n.x = %s %%}{%% endfor %%}"
)
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"

TOO_LONG = {
    "nested loops": LOOP,
    "a list of lists, printed": DOUBLED % ("[1]", "[n.x, n.x]") + "{{ n.x }}",
    "a large power": "{{ 2 ** (2 ** 40) }}",
    "a filter": "{{ lipsum(n=1000000) }}",
}
TOO_LARGE = {
    "a text times a number": "{{ 'a' * 10 ** 10 }}",
    "a text joined to itself": DOUBLED % ("'aaaa'", " ~ ".join(["n.x"] * 8)),
    "a width, by format": "{{ '{:1000000000}'.format(1) }}",
    "replacements": "{{ ('a' * 10000).replace('a', 'b' * 10000).replace('b', 'c' * 10000) }}",
}
REFUSED = {
    "a long range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "an include": "{% include 'x' %}",
    "an import": "{% import 'x' as x %}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep blocks": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "a prompt without end": "{{ 'x' * 20000000 }}",
    "an underscored attribute": "{{ ''.__class__.__mro__ }}",
    "a method that changes data": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_a_template_that_runs_too_long_is_ended_and_the_next_one_rendered(name):
    with pytest.raises(ChatTemplateError, match=r"more than 1 s of processor time"):
        render_chat(TOO_LONG[name], CHAT)
    assert render_chat(PLAIN, CHAT) == "hi"


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_template_that_needs_too_much_memory_is_ended_and_the_next_one_rendered(name):
    with pytest.raises(ChatTemplateError, match="more memory than 512 MiB"):
        render_chat(TOO_LARGE[name], CHAT)
    assert render_chat(PLAIN, CHAT) == "hi"


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_sandbox_refuses_needs_no_new_process(name):
    render_chat(PLAIN, CHAT)
    (process_id,) = request_renderers.pids
    with pytest.raises(ChatTemplateError, match="template"):
        render_chat(REFUSED[name], CHAT)
    assert render_chat(PLAIN, CHAT) == "hi"
    assert request_renderers.pids == [process_id]


def test_an_error_text_of_the_template_has_a_limit():
    with pytest.raises(ChatTemplateError) as error:
        render_chat("{{ raise_exception('x' * 10000000) }}", CHAT)
    assert len(str(error.value)) <= 4000


def test_a_process_that_is_killed_is_started_again():
    render_chat(PLAIN, CHAT)
    os.kill(*request_renderers.pids, signal.SIGKILL)
    time.sleep(0.2)
    assert render_chat(PLAIN, CHAT) == "hi"


def test_threads_get_their_own_prompts():
    wrong = []

    def render(number):
        for turn in range(20):
            text = f"{number} {turn} " + "x" * 3000 * number
            if render_chat(PLAIN, [{"role": "user", "content": text}]) != text:
                wrong.append((number, turn))

    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_nests_too_deeply_to_be_sent_is_refused():
    endless = [1]
    endless.append(endless)
    for content in (endless, [[[[]]]]):
        for _ in range(0 if content is endless else 900):
            content = [content]
        with pytest.raises(ChatTemplateError, match="nest too deeply"):
            render_chat("{{ x }}", CHAT, x=content)
    assert render_chat(PLAIN, CHAT) == "hi"


def test_keys_that_json_cannot_hold_are_refused():
    with pytest.raises(ChatTemplateError, match="keys that are no texts"):
        render_chat("{{ x }}", CHAT, x={(1, 2): 3})


def test_half_characters_of_a_conversation_come_back_as_they_were():
    assert render_chat(PLAIN, [{"role": "user", "content": "\ud800 é 漢"}]) == "\ud800 é 漢"


def test_a_forked_child_renders_in_a_process_of_its_own():
    render_chat(PLAIN, CHAT)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, render_chat("{{ messages[0].role }}", CHAT).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert os.read(reader, 100) == b"user"
    assert render_chat(PLAIN, CHAT) == "hi"


@pytest.mark.parametrize("executable", ["", None])
def test_a_program_without_an_interpreter_is_told_so(monkeypatch, executable):
    """Such as one made by PyInstaller, whose `sys.executable` is itself."""
    close_renderers()
    if executable is None:
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(
        ChatTemplateError, match=r"no Python interpreter.*give generate\(\) a prompt"
    ):
        render_chat(PLAIN, CHAT)
    monkeypatch.undo()
    assert render_chat(PLAIN, CHAT) == "hi"


def test_without_a_process_to_spare_or_a_working_folder_one_line_says_so(tmp_path, monkeypatch):
    close_renderers()
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend("")
    folder.rmdir()
    with pytest.raises(ChatTemplateError, match="cannot start a process for the chat template: No"):
        render_chat(PLAIN, CHAT)
    monkeypatch.undo()
    assert render_chat(PLAIN, CHAT) == "hi"


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_the_process_ends_with_its_client(end):
    script = (
        "import sys, time; from frontend.text import chat_template as c;"
        "c.render_chat('x', [{'role': 'user', 'content': 'a'}]);"
        "print(*c.request_renderers.pids, flush=True); sys.stdin.read()"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    renderer = int(client.stdout.readline())
    os.kill(renderer, 0)
    if end == "kill":
        client.kill()
    client.communicate()
    deadline_s = time.monotonic() + 10
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline_s:
            os.kill(renderer, 0)
            time.sleep(0.05)


def test_closing_twice_and_rendering_again():
    process = TemplateRenderers(1, "omit it")
    process.close()
    request = {
        "template": PLAIN, "messages": CHAT, "tools": None, "special_tokens": {}, "variables": {},
        "add_generation_prompt": True, "continue_final_message": False,
    }  # fmt: skip
    assert process.render(request) == "hi"
    process.close()
    process.close()
    process.start()
    (process_id,) = process.pids
    assert process.render(request) == "hi"
    assert process.pids == [process_id]
    process.close()
    assert process.render(request) == "hi"
    process.close()


async def test_other_requests_go_on_while_a_template_runs_to_its_limit(client):
    async def chat(**options):
        params = SamplingParams(max_tokens=2, temperature=0.0)
        return [output async for output in client.chat(CHAT, params, **options)][-1]

    assert (await chat()).finished
    bad = asyncio.create_task(chat(chat_template=LOOP))
    await asyncio.sleep(0.1)
    num_finished = 0
    while not bad.done():
        params = SamplingParams(max_tokens=2, temperature=0.0)
        outputs = [output async for output in client.generate("hi", params)]
        num_finished += outputs[-1].finished and not bad.done()
    assert num_finished >= 3
    with pytest.raises(ChatTemplateError, match="processor time"):
        await bad
    assert (await chat()).finished


async def test_the_process_ends_with_the_last_client_and_a_tokenizer_starts_another(engine):
    close_renderers()
    num_descriptors = len(list(Path("/proc/self/fd").iterdir()))
    first, second = [await AsyncLLM.connect(engine.address) for _ in range(2)]
    async for _ in first.chat(CHAT, SamplingParams(max_tokens=1)):
        pass
    (process_id,) = own_renderers.pids
    await second.close()
    os.kill(process_id, 0)
    await first.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    tokenizer = first.get_tokenizer()
    assert tokenizer.apply_chat_template(CHAT, tokenize=False)
    close_renderers()
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= num_descriptors)


async def test_a_closed_client_is_freed_at_once(engine):
    gc.disable()
    try:
        client = await AsyncLLM.connect(engine.address)
        outputs = [output async for output in client.chat(CHAT, SamplingParams(max_tokens=2))]
        assert outputs[-1].finished
        left = weakref.ref(client), weakref.ref(client.session)
        await client.close()
        del client
        assert [part() for part in left] == [None, None]
    finally:
        gc.enable()


async def test_templates_of_requests_neither_hold_up_the_models_own_nor_those_of_other_keys(client):
    async def seconds(owner, **options):
        current_owner.set(owner)
        begun_s = time.monotonic()
        await client.chat_prompt(CHAT, **options)
        return time.monotonic() - begun_s

    await seconds("ann")
    loops = [asyncio.create_task(seconds("bob", chat_template=LOOP)) for _ in range(30)]
    await asyncio.sleep(0.3)
    assert await seconds("ann") < 0.3
    assert await seconds("ann", chat_template=client.get_tokenizer().chat_template) < 0.3
    assert await seconds("ann", chat_template=PLAIN) < 3
    assert not any(loop.done() and loop.exception() is None for loop in loops)
    for loop in loops:
        loop.cancel()
    await asyncio.gather(*loops, return_exceptions=True)
    assert await seconds("bob", chat_template=PLAIN) < 15, "whoever left waits no more"


async def test_a_conversation_that_makes_the_models_template_slow_is_refused_in_words(
    client, monkeypatch
):
    monkeypatch.setattr(client.get_tokenizer(), "chat_template", LOOP)  # shared by all clients
    with pytest.raises(ChatTemplateError, match=r"processor time; shorten the conversa"):
        await client.chat_prompt(CHAT)
