"""Every fenced block of the pages is a test: commands are parsed by the programs themselves, bodies
decoded by the server's types, Python compiled with the names and options that it uses checked. A
block that cannot be says why: ```console no-test="the reason"."""

import ast
import dataclasses
import importlib
import inspect
import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import cyclopts
import msgspec
import pytest
import yaml

import frontend
from engine_core.cli import app as engine_core
from engine_core.front_door import CLIENT_COMMANDS
from frontend.cli.app import app as engine_client
from frontend.engine.engine_options import daemon_arguments
from frontend.http.app import OPERATIONS
from frontend.request_options import SharedOptions
from scripts.reference.command_lines import engine_client_page, engine_core_page

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OURS = ("frontend", "protocol", "engine_core")
_FENCE = re.compile(r"(?ms)^( *)```([^\n]*)\n(.*?)^ *```$")
_NO_TEST = re.compile(r'^(\w+) no-test="([^"]+)"$')
_OPERATORS = {"&&", "||", "|", "&", ";"}
_OF_OTHERS = {
    "aider", "apt-get", "cat", "claude", "export", "git", "helm", "kubectl", "podman", "docker",
    "prometheus", "ray", "cd", "pipx", "uv", "systemctl", "sudo", "echo", "source", "kill", "mkdir",
    "cp", "npx", "codex", "opencode", "llama-server", "ollama", "vllm", "kind", "scp", "sha256sum",
}  # fmt: skip
"""Programs that are not ours, whose options nothing here can check."""
_OPTIONS_OF_OTHERS = {
    "--help", "--version", "--cpunodebind", "--interleave", "--membind", "--n-cpu-moe", "--tool",
    "--build-arg", "--cap-drop", "--read-only", "--tmpfs",
    "--num-cpus", "--init", "--rm", "--time", "--set", "--max-queued-",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Block:
    name: str
    language: str
    text: str


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            body = re.sub(rf"(?m)^{match[1]}", "", match[3])
            name = f"{page.relative_to(ROOT).as_posix()}:{line}"
            found.append(Block(name, match[2].strip(), body))
    return found


BLOCKS = blocks()


@pytest.mark.parametrize("block", BLOCKS, ids=[block.name for block in BLOCKS])
def test_a_block_is_what_it_says_it_is(block):
    if reason := _NO_TEST.match(block.language):
        pytest.skip(f"{reason[1]}: {reason[2]}")
    check = CHECKS.get(block.language)
    known = ", ".join(CHECKS)
    assert check, f"```{block.language}: not one of {known}, or a no-test without a reason"
    check(block.text)


@pytest.mark.parametrize(
    "text",
    [
        "engine-core m --no-such-option 3",
        "engine-core serve m --no-such-option 3",
        "$ engine-core m --device tpu &",
        "engine-client chat --no-such-option",
        "engine-core plan --no-such-option 3",
        "python scripts/bench.py growth --no-such-option 3",
        "make no-such-target",
        "pip install 'engine-core[no-such-extra]'",
        "curl http://127.0.0.1:8000/v1/no-such-route",
        'curl localhost:8000/v1/completions -d \'{"prompt": "a", "top_p": "high"}\'',
        "no-such-program --help",
    ],
)
def test_a_command_that_would_be_refused_is_found(text):
    with pytest.raises((AssertionError, cyclopts.CycloptsError, msgspec.ValidationError)):
        _check_shell(text)


def test_python_that_would_be_refused_is_found():
    for text in (
        "from frontend import SamplingParams\nSamplingParams(temprature=1)",
        "llm.chat(m=1)",
    ):
        with pytest.raises(AssertionError):
            _check_python(text)
    with pytest.raises(cyclopts.CycloptsError):
        _check_python("from frontend import LLM\nLLM('m', no_such_option=3)")


@cache
def known_options() -> set[str]:
    """Of the programs; and of scripts and tests, names of parameters and what they are told."""
    files = [path for name in ("scripts", "tests") for path in (ROOT / name).rglob("*.py")]
    text = "".join(path.read_text() for path in files)
    fields = re.findall(r"(?m)^    (\w+): ", text)
    return {
        *re.findall(r"--[\w.-]+", engine_core_page() + engine_client_page()),
        *re.findall(r'"(--[a-z-]+)"', text),
        *(f"--{name.replace('_', '-')}" for name in fields),
    }


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_an_option_that_a_text_names_is_there(page):
    if page.name.startswith("from_"):
        return  # tables of other engines' options
    text = _FENCE.sub("", page.read_text())
    spans = [
        span for span in re.findall(r"`([^`]+)`", text) if span.partition(" ")[0] not in _OF_OTHERS
    ]
    named = {each for span in spans for each in re.findall(r"(?:^|\s|\[)(--[a-z][\w.-]+)", span)}
    known = known_options() | _OPTIONS_OF_OTHERS
    assert not [name for name in named if not {name, name.replace("--no-", "--")} & known]


def _check_shell(text: str) -> None:
    for command in commands(text):
        check_command(command)


def commands(text: str) -> list[list[str]]:
    """Of a block in which lines with `$ ` are commands and the others what they print, or all
    lines are commands. Variables before a command are left out."""
    text = text.replace("\\\n", " ")
    lines = text.splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    found: list[list[str]] = []
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split, lexer.commenters = True, "#"
        current: list[str] = []
        for token in [*lexer, ";"]:
            if token in _OPERATORS:
                found += [current] if current else []
                current = []
            elif current or not re.match(r"[A-Z_]+=", token):
                current.append(token)
    return found


def check_command(words: list[str]) -> None:
    program, *arguments = words
    program = program.rpartition("/")[2]
    if program == "engine-core":
        check_engine_core(arguments)
    elif program == "engine-client":
        check_engine_client(arguments)
    elif program in ("python", "python3") and arguments[:1] != ["-m"]:
        check_script(arguments)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert {word for word in arguments if "=" not in word} <= {*targets}
    elif program == "curl":
        check_curl(arguments)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        asked = re.findall(r"(?:engine-core|\.)\[([\w,-]+)\]", " ".join(arguments))
        assert {each for group in asked for each in group.split(",")} <= {
            *extras["optional-dependencies"]
        }
    else:
        assert program in _OF_OTHERS | {"python", "python3"}, f"what is {program}?"


def check_engine_core(arguments: list[str]) -> None:
    first = arguments[0] if arguments else "--help"
    if first in CLIENT_COMMANDS:
        check_engine_client(arguments)
        return
    if not first.startswith("-") and first not in {*engine_core}:
        arguments = ["--model", *arguments]
    if "--config" in arguments:
        at = arguments.index("--config")
        arguments = arguments[:at] + arguments[at + 2 :]
    parse(engine_core, arguments)


def check_engine_client(arguments: list[str]) -> None:
    if "--address" in arguments[:1] or "--keys" in arguments[:1]:
        at = next(n for n, word in enumerate(arguments) if word in {*engine_client})
        arguments = [arguments[at], *arguments[:at], *arguments[at + 1 :]]
    bound = parse(engine_client, arguments)
    passed = bound.arguments.get("engine_options", ()) if bound else ()
    if passed and arguments[0] in ("serve", "http"):
        parse(engine_core, ["check", "--model", "NAME", *passed])


def check_script(arguments: list[str]) -> None:
    file = Path(arguments[0])
    if file.parts[0] in ("scripts", "tests"):
        assert (ROOT / file).is_file()
    if file.parts[0] == "scripts" and file.stem not in ("install", "docs_site"):
        parse(importlib.import_module(f"scripts.{file.stem}").app, arguments[1:])


def parse(app: cyclopts.App, arguments: list[str]) -> inspect.BoundArguments | None:
    """As the program does, up to its call. Words in capitals stand for anything."""
    if {"--help", "--help-all", "--version"} & {*arguments}:
        return None
    plain = [re.sub(r"^\[|\]$|\|[\w|]+", "", word) for word in arguments if word != "..."]
    _, bound, _ = app.parse_args(plain, exit_on_error=False, print_error=False)
    return bound


@cache
def routes() -> list[tuple[re.Pattern[str], object]]:
    return [(re.compile(re.sub(r"\{[^}]*\}", "[^/]+", each.path)), each) for each in OPERATIONS]


def check_curl(arguments: list[str]) -> None:
    url = next(word for word in arguments if re.match(r"(https?://)?(localhost|127\.0)", word))
    path = re.sub(r"^(https?://)?[^/]+", "", url).partition("?")[0]
    at = [each for pattern, each in routes() if pattern.fullmatch(path)]
    assert at or path in ("/", "/openapi.json"), f"no route {path}"
    if "-d" not in arguments:
        return
    body = arguments[arguments.index("-d") + 1]
    taken = [each for each in at if each.method == "POST"]
    assert taken, f"{path} takes no body"
    if taken[0].takes is not None:
        msgspec.json.decode(body, type=taken[0].takes)


def _check_python(text: str) -> None:
    """What is imported of ours is there, and has the parameters that it is given."""
    tree = ast.parse(text)
    ours = {"llm": frontend.LLM}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in OURS:
            ours |= _imported(node)
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in ours:
                check_keywords(ours[name], node.keywords)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="llm"), attr=name)):
                check_keywords(getattr(frontend.LLM, name), node.keywords)


def _imported(node: ast.ImportFrom) -> dict[str, object]:
    try:
        module = importlib.import_module(str(node.module))
    except ModuleNotFoundError as error:
        pytest.skip(f"needs {error.name}")
    return {each.asname or each.name: getattr(module, each.name) for each in node.names}


def check_keywords(called: object, keywords: list[ast.keyword]) -> None:
    """Those of `LLM` that are not its own are the daemon's, as it would be started with them."""
    known = inspect.signature(called).parameters
    others = {each.arg: each.value for each in keywords if each.arg and each.arg not in known}
    if called is frontend.LLM:
        options = {name: ast.literal_eval(value) for name, value in others.items()}
        parse(engine_core, daemon_arguments("NAME", options))
    elif any(each.kind is each.VAR_KEYWORD for each in known.values()):
        assert {*others} <= {*SharedOptions.__annotations__}, f"{called} takes no {others}"
    else:
        assert not others, f"{called} takes no {others}"


def _check_yaml(text: str) -> None:
    assert [*yaml.safe_load_all(text)]


def _check_json(text: str) -> None:
    """One document, or one a line."""
    try:
        json.loads(text)
    except ValueError:
        for line in text.splitlines():
            json.loads(line)


CHECKS = {
    "console": _check_shell,
    "python": _check_python,
    "json": _check_json,
    "toml": tomllib.loads,
    "yaml": _check_yaml,
    "text": lambda text: None,
}
