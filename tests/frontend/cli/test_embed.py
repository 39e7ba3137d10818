"""`engine-client embed` against a scripted engine: see `pooled` of fake_model.py."""

import io
import json

import pytest
from fake_model import byte_tokenizer

from frontend.cli.app import run_command_line

VECTORS = {"tasks": ("embed",), "prompts": {"query": "Q:"}}


@pytest.fixture
def run(capsys, monkeypatch):
    def run_it(*arguments, stdin=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = run_command_line(arguments)
        captured = capsys.readouterr()
        return code, [json.loads(line) for line in captured.out.splitlines()], captured.err

    return run_it


def test_each_text_or_line_has_a_line_of_json(run, start_engine, address):
    engine = start_engine(model_fields=VECTORS)
    code, vectors, _ = run("embed", "abc", "d", "--address", address, "--priority", "3")
    assert (code, [vector[0] for vector in vectors]) == (0, [3, 1])
    assert engine.requests[0].priority == 3
    code, vectors, _ = run("embed", "--address", address, stdin="ab\ncde\n")
    assert (code, [vector[0] for vector in vectors]) == (0, [2, 3])
    run("embed", "a", "--prompt-name", "query", "--dimensions", "2", "--address", address)
    assert engine.requests[-1].prompt_token_ids == byte_tokenizer().encode("Q:a").ids
    assert engine.requests[-1].pooling_params.dimensions == 2


def test_a_model_for_text_alone_is_a_fault_that_says_what_to_do(run, start_engine, address):
    start_engine()
    code, vectors, error = run("embed", "a", "--address", address)
    assert (code, vectors) == (1, [])
    assert "this engine's tasks are generate" in error
