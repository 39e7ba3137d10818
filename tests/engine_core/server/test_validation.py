"""Requests that this engine cannot serve are refused with value, limit and next action."""

import dataclasses

import msgspec
import pytest

from engine_core.errors import RequestRefused
from engine_core.logits_processors import NamedProcessor
from engine_core.pooler_config import PoolerConfig
from engine_core.server.validation import RequestValidator
from protocol.errors import ErrorCode, InvalidParameter
from protocol.pooling import POOLING_SAMPLING, PoolingParams, PoolingTask
from protocol.requests import EngineRequest
from protocol.sampling import BeamSearchParams, SamplingParams

LIMITS = RequestValidator(
    max_model_len=16, vocab_size=100, max_logprobs=5, max_num_seqs=8, scheduling_policy="fcfs"
)
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
        (
            replaced(prompt_token_ids=[1] * 17),
            ErrorCode.PROMPT_TOO_LONG,
            "shorten it.*--max-model-len",
        ),
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
        (
            replaced(num_sequences=9),
            ErrorCode.INVALID_REQUEST,
            "num_sequences is 9, it must be from 1 to max_num_seqs 8",
        ),
        (replaced(num_sequences=0), ErrorCode.INVALID_REQUEST, "num_sequences is 0"),
        (
            replaced(num_sequences=2, output_token_ids=[5]),
            ErrorCode.INVALID_REQUEST,
            "resume each sequence as a request of its own",
        ),
        (replaced(timeout_s=0.0), ErrorCode.INVALID_REQUEST, "timeout_s is 0.0, it must be a fin"),
        (replaced(timeout_s=float("nan")), ErrorCode.INVALID_REQUEST, "timeout_s is nan"),
        (replaced(request_id="a#1"), ErrorCode.INVALID_REQUEST, "not end with # and a number"),
        (replaced(adapter="x" * 300), ErrorCode.INVALID_REQUEST, "adapter has 300"),
        (
            replaced(priority=1),
            ErrorCode.NOT_SUPPORTED,
            "priority is 1, and the scheduling policy is fcfs.*another --scheduling-policy",
        ),
        (
            replaced(pooling_params=PoolingParams(task=PoolingTask.EMBED)),
            ErrorCode.NOT_SUPPORTED,
            "task is embed, this engine's task is generate; start it with --convert embed",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(request_, code, words):
    """Before the scheduler sees it. Proves S019, S029."""
    with pytest.raises(RequestRefused, match=words) as caught:
        LIMITS.check(request_)
    assert caught.value.code is code


def test_without_a_limit_logprobs_go_up_to_the_vocabulary():
    limits = dataclasses.replace(LIMITS, max_logprobs=-1)
    limits.check(with_params(logprobs=-1))
    limits.check(with_params(logprobs=100))
    with pytest.raises(RequestRefused, match="logprobs is 101, the limit is 100"):
        limits.check(with_params(logprobs=101))


def test_a_tenant_is_taken_under_every_policy_and_a_priority_where_it_orders_requests():
    for policy in ("fcfs", "priority", "fair"):
        limits = dataclasses.replace(LIMITS, scheduling_policy=policy)
        limits.check(replaced(tenant="a/b"))
        if policy != "fcfs":
            limits.check(replaced(priority=-5))
        with pytest.raises(RequestRefused, match="tenant has 257 characters"):
            limits.check(replaced(tenant="x" * 257))


def beams(width=4, *, num_sequences=None, output_token_ids=(), **params):
    return EngineRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        sampling_params=SamplingParams(**{"max_tokens": 4, "temperature": 0.0} | params),
        num_sequences=width if num_sequences is None else num_sequences,
        output_token_ids=list(output_token_ids),
        beam_search=BeamSearchParams(beam_width=width),
    )


def test_beams_need_log_probabilities_of_the_model():
    limits = dataclasses.replace(LIMITS, no_beams="--logprobs-mode processed_logits")
    with pytest.raises(RequestRefused, match="not support --logprobs-mode processed_logits"):
        limits.check(beams())


def test_several_sequences_and_beams_pass():
    LIMITS.check(replaced(num_sequences=8))
    LIMITS.check(beams(stop_token_ids=(5,), ignore_eos=True))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (beams(num_sequences=3), "num_sequences is 3, beam_width is 4; they must be equal"),
        (beams(9), "num_sequences is 9, it must be from 1 to max_num_seqs 8"),
        (beams(temperature=0.5), "temperature is 0.5 in a beam search"),
        (beams(logprobs=1), "does not support logprobs"),
        (beams(min_tokens=1), "does not support min_tokens"),
        (beams(repetition_penalty=1.1), "does not support repetition_penalty"),
        (beams(presence_penalty=0.1), "does not support presence_penalty"),
        (beams(frequency_penalty=0.1), "does not support frequency_penalty"),
        (beams(logit_bias={1: 1.0}), "does not support logit_bias"),
        (beams(allowed_token_ids=(1,)), "does not support allowed_token_ids"),
        (beams(top_k=3), "does not support top_k"),
        (beams(top_p=0.5), "does not support top_p"),
        (beams(min_p=0.5), "does not support min_p"),
        (beams(output_token_ids=[3]), "does not support output_token_ids"),
    ],
)
def test_what_a_beam_search_could_not_honour_is_refused_by_name(request_, words):
    with pytest.raises(RequestRefused, match=words):
        LIMITS.check(request_)


def test_beams_need_twice_as_many_tokens_to_choose_from():
    small = dataclasses.replace(LIMITS, vocab_size=7)
    small.check(beams(3))
    with pytest.raises(RequestRefused, match="beam_width is 4, the limit is half the vocabulary"):
        small.check(beams(4))


class Strength:
    """A logits processor's part in validation."""

    extra_args = ("strength",)

    def validate_params(self, params, extra_args):
        if extra_args.get("strength", 0) > 1:
            raise ValueError(f"strength is {extra_args['strength']}, the limit is 1")


WITH_PROCESSOR = dataclasses.replace(
    LIMITS, logits_processors=(NamedProcessor("strong", Strength()),)
)


@pytest.mark.parametrize(
    ("extra_args", "words"),
    [
        ('{"strenght": 1}', "'strenght', which no logits processor .* they take strength"),
        ('{"strength": 2}', "logits processor strong: strength is 2, the limit is 1"),
        ('{"strength": "x"}', "logits processor strong failed: TypeError"),
        ("[1]", "extra_args are no object of JSON"),
        ("{", "extra_args are no object of JSON"),
        ('{"strength": ' + "[" * 50_000, "extra_args are no object of JSON"),
    ],
)
def test_extra_args_are_what_the_logits_processors_take(extra_args, words):
    WITH_PROCESSOR.check(with_params(extra_args='{"strength": 0.5}'))
    WITH_PROCESSOR.check(GOOD)
    with pytest.raises(RequestRefused, match=words) as refusal:
        WITH_PROCESSOR.check(with_params(extra_args=extra_args))
    assert refusal.value.code is ErrorCode.INVALID_REQUEST


def test_extra_args_without_a_logits_processor_are_refused():
    with pytest.raises(RequestRefused, match="'a', and this engine has no logits processors"):
        LIMITS.check(with_params(extra_args='{"a": 1}'))
    LIMITS.check(with_params(extra_args="{}"))
    with pytest.raises(InvalidParameter, match="extra_args are 65537 characters"):
        SamplingParams(max_tokens=4, extra_args=" " * 65537)


def test_beams_do_not_go_past_a_logits_processor():
    beams = replaced(
        sampling_params=SamplingParams(max_tokens=4, temperature=0.0),
        num_sequences=2,
        beam_search=BeamSearchParams(beam_width=2),
    )
    LIMITS.check(beams)
    with pytest.raises(RequestRefused, match="a beam search does not support logits processors"):
        WITH_PROCESSOR.check(beams)


EMBEDDING = PoolerConfig(
    tasks=(PoolingTask.EMBED, PoolingTask.TOKEN_EMBED),
    hidden_size=2**22,
    vector_size=2**22,
    matryoshka_dimensions=(4, 8),
)


def pooling(**values):
    params = PoolingParams(**{"task": PoolingTask.EMBED} | values)
    return replaced(pooling_params=params, sampling_params=POOLING_SAMPLING)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (with_params(), "task is generate, this engine's tasks are embed, token_embed.*--runner"),
        (pooling(task=PoolingTask.SCORE), "task score is not served.*embed, token_embed"),
        (pooling(dimensions=5), "dimensions is 5, this model's vectors may be cut to 4, 8"),
        (
            msgspec.structs.replace(
                pooling(task=PoolingTask.TOKEN_EMBED), prompt_token_ids=[1, 2, 3, 4, 5]
            ),
            "token_embed of 5 tokens with 4194304 numbers each is 20971520, the limit is 16777216",
        ),
        (
            msgspec.structs.replace(pooling(), sampling_params=SamplingParams(max_tokens=2)),
            "a pooling request does not support sampling_params",
        ),
        (msgspec.structs.replace(pooling(), num_sequences=2), "does not support num_sequences"),
        (msgspec.structs.replace(pooling(), output_token_ids=[1]), "support output_token_ids"),
    ],
)
def test_what_a_model_for_vectors_cannot_serve_is_refused(request_, words):
    limits = dataclasses.replace(LIMITS, pooler=EMBEDDING, generates=False)
    with pytest.raises(RequestRefused, match=words):
        limits.check(request_)


def test_a_pooled_prompt_may_be_as_long_as_the_model_allows():
    limits = dataclasses.replace(LIMITS, pooler=EMBEDDING)
    prompt = [1] * LIMITS.max_model_len
    limits.check(msgspec.structs.replace(pooling(), prompt_token_ids=prompt))
    with pytest.raises(RequestRefused, match=f"the limit is {LIMITS.max_model_len} "):
        limits.check(msgspec.structs.replace(pooling(), prompt_token_ids=[*prompt, 1]))
