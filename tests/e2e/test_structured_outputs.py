"""Structured outputs on a real daemon, through LLM: what is written, and what is refused."""

import json
import re

import pytest
from daemons import running_daemon
from raw_client import RawClient

from frontend import LLM, SamplingParams
from frontend.sampling_params import StructuredOutputsParams
from protocol.calls import GetRequestInfo
from protocol.explanations import WaitReason
from protocol.outputs import FinishReason
from protocol.structured_output import StructuredOutput, StructuredOutputKind

pytest.importorskip("llguidance")
pytestmark = pytest.mark.slow

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = "Ann is 30 years old. As JSON: "


@pytest.fixture(scope="module")
def daemon(smollm2):
    with running_daemon(smollm2, "--max-num-seqs", 8, "--max-model-len", 512) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def llm(daemon):
    with LLM(address=daemon.address) as llm:
        yield llm


@pytest.fixture
def client(daemon):
    with RawClient(daemon.address) as client:
        yield client


def answers(llm, asked, prompt=PROMPT, **params):
    params = {"max_tokens": 80, "temperature": 1.0, "seed": 3, **params}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**asked), **params)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return output.outputs


def test_every_sample_is_of_the_schema(llm):
    for answer in answers(llm, {"json": PERSON}, n=4):
        assert answer.finish_reason == "stop"
        person = json.loads(answer.text)
        assert person.keys() == {"name", "age"}
        assert 0 <= person["age"] <= 120


def test_an_answer_is_the_same_with_log_probabilities_and_in_a_crowd(llm):
    (alone,) = answers(llm, {"json": PERSON}, logprobs=2)
    crowd = answers(llm, {"json": PERSON}, n=3)
    assert crowd[0].token_ids == alone.token_ids
    assert len(alone.logprobs) == len(alone.token_ids)


def test_each_kind_is_followed(llm):
    (choice,) = answers(llm, {"choice": ["red", "green"]})
    assert choice.text in ("red", "green")
    assert choice.finish_reason == "stop"
    (code,) = answers(llm, {"regex": "[a-f]{4}-[0-9]{2}"}, temperature=0)
    assert re.fullmatch("[a-f]{4}-[0-9]{2}", code.text)
    (lark,) = answers(llm, {"grammar": 'start: ("ab" | "c")~3'})
    assert re.fullmatch("(ab|c){3}", lark.text)
    (compact,) = answers(llm, {"json": PERSON, "disable_any_whitespace": True})
    assert not re.search(r"[:,{]\s", re.sub(r'"[^"]*"', "", compact.text))


def test_a_grammar_goes_together_with_what_else_changes_logits(llm):
    only = {"choice": ["red", "green", "blue"]}
    tokens = llm.get_tokenizer().encode("blue")
    eos = llm.get_tokenizer().backend.token_to_id("<|im_end|>")
    (answer,) = answers(llm, only, allowed_token_ids=[*tokens, eos])
    assert answer.text == "blue"
    (answer,) = answers(llm, {"json": PERSON}, stop=[":"], max_tokens=20)
    assert answer.stop_reason == ":"
    (answer,) = answers(llm, {"json": PERSON}, repetition_penalty=1.5, top_p=0.9, min_tokens=9)
    assert json.loads(answer.text)


def test_what_cannot_be_had_ends_alone_with_the_reason(llm):
    for asked, words in (
        ({"json": {"not": {}}}, 'keywords ["not"] are not enforced'),
        ({"regex": "(("}, "unclosed group"),
    ):
        (answer,) = answers(llm, asked)
        assert (answer.finish_reason, answer.token_ids) == ("error", [])
        assert words in answer.detail
    (answer,) = answers(llm, {"choice": ["red"]}, min_tokens=9)
    assert "no token is possible: structured_outputs" in answer.detail
    (answer,) = answers(llm, {"choice": ["red"]})
    assert answer.text == "red"


ASKED = StructuredOutput(kind=StructuredOutputKind.JSON, text=json.dumps(PERSON))


def test_a_resumed_request_goes_on_with_the_same_tokens(llm, client):
    """As after the daemon's death."""
    prompt = llm.get_tokenizer().encode(PROMPT)
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 80, "ignore_eos": False}
    params["structured_output"] = ASKED
    whole, _ = client.complete(prompt, "whole", **params)
    rest, end = client.complete(prompt, "rest", output_token_ids=whole[:7], **params)
    assert (rest, end.finish_reason) == (whole[7:], FinishReason.STOP)


def test_a_request_that_waits_for_its_grammar_says_so_and_holds_nobody(llm, client):
    properties = {f"p{number}": {"type": "string"} for number in range(900)}
    large = {"type": "object", "properties": properties, "required": ["p1"]}
    asked = StructuredOutput(kind=StructuredOutputKind.JSON, text=json.dumps(large))
    client.request("large", [5], ignore_eos=False, structured_output=asked, max_tokens=4)
    info = client.call(GetRequestInfo(request_id="large"))
    assert info.waits_for is WaitReason.GRAMMAR
    tokens, _ = client.complete([5], "small", max_tokens=4)
    assert len(tokens) == 4
    assert client.call(GetRequestInfo(request_id="large")).status == "waiting"
    tokens, end = client.collect("large")["large"]
    assert (len(tokens), end.finish_reason) == (4, FinishReason.LENGTH)
