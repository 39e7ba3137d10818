"""Tools that the server runs (MCP): their servers, the calls, and who may run them."""

import asyncio
import contextlib
import json
import re
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest
import uvicorn
from fake_engine import wait_until
from http_server import serving

pytest.importorskip("mcp", reason="pip install engine-core[mcp]")
from mcp.server.mcpserver import Context, MCPServer
from starlette.responses import Response

from frontend.errors import InvalidInput
from frontend.http.listeners import listening
from frontend.http.mcp import child
from frontend.http.settings import ServerSettings

PROGRAM = f"{shlex.quote(sys.executable)} -IS {Path(__file__).with_name('tool_server.py')}"


def state(http, name="own"):
    found = http.get("/v1/mcp/servers").json()["servers"]
    return next(each for each in found if each["name"] == name)


def names(http):
    return [each["tool"] for each in state(http)["tools"]]


def call(http, tool, server="own", headers=None, **arguments):
    body = {"server": server, "tool": tool, "arguments": arguments}
    return http.post("/v1/mcp/call", json=body, headers=headers)


def answers(http, name="own"):
    wait_until(lambda: state(http, name)["problem"] is None, 20)


@contextlib.contextmanager
def client(*mcp, **settings):
    """A client of a server with tools; no request of it reaches an engine."""
    with (
        serving("ipc:///nowhere", mcp=mcp, **settings) as url,
        httpx.Client(base_url=url, timeout=20) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def http():
    """A client of one server for all tests that leave it as it was."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_API_KEY", "")
        patched.setenv("OF_THE_OPERATOR", "1")
        with client(f"own={PROGRAM}", "bad=no-such-program --option") as http:
            answers(http)
            yield http


def test_tools_are_listed_and_called_by_their_names(http):
    tools = {each["tool"]: each for each in state(http)["tools"]}
    assert tools["echo"] == {
        "name": "own__echo",
        "tool": "echo",
        "description": "Says it again.\nA second line.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    }
    assert len(tools) == 9, "of both pages of the list"
    assert tools["add-tool"]["name"] == "own__add_tool", "a name in every format of calls"
    assert call(http, "echo", text="é").json() == {"is_error": False, "text": "é", "images": []}
    result = call(http, "picture").json()
    assert result["text"] == "Here it is.\n[a picture, image/png, that the user may see]"
    (picture,) = result["images"]
    assert picture["mime_type"] == "image/png"
    assert picture["data"].startswith("iVBOR")
    assert call(http, "fail", text="why").json() == {"is_error": True, "text": "why", "images": []}
    result = call(http, "long").json()["text"]
    assert result.endswith("x\n[cut: 100000 characters, the limit is 65536]")
    assert len(result) < 65_600
    environment = json.loads(call(http, "environment").json()["text"])
    assert "VLLM_API_KEY" not in environment
    assert environment["OF_THE_OPERATOR"] == "1"


def test_a_change_of_the_tools_is_followed(http):
    assert "another" not in names(http)
    call(http, "add-tool")
    wait_until(lambda: "another" in names(http), 10)


def test_a_server_that_hangs_or_dies_costs_its_call_and_comes_back(monkeypatch):
    monkeypatch.setattr("mcp.client.stdio.PROCESS_TERMINATION_TIMEOUT", 0.1)
    with client(f"own={PROGRAM}", f"dying={PROGRAM}", mcp_timeout=0.5) as http:
        before = []
        for name in ("own", "dying"):
            answers(http, name)
            before += call(http, "processes", name).json()["text"].split()
        hang = "no answer within 0.5 s; ask for less, or raise --mcp-timeout"
        for name, tool, told, problem in (
            ("dying", "die", "Connection closed", "Connection closed"),
            ("own", "hang", hang, "it took too long"),
        ):
            failed = {"is_error": True, "text": f"The call failed: {told}", "images": []}
            assert call(http, tool, name).json() == failed
            wait_until(lambda name=name: state(http, name)["tools"] == [], 10)
            assert state(http, name)["problem"] == f"it does not answer: {problem}"
            refusal = call(http, "echo", name)
            assert refusal.status_code == 503
            assert f"{name!r} of tools is away: it does not" in refusal.json()["error"]["message"]
        for name in ("own", "dying"):
            answers(http, name)
        wait_until(lambda: not any(is_running(int(each)) for each in before))


def test_a_program_that_is_not_there_is_told_and_costs_no_other_server(http):
    told = "cannot run no-such-program: No such file or directory"
    wait_until(lambda: told in state(http, "bad")["problem"])
    assert call(http, "echo", "bad").status_code == 503
    assert call(http, "echo", text="x").json()["text"] == "x"


def test_an_unknown_server_or_tool_is_refused_with_those_that_are_there(http):
    for tool, server, told in (
        ("echo", "other", "there is no server 'other' of tools; there is own, bad"),
        ("nothing", "own", "'own' has no tool 'nothing'; it has echo, add-tool"),
    ):
        refusal = call(http, tool, server)
        assert refusal.status_code == 404
        assert told in refusal.json()["error"]["message"]


def test_only_the_page_itself_may_run_tools_without_a_key(http):
    own = f"http://{http.base_url.host}:{http.base_url.port}"
    for origin, status in (
        (own, 200),
        (None, 200),
        ("https://evil.example", 403),
        ("http://127.0.0.1:1", 403),
        ("null", 403),
    ):
        headers = None if origin is None else {"origin": origin}
        assert call(http, "echo", headers=headers, text="x").status_code == status, origin


def test_a_named_origin_or_a_key_may_run_tools_and_nobody_else():
    page = {"origin": "https://chat.example"}
    with client(cors_origin=("https://chat.example",)) as http:
        assert http.get("/v1/mcp/servers").json() == {"servers": []}
        refusal = call(http, "echo", headers=page)
        assert refusal.status_code == 404
        assert "there is none; name it with --mcp" in refusal.json()["error"]["message"]
    with client(api_key=("secret",)) as http:
        assert call(http, "echo").status_code == 401
        assert http.get("/v1/mcp/servers").status_code == 401
        key = {"authorization": "Bearer secret"}
        assert call(http, "echo", headers=page | key).status_code == 404


# servers


def is_running(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux'")
def test_what_a_killed_server_ran_is_killed_too():
    command = "sleep 60 & echo $$ $!; exec sleep 60 <&-"
    program = (
        "import os, subprocess, sys; subprocess.Popen([sys.executable, '-IS', sys.argv[1], "
        "str(os.getpid()), 'sh', '-c', sys.argv[2]], start_new_session=True).wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-IS", "-c", program, child.__file__, command],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        pids = [int(each) for each in parent.stdout.readline().split()]
        assert all(map(is_running, pids))
        parent.send_signal(signal.SIGKILL)
        wait_until(lambda: not any(map(is_running, pids)), 10)


class Bearer:
    """An ASGI application behind a token."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        headers = dict(scope.get("headers", ()))
        if scope["type"] == "http" and headers.get(b"authorization") != b"Bearer of-the-operator":
            await Response(status_code=401)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def test_a_server_at_a_url_gets_its_token_and_its_changes_are_followed(monkeypatch):
    foreign = MCPServer("foreign")

    @foreign.tool()
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    @foreign.tool()
    async def grow(context: Context) -> str:
        """Adds a tool."""
        foreign.add_tool(lambda: "new", name="new", description="Was not there.")
        await context.notify_tools_changed()
        return "done"

    monkeypatch.setenv("MCP_OVER_HTTP_TOKEN", "of-the-operator")
    app = uvicorn.Config(Bearer(foreign.streamable_http_app()), log_config=None)
    settings = ServerSettings(port=0)
    server = uvicorn.Server(app)
    with listening(settings) as (at, sockets):
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets)), daemon=True)
        thread.start()
        with client(f"over-http={at}/mcp") as http:
            answers(http, "over-http")
            assert call(http, "add", "over-http", a=1, b=2).json()["text"] == "3"
            result = call(http, "add", "over-http", a="x").json()
            assert result["is_error"]
            assert "valid integer" in result["text"]
            call(http, "grow", "over-http")
            wait_until(lambda: len(state(http, "over-http")["tools"]) == 3, 10)
        server.should_exit = True
        thread.join(10)


# options


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["own"], "--mcp own has no command; give NAME=COMMAND or NAME=URL"),
        (["own="], "--mcp own has no command"),
        (["=sleep 1"], "--mcp is '=sleep 1', it must be NAME=COMMAND or NAME=URL"),
        (["a b=sleep 1"], "it must be NAME=COMMAND or NAME=URL, with a NAME of letters"),
        ([f"{'a' * 33}=sleep 1"], "32 at most"),
        (["a=sleep 1", "a=http://h/mcp"], "--mcp a is given twice"),
        (["a=sleep '1"], '--mcp a: No closing quotation in "sleep \'1"'),
    ],
)
def test_an_option_that_names_no_server_is_refused(given, told):
    with pytest.raises(InvalidInput, match=re.escape(told)):
        ServerSettings(mcp=tuple(given)).check()


def test_without_the_package_the_option_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(InvalidInput, match=r"pip install 'engine-core\[mcp\]'"):
        ServerSettings(mcp=("a=sleep 1",)).check()
