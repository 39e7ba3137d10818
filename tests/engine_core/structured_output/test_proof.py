"""What a user writes is proved in a process of its own: what ends that ends its request alone."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import msgspec
import pytest

from engine_core.structured_output import compiler as compiler_module
from engine_core.structured_output import sandbox
from engine_core.structured_output.compiler import GrammarCompiler
from engine_core.structured_output.grammar_error import GrammarError
from protocol.structured_output import StructuredOutput, StructuredOutputKind
from tests.engine_core.structured_output.vocabularies import EOS, VOCAB_SIZE, tokenizer_json

SLOW = {"properties": {f"p{n}": {"type": "string", "pattern": f"^a{n}b*$"} for n in range(3000)}}
DEEP = {
    "$ref": "#/$defs/d0",
    "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(150)} | {"d150": {}},
}

RULES = "".join(f'\na{n}: "x{n}"' for n in range(3000))


def asked(schema, **more):
    return StructuredOutput(kind=StructuredOutputKind.JSON, text=json.dumps(schema), **more)


@pytest.fixture
def made(monkeypatch):
    compilers = []

    def make(**limits):
        changed = msgspec.structs.replace(compiler_module.LIMITS, **limits)
        monkeypatch.setattr(compiler_module, "LIMITS", changed)
        compilers.append(
            GrammarCompiler(tokenizer_json(), vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,))
        )
        return compilers[-1]

    yield make
    for each in compilers:
        each.close()


def processes():
    folders = Path("/proc").glob(f"{os.getpid()}/task/*/children")
    pids = [int(pid) for folder in folders for pid in folder.read_text().split()]
    return [
        p for p in pids if b"structured_output.sandbox" in Path(f"/proc/{p}/cmdline").read_bytes()
    ]


def test_a_limit_ends_one_content_and_the_next_is_compiled(made):
    compiler = made(cpu_s=0.5)
    with pytest.raises(
        GrammarError, match=r"^tools\[3\] cannot be used: to compile it takes more"
    ) as e:
        compiler.compile(asked(SLOW, field="tools[3]"))
    assert e.value.is_lasting
    compiler.compile(asked({"type": "integer"}))


def test_a_stack_that_overflows_is_that_of_the_process(made):
    compiler = made(stack_bytes=128 << 10)
    with pytest.raises(
        GrammarError, match="ended the process that compiled it, by signal"
    ) as error:
        compiler.compile(asked(DEEP))
    assert error.value.is_lasting


def test_a_process_that_was_killed_by_others_says_nothing_about_the_content(made):
    compiler, before = made(), {*processes()}
    failures = []

    def compile_slow():
        try:
            compiler.compile(asked(SLOW))
        except GrammarError as error:
            failures.append(error)

    thread = threading.Thread(target=compile_slow)
    thread.start()
    while not (new := {*processes()} - before):
        time.sleep(0.01)
    assert len(new) == 1, "the second starts when two are wanted"
    os.kill(*new, signal.SIGKILL)
    thread.join()
    assert not failures[0].is_lasting
    compiler.compile(asked({"type": "integer"}))
    compiler.close()
    assert {*processes()} == before


def test_a_process_that_cannot_be_started_is_told(made, monkeypatch):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(GrammarError, match="no process can be started to compile it") as error:
        made().compile(asked({}))
    assert not error.value.is_lasting


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", r"[^\s\S]", "no text is of it"),
        ("regex", r"ab[^\s\S]", "no text is of it"),
        ("grammar", 'start: "a" /[^\\s\\S]/', "no text"),
        ("grammar", "start: " + " | ".join(f"a{n}" for n in range(3000)) + RULES, "max is 2000"),
    ],
)
def test_what_has_no_text_or_passes_a_limit_at_once_is_refused(made, kind, text, words):
    compiler = made()
    with pytest.raises(GrammarError, match="cannot be used: ") as error:
        compiler.compile(StructuredOutput(kind=StructuredOutputKind(kind), text=text))
    assert words in str(error.value)


def test_ten_thousand_choices_are_taken(made):
    choices = json.dumps([f"choice {number}" for number in range(10_000)])
    made().compile(StructuredOutput(kind=StructuredOutputKind.CHOICE, text=choices))


def test_what_would_hold_up_steps_is_refused(monkeypatch):
    prover = sandbox.Prover(sandbox.Setup(tokenizer_json(), VOCAB_SIZE, (EOS,)))
    prover.prove(asked({}))
    monkeypatch.setattr(sandbox, "MAX_MASK_S", 0.0)
    with pytest.raises(GrammarError, match=r"to find which tokens may follow takes 0\.\d+ s"):
        prover.prove(asked({}))
