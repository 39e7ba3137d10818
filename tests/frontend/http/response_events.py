"""Requests to /v1/responses, and their events: each is as OpenAI's package has it.

`openai_events.json` is made of the package's types: the schemas of the events, and the names of the
fields of a request."""

import json
from itertools import pairwise
from pathlib import Path

import jsonschema

OPENAI = json.loads(Path(__file__).with_name("openai_events.json").read_text())
VALIDATORS = {
    kind: jsonschema.Draft202012Validator({**schema, "$defs": OPENAI["$defs"]})
    for kind, schema in OPENAI["events"].items()
}


def respond(http, given="Hi", **fields):
    body = {"input": given, "temperature": 0, "max_output_tokens": 400, **fields}
    return http.post("/v1/responses", json=body)


def events_of(response):
    """Events, whose name is their type and whose numbers have no gaps."""
    assert response.status_code == 200, response.text
    events = []
    for each in response.text.strip().split("\n\n"):
        name, data = each.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        VALIDATORS[events[-1]["type"]].validate(events[-1])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def kinds_of(events):
    """Types in their order, repeated deltas once."""
    kinds = [event["type"].removeprefix("response.") for event in events]
    return kinds[:1] + [kind for before, kind in pairwise(kinds) if kind != before]


def prompt_of(http, number=-1):
    tokens = http.engine.requests[number].prompt_token_ids
    return http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
