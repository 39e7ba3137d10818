"""Streams of tokens give the text that decoding all of them at once gives."""

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.text.detokenizer import (
    MAX_WITHHELD_BYTES,
    MAX_WITHHELD_TOKENS,
    PROMPT_TAIL,
    IncrementalDetokenizer,
)
from frontend.text.tokenizer import Tokenizer
from protocol.outputs import TokenizerInfo
from tests.frontend.text import tokenizer_samples as samples
from tests.profiles import examples

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@functools.cache
def tokenizer_of(family):
    build = {**samples.EXACT, "replaced_after_fuse": samples.replaced_after_fuse}[family]
    return Tokenizer(build(), TokenizerInfo(fingerprint="", tokenizer_json=None))


def streamed(tokenizer, prompt, output, *, skip=True, chunks=None):
    stream = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    parts, start = [], 0
    for size in chunks or [1] * len(output):
        parts.append(stream.append(output[start : start + size]))
        start += size
    parts.append(stream.append(output[start:]))
    parts.append(stream.flush())
    return parts


def at_once(tokenizer, prompt, output, *, skip=True):
    """The reference: the text of everything, less the text of the prompt's tail."""
    tail = prompt[-PROMPT_TAIL:]
    before = tokenizer.decode(tail, skip)
    return tokenizer.decode([*tail, *output], skip)[len(before) :]


def ids(tokenizer, max_size):
    # some ids beyond the vocabulary, as a model with padding rows may give
    return st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=max_size)


@pytest.mark.parametrize("family", samples.EXACT)
@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_stream_of_random_tokens_equals_decoding_all_at_once(family, data):
    tokenizer = tokenizer_of(family)
    skip = data.draw(st.booleans())
    prompt = data.draw(ids(tokenizer, 12))
    if tokenizer.decode(prompt, skip).endswith(REPLACEMENT):
        prompt = []  # a prompt that ends inside a character has tests of its own
    output = data.draw(ids(tokenizer, MAX_WITHHELD_BYTES - 1))
    chunks = data.draw(st.lists(st.integers(1, 4), max_size=8))
    if family == "word_end_suffix" and not tokenizer.decode(prompt[-PROMPT_TAIL:], skip):
        prompt = []
    reference = at_once(tokenizer, prompt, output, skip=skip)
    if family in ("llama2", "gemma", "byte_fallback_metaspace") and prompt:
        # a run that continues from prompt to output is no run of the output's own
        prompt = [*prompt, tokenizer.backend.token_to_id(".")]
        reference = at_once(tokenizer, prompt, output, skip=skip)
    assert "".join(streamed(tokenizer, prompt, output, skip=skip, chunks=chunks)) == reference


@settings(max_examples=examples(150), deadline=None)
@given(output=st.lists(st.binary(min_size=1, max_size=6), max_size=30))
def test_invalid_bytes_of_any_length_come_out_as_decoded_at_once(output):
    tokenizer = tokenizer_of("byte_level")
    first = {tokenizer.pieces.level_bytes(i): i for i in reversed(range(256))}
    token_ids = [first[bytes([byte])] for chunk in output for byte in chunk]
    assert "".join(streamed(tokenizer, [], token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("family", ["byte_level", "llama2", "gemma", "byte_fallback_metaspace"])
@settings(max_examples=examples(200), deadline=None)
@given(text=st.text(alphabet="h漢é🎉👩‍🔬 \n", min_size=1, max_size=40))
def test_characters_split_over_tokens_are_never_shown_in_part(family, text):
    tokenizer = tokenizer_of(family)
    dot = tokenizer.encode(".", add_special_tokens=False)
    output = bytes_as_tokens(tokenizer, text)
    parts = streamed(tokenizer, dot, output)
    assert "".join(parts) == text
    assert all(REPLACEMENT not in part for part in parts)


def bytes_as_tokens(tokenizer, text):
    """The worst case: a token a byte."""
    if tokenizer.pieces.has_byte_tokens:
        return [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    first = {tokenizer.pieces.level_bytes(i): i for i in reversed(range(256))}
    return [first[bytes([byte])] for byte in text.encode()]


def test_emoji_of_a_byte_level_tokenizer_is_shown_with_its_last_byte():
    tokenizer = tokenizer_of("byte_level")
    output = bytes_as_tokens(tokenizer, "a🎉b")
    assert streamed(tokenizer, [], output) == ["a", "", "", "", "🎉", "b", "", ""]


@pytest.mark.parametrize("family", ["llama2", "gemma"])
def test_long_run_of_valid_byte_tokens_is_held_for_a_bounded_number_of_tokens(family):
    tokenizer = tokenizer_of(family)
    text = "漢é🎉" * 20
    output = bytes_as_tokens(tokenizer, text)
    stream = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=True)
    shown = b""
    for num_tokens, token_id in enumerate(output, start=1):
        shown += stream.append([token_id]).encode()
        if num_tokens >= MAX_WITHHELD_BYTES:
            assert num_tokens - len(shown) < 4
    assert (shown + stream.flush().encode()).decode() == text


@pytest.mark.parametrize("family", ["llama2", "gemma", "byte_level", "replaced_after_fuse"])
def test_endless_invalid_bytes_are_not_withheld_for_ever(family):
    tokenizer = tokenizer_of(family)
    if family == "byte_level":
        bad = next(i for i in range(256) if tokenizer.pieces.level_bytes(i) == b"\xff")
    else:
        bad = tokenizer.backend.token_to_id("<0xFF>")
    stream = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=True)
    shown = "".join(stream.append([bad]) for _ in range(100))
    assert len(shown) > 100 - MAX_WITHHELD_TOKENS
    assert set(shown) == {REPLACEMENT}
    assert shown + stream.flush() == REPLACEMENT * 100


def test_byte_run_let_go_keeps_what_was_shown_when_a_wrong_byte_follows():
    tokenizer = tokenizer_of("llama2")
    good = bytes_as_tokens(tokenizer, "漢" * 8)
    bad = tokenizer.backend.token_to_id("<0xFF>")
    assert "".join(streamed(tokenizer, [], [*good, bad, bad])) == "漢" * 8 + REPLACEMENT * 2


@pytest.mark.parametrize("family", ["byte_level", "llama2", "gemma"])
def test_prompt_that_ends_inside_a_character_gives_the_whole_character_as_output(family):
    tokenizer = tokenizer_of(family)
    split = bytes_as_tokens(tokenizer, "h漢")
    rest = tokenizer.encode("h", add_special_tokens=False)
    assert "".join(streamed(tokenizer, split[:-1], [split[-1], *rest])) == "漢h"
    assert "".join(streamed(tokenizer, split[:-2], [*split[-2:], *rest])) == "漢h"


def test_decoder_of_no_known_family_streams_plain_text():
    tokenizer = tokenizer_of("replaced_after_fuse")
    rng = random.Random(1)
    words = [tokenizer.backend.token_to_id(p) for p in ["▁hello", "hello", "é", "漢", "▁", "."]]
    output = rng.choices(words, k=200)
    assert "".join(streamed(tokenizer, words, output)) == at_once(tokenizer, words, output)
