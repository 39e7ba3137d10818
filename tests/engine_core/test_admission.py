"""Requests that this engine cannot serve are refused with value, limit and next action."""

import msgspec
import pytest

from engine_core.admission import Limits
from engine_core.errors import RequestRefused
from protocol.errors import ErrorCode
from protocol.requests import EngineRequest, MultiModalInput, TensorRef
from protocol.sampling import SamplingParams

LIMITS = Limits(max_model_len=16, vocab_size=100, max_logprobs=5)
GOOD = EngineRequest(
    request_id="r", prompt_token_ids=[0, 99], sampling_params=SamplingParams(max_tokens=4)
)


def replaced(**changes):
    return msgspec.structs.replace(GOOD, **changes)


def with_params(**changes):
    return replaced(sampling_params=SamplingParams(max_tokens=4, **changes))


def test_a_good_request_passes():
    LIMITS.check(GOOD)
    LIMITS.check(replaced(prompt_token_ids=[1] * 15))


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (replaced(prompt_token_ids=[]), ErrorCode.INVALID_REQUEST, "prompt is empty"),
        (
            replaced(prompt_token_ids=[1] * 16),
            ErrorCode.PROMPT_TOO_LONG,
            "prompt has 16 tokens, the limit is 15",
        ),
        (replaced(prompt_token_ids=[1] * 17), ErrorCode.PROMPT_TOO_LONG, "shorten it or raise"),
        (
            replaced(prompt_token_ids=[1] * 10, output_token_ids=[1] * 6),
            ErrorCode.PROMPT_TOO_LONG,
            "nothing is left",
        ),
        (
            replaced(prompt_token_ids=[100]),
            ErrorCode.INVALID_REQUEST,
            "token id 100, the vocabulary ends at 99",
        ),
        (replaced(prompt_token_ids=[5, -1]), ErrorCode.INVALID_REQUEST, "token id -1"),
        (replaced(output_token_ids=[100]), ErrorCode.INVALID_REQUEST, "output_token_ids"),
        (replaced(request_id=""), ErrorCode.INVALID_REQUEST, "request_id has 0 characters"),
        (replaced(request_id="x" * 257), ErrorCode.INVALID_REQUEST, "257 characters"),
        (with_params(stop_token_ids=(100,)), ErrorCode.INVALID_REQUEST, "stop_token_ids"),
        (with_params(allowed_token_ids=(100,)), ErrorCode.INVALID_REQUEST, "allowed_token_ids"),
        (with_params(logit_bias={100: 1.0}), ErrorCode.INVALID_REQUEST, "logit_bias"),
        (with_params(logprobs=6), ErrorCode.INVALID_REQUEST, "logprobs is 6, the limit is 5"),
        (with_params(logprobs=-1), ErrorCode.INVALID_REQUEST, "logprobs is -1"),
        (replaced(num_sequences=2), ErrorCode.NOT_SUPPORTED, "num_sequences"),
        (replaced(adapter="lora"), ErrorCode.NOT_SUPPORTED, "adapter"),
        (replaced(priority=1), ErrorCode.NOT_SUPPORTED, "priority"),
        (
            replaced(prompt_embeds=TensorRef(frame=0, dtype="float32", shape=(1, 1))),
            ErrorCode.NOT_SUPPORTED,
            "prompt_embeds",
        ),
        (
            replaced(
                multimodal_inputs=(
                    MultiModalInput(
                        modality="image",
                        start=0,
                        stop=1,
                        content_hash=b"",
                        data=TensorRef(frame=0, dtype="uint8", shape=(1,)),
                    ),
                )
            ),
            ErrorCode.NOT_SUPPORTED,
            "multimodal_inputs",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(request_, code, words):
    with pytest.raises(RequestRefused, match=words) as caught:
        LIMITS.check(request_)
    assert caught.value.code is code


def test_without_a_limit_logprobs_go_up_to_the_vocabulary():
    limits = Limits(max_model_len=16, vocab_size=100, max_logprobs=-1)
    limits.check(with_params(logprobs=-1))
    limits.check(with_params(logprobs=100))
    with pytest.raises(RequestRefused, match="logprobs is 101, the limit is 100"):
        limits.check(with_params(logprobs=101))
