"""Names, defaults and limits of SamplingParams, and its translation."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import protocol.sampling
from frontend import (
    InvalidInput,
    RepetitionDetectionParams,
    SamplingParams,
)
from frontend.text.sampler_chain import SamplerChainFields, breaker_tokens
from frontend.wire_params import bad_word_ids, thinking_budget
from protocol.errors import InvalidParameter


def test_the_first_positions_are_vllms():
    """And each arrives in what is sent. Proves S191."""
    params = SamplingParams(2, 0.1, 0.2, 1.3, 0.4, 0.5, 6, 0.7, 8, "stop")
    wire = params.to_wire(1, 100)
    assert params.n == 2
    assert (wire.presence_penalty, wire.frequency_penalty, wire.repetition_penalty) == (
        0.1, 0.2, 1.3,
    )  # fmt: skip
    assert (wire.temperature, wire.top_p, wire.top_k, wire.min_p, wire.seed) == (
        0.4, 0.5, 6, 0.7, 8,
    )  # fmt: skip
    assert params.stop_strings == ("stop",)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n is 0"),
        ({"n": 2.0}, "n is 2.0"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": None}, "temperature is None"),
        ({"top_k": -2}, "top_k is -2"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, above max_tokens 8"),
        ({"seed": -2}, "seed is -2"),
        ({"stop": ""}, "empty string"),
        ({"stop": ["a", ""]}, "empty string"),
        ({"stop": [1]}, "stop holds 1"),
        ({"stop": "x", "detokenize": False}, "detokenize is False"),
        ({"temperature": 0, "n": 2}, "n is 2 with temperature 0"),
        ({"logit_bias": {"x": 1}}, "key 'x'"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids is 'x'"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0"),
        ({"output_kind": 1}, "output_kind is 1"),
        ({"n": 3, "best_of": 2}, "best_of is 2, it must be .*3"),
        ({"best_of": 3, "temperature": 0}, "best_of is 3 with temperature 0.*best_of=1"),
        ({"detokenize": 1}, "detokenize is 1"),
        ({"stop": ["a"] * 129}, r"stop has 129 texts of 129 characters, the limit is 128 of 4096"),
        ({"stop": "a" * 4097}, "stop has 1 texts of 4097 characters"),
        ({"bad_words": ["a" * 16_385]}, "bad_words has 1 texts of 16385 characters, the limit is"),
        ({"bad_words": [str(n) for n in range(129)]}, "bad_words has 129 texts"),
        ({"logit_bias": {"9" * 5000: 1.0}}, "logit_bias has the key '999"),
        ({"logit_bias": {1: 1.0, 2: 101.0}}, "logit_bias of token 2 is 101.0"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias of token 1 is inf"),
        ({"allowed_token_ids": [1, True]}, "a token id in allowed_token_ids is True"),
        ({"stop_token_ids": [1, -1]}, "a token id in stop_token_ids is -1"),
        ({"stop_token_ids": 2}, "stop_token_ids is 2, it must be a list"),
        ({"stop": 2}, "stop is 2, it must be a list"),
        ({"bad_words": "word"}, "bad_words is 'word', it must be a list"),
        ({"structured_outputs": {"regx": "a"}}, "no regx; its fields are [^f]* grammar"),
    ],
)
def test_a_value_outside_its_limits_is_named(options, message):
    """Those of the engine's own parameters: tests/protocol/test_sampling.py."""
    with pytest.raises(ValueError, match=message) as refusal:
        SamplingParams(**options)
    assert isinstance(refusal.value, InvalidInput)


REFUSED = [
    {"use_beam_search": True},
    {"logits_processors": [print]},
    {"watermarking": True},
    {"mirostat": 2},
    {"prompt_logprob_token_ids": [[1]]},
    {"flat_logprobs": True},
    {"stream_interval": 3},
    {"skip_reading_prefix_cache": True},
    {"routed_experts_prompt_start": 2},
    {"trace_decode_token_ids": [1]},
    {"spaces_between_special_tokens": False, "skip_special_tokens": False},
]


@pytest.mark.parametrize("options", REFUSED)
def test_what_is_not_supported_is_refused_by_name(options):
    with pytest.raises(InvalidInput, match=f"not support {next(iter(options))}"):
        SamplingParams(**options)


def test_every_parameter_reaches_the_engine_or_is_the_clients_or_is_refused():
    """None is accepted and ignored. Proves S191."""
    sent = {
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.3,
        "temperature": 0.4, "top_p": 0.5, "top_k": 6, "min_p": 0.7, "seed": 8,
        "stop_token_ids": [9], "ignore_eos": True, "max_tokens": 10, "min_tokens": 3,
        "logprobs": 2, "prompt_logprobs": 3, "logprob_token_ids": [7, 8],
        "logit_bias": {5: 1.5}, "allowed_token_ids": [5, 6, 9],
    }  # fmt: skip
    wire = SamplingParams(**sent).to_wire(1, 100)
    arrived = {name: getattr(wire, name) for name in sent}
    as_lists = {name: list(v) if isinstance(v, tuple) else v for name, v in arrived.items()}
    assert as_lists == sent
    of_the_client = {  # test_async_llm.py and test_sequence_state.py prove what they do
        "n", "best_of", "stop", "detokenize", "skip_special_tokens", "include_stop_str_in_output",
        "truncate_prompt_tokens", "output_kind",
        # sent in the engine's terms: below
        "bad_words", "repetition_detection", "thinking_token_budget", "extra_args",
    }  # fmt: skip
    of_the_client |= {"structured_outputs", "guided_decoding"}  # test_structured_outputs.py
    of_the_client |= {each.name for each in dataclasses.fields(SamplerChainFields)}  # below
    refused = {next(iter(options)) for options in REFUSED} | {"prompt_logprob_start"}
    assert {each.name for each in dataclasses.fields(SamplingParams)} == (
        sent.keys() | of_the_client | refused
    )


LLAMA = {
    "typical_p": 0.9, "top_n_sigma": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.2,
    "dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": -1,
    "dynatemp_range": 0.5, "dynatemp_exponent": 2.0, "repeat_last_n": 64,
}  # fmt: skip


def test_llama_cpps_samplers_arrive_under_their_names():
    wire = SamplingParams(**LLAMA, top_k=40, samplers=["DRY", "top-k", "typ", "minp", "temp"])
    chain = wire.to_wire(1, 100).chain
    assert {name: getattr(chain, name) for name in LLAMA} == LLAMA
    assert chain.samplers == ("dry", "top_k", "typ_p", "min_p", "temperature")
    assert SamplingParams(top_n_sigma=1.0).to_wire(1, 9).chain.samplers == (
        "penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature",
    )  # fmt: skip


def test_what_samplers_leave_out_is_neutral_and_what_does_nothing_is_no_chain():
    given = {"top_p": 0.5, "min_p": 0.1, "temperature": 0.0, "presence_penalty": 1.0, "top_k": 3}
    wire = SamplingParams(samplers=["top_k"], **given).to_wire(1, 9)
    assert (wire.top_k, wire.top_p, wire.min_p, wire.temperature) == (3, 1.0, 0.0, 1.0)
    assert not wire.has_penalties
    for nothing in (
        {}, {"typical_p": 1}, {"top_n_sigma": 0}, {"xtc_probability": 1.0, "xtc_threshold": 0.6},
        {"dry_base": 3.0}, {"dry_multiplier": 1.0, "dry_penalty_last_n": 0}, {"repeat_last_n": 64},
    ):  # fmt: skip
        assert SamplingParams(**nothing).to_wire(1, 9).chain is None
    for something in ({"repeat_last_n": 0, "presence_penalty": 1.0}, {"samplers": []}):
        assert SamplingParams(**something).to_wire(1, 9).chain is not None
    assert not SamplingParams(temperature=0, dynatemp_range=0.5).to_wire(1, 9).is_greedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"typical_p": 1.5}, "typical_p is 1.5, it must be from 0.0 to 1.0"),
        ({"dry_base": 0.5}, "dry_base is 0.5, it must be at least 1.0"),
        ({"dry_allowed_length": -1}, "dry_allowed_length is -1"),
        ({"repeat_last_n": -2}, "repeat_last_n is -2"),
        ({"repeat_last_n": 2.5}, "repeat_last_n is 2.5, it must be a whole number"),
        ({"samplers": ["top_k", "tfs"]}, "samplers holds 'tfs', its names are penalties, dry"),
        ({"samplers": "top_k"}, "samplers is 'top_k', it must be a list"),
        ({"samplers": ["dry"] * 33}, "the length of samplers is 33, it must be from 0 to 32"),
        ({"dry_sequence_breakers": ["a" * 41]}, "1 texts of up to 41 characters, the limit is 32"),
        ({"dry_sequence_breakers": [1]}, "dry_sequence_breakers is .1., it must be a list"),
    ],
)
def test_a_sampler_outside_its_limits_is_named(options, message):
    with pytest.raises(InvalidInput, match=message):
        SamplingParams(**options)


def test_breakers_are_the_tokens_that_hold_them_or_begin_them():
    class Words:
        """A tokenizer of these texts, longest first."""

        texts = ("a", "b:", "\n", "x\n\n", "b", ":", "end", "e", "n", "d", "the")
        vocab_size = len(texts)

        def __init__(self):
            self.backend = SimpleNamespace(
                decode_batch=lambda ids, skip_special_tokens: [self.texts[each] for (each,) in ids]
            )

        def encode(self, text, add_special_tokens):
            return [self.texts.index(character) for character in text]

    words = Words()
    assert breaker_tokens(["\n", ":"], words) == (((1, 2, 3, 5), ()),)
    assert {tail: heads for heads, tail in breaker_tokens(["end"], words)} == {
        (): (6,), (8, 9): (7, 10),
    }  # fmt: skip
    assert breaker_tokens(None, words) == (((1, 2, 3, 5), ()),)
    assert breaker_tokens([], words) == ()


def test_extra_args_are_sent_as_json_or_refused():
    given = {"a": [1, 2.5, "x", None], "b": {"c": True}}
    assert json.loads(SamplingParams(extra_args=given).to_wire(1, 10).extra_args) == given
    assert SamplingParams(extra_args={}).to_wire(1, 10).extra_args is None
    for wrong, why in [
        ([1], "must be a dict"), ({1: 2}, "must be a dict"), ({"a": object()}, "not JSON"),
        ({"a": float("nan")}, "not JSON compliant"), ({"a": "x" * 70_000}, "the limit is 65536"),
    ]:  # fmt: skip
        with pytest.raises(InvalidInput, match=f"extra_args.*{why}"):
            SamplingParams(extra_args=wrong)


def test_what_asks_for_nothing_is_accepted():
    params = SamplingParams(
        bad_words=[], best_of=1, logits_processors=[], extra_args={}, seed=-1, top_k=-1,
        spaces_between_special_tokens=False,
    )  # fmt: skip
    wire = params.to_wire(1, 10)
    assert (wire.seed, wire.top_k) == (None, 0)


def test_assigned_values_are_checked_when_used():
    params = SamplingParams()
    params.stop = "one"
    assert params.stop_strings == ("one",)
    params.temperature = -1
    with pytest.raises(InvalidInput, match="temperature is -1"):
        params.to_wire(1, 10)


def test_max_tokens_none_means_what_the_models_length_leaves():
    assert SamplingParams(max_tokens=None).to_wire(30, 100).max_tokens == 70
    assert SamplingParams(max_tokens=90, min_tokens=80).to_wire(30, 100).max_tokens == 70
    assert SamplingParams(max_tokens=90, min_tokens=80).to_wire(30, 100).min_tokens == 70
    assert SamplingParams(max_tokens=9).to_wire(30, 100).max_tokens == 9


def test_logit_bias_takes_openais_string_keys():
    wire = SamplingParams(logit_bias={"5": 1, 6: -2.5}).to_wire(1, 10)
    assert wire.logit_bias == {5: 1, 6: -2.5}


def test_defaults_of_a_model_come_with_their_types():
    params = SamplingParams.from_defaults({"temperature": 0.5, "top_k": 20.0, "unknown": 1.0})
    assert (params.temperature, params.top_k) == (0.5, 20)
    assert isinstance(params.top_k, int)


def test_a_clone_shares_nothing():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0})
    clone = params.clone()
    clone.stop.append("b")
    clone.logit_bias[2] = 1.0
    assert (params.stop, params.logit_bias) == (["a"], {1: 2.0})


@given(
    temperature=st.floats(0, 10),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 1000),
    min_p=st.floats(0, 1),
    max_tokens=st.none() | st.integers(1, 10_000),
    min_tokens=st.integers(0, 10_000),
    prompt_len=st.integers(1, 499),
)
def test_whatever_is_accepted_translates(prompt_len, **options):
    """Proves S191."""
    try:
        params = SamplingParams(**options)
    except InvalidInput:
        assert options["max_tokens"] is not None
        assert options["min_tokens"] > options["max_tokens"]
        return
    wire = params.to_wire(prompt_len, 500)
    assert 1 <= wire.max_tokens <= 500 - prompt_len
    assert wire.min_tokens <= wire.max_tokens


def test_prompt_logprobs_of_the_whole_vocabulary_are_sent_as_its_size():
    params = SamplingParams(prompt_logprobs=-1)
    assert params.to_wire(1, 100, vocab_size=300).prompt_logprobs == 300
    with pytest.raises(InvalidInput, match="prompt_logprobs is -2, it must be at least"):
        SamplingParams(prompt_logprobs=-2)


def test_named_logprobs_are_bounded_and_agree_with_their_number():
    with pytest.raises(InvalidInput, match="has 129 entries, the limit is 128"):
        SamplingParams(logprob_token_ids=list(range(129)))
    with pytest.raises(InvalidInput, match="logprobs is 3, and logprob_token_ids has 2"):
        SamplingParams(logprob_token_ids=[1, 2], logprobs=3)


def test_repetition_detection_is_vllms_with_0_for_off_and_for_1():
    off = SamplingParams(repetition_detection=RepetitionDetectionParams())
    assert off.to_wire(1, 100).repetition_detection is None
    detection = RepetitionDetectionParams(max_pattern_size=20, min_count=3)
    wire = SamplingParams(repetition_detection=detection).to_wire(1, 100).repetition_detection
    assert (wire.max_pattern_size, wire.min_pattern_size, wire.min_count) == (20, 1, 3)
    with pytest.raises(InvalidInput, match=r"max_pattern_size is 2000, it must be from 1 to 1024"):
        RepetitionDetectionParams(max_pattern_size=2000, min_count=2)
    with pytest.raises(InvalidInput, match=r"min_count is 1, it must be at least 2"):
        RepetitionDetectionParams(max_pattern_size=2, min_count=1)


def test_bad_words_have_their_tokens_with_and_without_a_space_before():
    """As vLLM: behind a space only if that is another token, and as many of them."""
    tokens = {
        "a": [1],
        " a": [2],
        "bc": [3, 4],
        " bc": [5, 4],
        "d": [6],
        " d": [7, 6],
        "": [],
        " ": [9],
    }
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: tokens[text])
    assert bad_word_ids(["a", "bc", "d", " a"], tokenizer) == (
        ((1,), (2,), (3, 4), (5, 4), (6,), (1,), (2,))
    )
    with pytest.raises(InvalidInput, match="holds ' ', which has no tokens"):
        bad_word_ids([" "], tokenizer)
    with pytest.raises(InvalidInput, match="bad_words holds ''"):
        SamplingParams(bad_words=[""])
    with pytest.raises(InvalidParameter, match=r"129 words of 129 tokens.*limit is 128"):
        protocol.sampling.SamplingParams(max_tokens=1, bad_words=((1,),) * 129)


def test_a_thinking_budget_has_the_markers_of_the_models_template():
    template = "{% if think %}<think>{% endif %}{{ text.split('</think>') }}"
    tokens = {"<think>": [3], "</think>": [4]}

    def tokenizer(tokens, chat_template):
        encode = lambda text, add_special_tokens: tokens[text]  # noqa: E731
        return SimpleNamespace(encode=encode, chat_template=chat_template)

    found = thinking_budget(7, tokenizer(tokens, template))
    assert (found.max_tokens, found.start_token_id, found.end_token_id) == (7, 3, 4)
    for wrong in (tokenizer(tokens, None), tokenizer(tokens | {"<think>": [3, 5]}, template)):
        with pytest.raises(InvalidInput, match="thinking_token_budget is 7, and this model's"):
            thinking_budget(7, wrong)
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    with pytest.raises(InvalidInput, match="thinking_token_budget is -2, it must be at least 0"):
        SamplingParams(thinking_token_budget=-2)


def test_the_table_of_the_docs_names_every_parameter():
    page = (Path(__file__).parents[2] / "docs/guides/sampling.md").read_text()
    for field in dataclasses.fields(SamplingParams):
        assert f"`{field.name}`" in page, field.name
