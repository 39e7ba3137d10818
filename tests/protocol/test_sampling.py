"""Limits of sampling parameters, on construction and on the wire."""

import math

import msgspec
import pytest

from protocol.errors import InvalidParameter
from protocol.sampling import MAX_SEED, SamplingParams


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", 1.5, "whole number"),
        ("max_tokens", True, "whole number"),
        ("min_tokens", -1, "at least 0"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", math.nan, "finite"),
        ("temperature", math.inf, "finite"),
        ("temperature", "hot", "number"),
        ("top_k", -1, "from 0 to"),
        ("top_p", -0.1, "from 0.0 to 1.0"),
        ("top_p", 1.01, "from 0.0 to 1.0"),
        ("top_p", math.nan, "finite"),
        ("min_p", -0.5, "from 0.0 to 1.0"),
        ("repetition_penalty", 0.0, "above 0"),
        ("repetition_penalty", -1.0, "at least 0"),
        ("repetition_penalty", 1e-300, "at least 1e-06"),
        ("repetition_penalty", 1e39, "from 0.0 to 1000000.0"),
        ("temperature", 1e39, "from 0.0 to 1000000.0"),
        ("temperature", 10**400, "too many digits"),
        pytest.param("max_tokens", 10**5000, "too many digits", id="digits"),
        ("max_tokens", 2**63, "from 1 to 9223372036854775807"),
        ("min_tokens", 2**64, "from 0 to"),
        ("logprobs", 2**63, "from -1 to"),
        ("stop_token_ids", (2**63,), "from 0 to"),
        ("logit_bias", {2**63: 1.0}, "from 0 to"),
        ("presence_penalty", 2.5, "from -2.0 to 2.0"),
        ("frequency_penalty", -2.5, "from -2.0 to 2.0"),
        ("seed", -1, "from 0 to"),
        ("seed", MAX_SEED + 1, "from 0 to"),
        ("logprobs", -2, "at least -1"),
        ("logit_bias", {3: 101.0}, "logit_bias of token 3 is 101"),
        ("logit_bias", {-3: 1.0}, "token id"),
        ("stop_token_ids", (-1,), "stop_token_ids"),
        ("allowed_token_ids", (), "empty"),
        ("allowed_token_ids", (-1,), "allowed_token_ids"),
    ],
)
def test_values_outside_their_limits_are_refused_by_name(name, value, words):
    arguments = {"max_tokens": 4} | {name: value}
    with pytest.raises(InvalidParameter, match=words) as caught:
        SamplingParams(**arguments)
    assert name in str(caught.value)


def test_contradictions_are_refused():
    with pytest.raises(InvalidParameter, match="min_tokens is 5, above max_tokens 4"):
        SamplingParams(max_tokens=4, min_tokens=5)


def test_the_same_limits_hold_on_the_wire():
    good = msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams(max_tokens=4)))
    bad = [4, 5, *good[2:]]
    with pytest.raises(msgspec.ValidationError, match="min_tokens is 5"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=SamplingParams)


def test_edges_are_allowed():
    params = SamplingParams(
        max_tokens=1,
        min_tokens=1,
        temperature=0.0,
        top_p=1.0,
        min_p=1.0,
        seed=MAX_SEED,
        presence_penalty=-2.0,
        logprobs=-1,
        logit_bias={0: 100.0},
    )
    assert params.is_greedy
    assert params.has_penalties
