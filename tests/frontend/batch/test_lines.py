"""Lines of a batch file: what is asked, and what is refused by name."""

import json

import pytest

from frontend.batch.lines import BatchInput, read_question
from frontend.errors import InvalidInput


def test_openais_line_is_asked_as_it_stands():
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    question = read_question(1, json.dumps(line).encode())
    assert (question.custom_id, question.url, question.body) == ("a", line["url"], body)
    assert question.refusal is None


@pytest.mark.parametrize(
    ("line", "url", "body"),
    [
        ('"Hello"', "/v1/completions", {"prompt": "Hello"}),
        ('{"prompt": "A", "n": 2}', "/v1/completions", {"prompt": "A", "n": 2}),
        ('{"messages": []}', "/v1/chat/completions", {"messages": []}),
        ('{"input": ["x"]}', "/v1/embeddings", {"input": ["x"]}),
    ],
)
def test_a_body_alone_goes_where_its_field_says_and_is_called_by_its_line(line, url, body):
    question = read_question(7, line.encode())
    assert (question.custom_id, question.url, question.body) == ("line-7", url, body)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "not valid JSON"),
        (b'"\xff"', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "not an object"),
        (b'{"custom_id": 3, "prompt": "x"}', "custom_id of line 7 is 3"),
        (b'{"text": "x"}', "none of messages, prompt, input"),
        (b'{"url": "/v1/files", "body": {}}', "'/v1/files' is not supported"),
        (b'{"url": "/v1/completions", "method": "GET", "body": {}}', "'GET'"),
        (b'{"url": "/v1/completions"}', "body of line 7 is not an object"),
        (b'{"url": ["/v1"], "body": {}}', "not supported"),
        (b'{"prompt": "x", "stream": true}', "stream is not supported"),
    ],
)
def test_what_cannot_be_asked_says_why(line, why):
    question = read_question(7, line)
    assert question.custom_id == "line-7"
    assert why in question.refusal


def test_a_file_has_its_lines_by_id_and_no_empty_ones(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"custom_id": "a"}\r\n\n  \n"last, without its line\'s end"')
    lines = BatchInput.read(path).lines
    assert {name: number for name, (number, _) in lines.items()} == {"a": 1, "line-4": 4}


def test_an_id_that_is_given_twice_is_refused_with_both_lines(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"custom_id": "a"}\n"x"\n{"custom_id": "a"}\n')
    with pytest.raises(InvalidInput, match="lines 1 and 3 have the same custom_id 'a'"):
        BatchInput.read(path)
