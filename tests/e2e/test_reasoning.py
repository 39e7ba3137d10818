"""A model that thinks before it answers, on a real daemon with drafts: a budget of tokens to think
with, and grammars that hold behind the thoughts, through LLM, the wire and HTTP."""

import json

import httpx
import jsonschema
import pytest
from daemons import running_daemon
from raw_client import RawClient

from frontend import LLM, SamplingParams
from protocol.sampling import ThinkingBudget
from protocol.structured_output import ReasoningMarkers, StructuredOutput, StructuredOutputKind
from tests.engine_core.structured_output.tiny_model import END, START, write_tiny_model
from tests.frontend.http.http_server import serving

pytest.importorskip("llguidance")
pytestmark = pytest.mark.slow

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "number": {"type": "integer"}},
    "required": ["colour"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("thinks"), chat_template=TEMPLATE)
    with running_daemon(folder, "--max-model-len", 512, "--speculative", "ngram") as daemon:
        yield daemon


def thoughts_and_answer(token_ids):
    at = token_ids.index(END)
    return token_ids[:at], token_ids[at + 1 :]


def of_schema(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


@pytest.fixture(scope="module")
def llm(daemon):
    config = {"reasoning_parser": "qwen3"}
    with LLM(address=daemon.address, structured_outputs_config=config) as llm:
        yield llm


def generate(llm, prompt, **fields):
    fields = {
        "temperature": 1.0,
        "max_tokens": 120,
        "structured_outputs": {"json": SCHEMA},
        **fields,
    }
    params = [SamplingParams(seed=seed, **fields) for seed in range(8)]
    return [each.outputs[0] for each in llm.generate([prompt] * 8, params, use_tqdm=False)]


def test_the_grammar_holds_behind_the_thoughts_alone(llm):
    for answer in generate(llm, "Which?", logit_bias={START: 99}, thinking_token_budget=9):
        thoughts, said = thoughts_and_answer(list(answer.token_ids))
        assert thoughts[0] == START
        assert 10 <= len(thoughts) <= 13  # a character that was begun is whole
        assert answer.finish_reason == "length" or of_schema(llm.get_tokenizer().decode(said))
    ends = [answer.finish_reason for answer in generate(llm, "Which?<think>", max_tokens=30)]
    assert set(ends) == {"length"}  # still thinking: a random model ends that by chance alone
    for prompt in ("Which?<think></think>", "Which?<think>\n\n</think>\n\n"):
        for answer in generate(llm, prompt, logit_bias={START: 99}):
            assert START not in answer.token_ids
            assert answer.finish_reason == "length" or of_schema(answer.text)


def test_without_a_reasoning_parser_the_grammar_holds_from_the_first_token(daemon):
    with LLM(address=daemon.address) as llm:
        for answer in generate(llm, "Which?<think>"):
            assert answer.text.startswith("{")


def test_a_request_that_comes_back_goes_on_in_its_thoughts_or_behind_them(daemon):
    asked = StructuredOutput(
        kind=StructuredOutputKind.JSON,
        text=json.dumps(SCHEMA),
        reasoning=ReasoningMarkers("<think>", "</think>", is_open=True),
    )
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 80, "ignore_eos": False}
    params |= {"structured_output": asked, "thinking": ThinkingBudget(6, START, END)}
    with RawClient(daemon.address) as client:
        whole, _ = client.complete([9, START], "whole", **params)
        assert whole.index(END) == 6
        for cut in (2, 6, 7, 12):
            rest, _ = client.complete([9, START], str(cut), output_token_ids=whole[:cut], **params)
            assert rest == whole[cut:]


@pytest.mark.parametrize("enable_in_reasoning", [False, True])
def test_over_http(daemon, enable_in_reasoning):
    body = {
        "messages": [{"role": "user", "content": "Which?"}],
        "seed": 1,
        "temperature": 1,
        "max_tokens": 150,
    }
    format_ = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    with serving(daemon.address, enable_in_reasoning=enable_in_reasoning) as url:

        def message(**fields):
            answer = httpx.post(f"{url}/v1/chat/completions", json={**body, **fields}, timeout=60)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            return choice["message"], choice["finish_reason"]

        if enable_in_reasoning:
            said, end = message(response_format=format_)
            assert "reasoning" not in said and said["content"].startswith("{")
            return
        thought, _ = message(thinking_token_budget=5, return_token_ids=True)
        assert thought["reasoning"] and thought["content"]
        for seed in range(4):
            said, end = message(response_format=format_, thinking_token_budget=5, seed=seed)
            assert said["reasoning"]
            assert end == "length" or of_schema(said["content"])
        said, end = message(
            response_format=format_, chat_template_kwargs={"enable_thinking": False}
        )
        assert "reasoning" not in said
        assert end == "length" or of_schema(said["content"])
