"""Long texts give the tokens that short ones give, and are refused only where they cannot fit."""

import itertools
import json
import resource
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BackendTokenizer

from frontend.errors import InvalidInput, PromptTooLong
from frontend.text import tokenizer
from frontend.text.long_texts import TokenSize, check_length, token_size
from frontend.text.tokenizer import Tokenizer
from protocol.outputs import TokenizerInfo
from tests.frontend.text import tokenizer_samples as samples
from tests.profiles import examples

KINDS = [*samples.EXACT.values(), samples.bert]
BACKENDS = [each() for each in KINDS]
ODD = "\x04\U00040000\u0323\u0307\u1e0d\uac00\ufb03\uff21\u0301é🎉漢"
PARTS = [*"hewold .,_▁\n1", *ODD, "    ", "</s>", "[MASK]", "plain added ▁"]
TEXTS = st.lists(st.sampled_from(PARTS)).map("".join)


def welcome(backend):
    info = TokenizerInfo(fingerprint="f", tokenizer_json=None)
    return Tokenizer.from_welcome(info, memoryview(backend.to_str().encode()))


@pytest.mark.parametrize("backend", BACKENDS, ids=[each.__name__ for each in KINDS])
@settings(max_examples=examples(60), deadline=None)
@given(text=TEXTS, add_special_tokens=st.booleans())
def test_the_way_of_long_texts_gives_the_tokens_of_short_ones(backend, text, add_special_tokens):
    own = welcome(backend)
    before, tokenizer.LONG_CHARS = tokenizer.LONG_CHARS, -1
    try:
        token_ids = own.encode(text, add_special_tokens)
        assert own.decode(token_ids) == backend.decode(token_ids)
        within = own.encode_within(text, add_special_tokens=add_special_tokens, limit=7)
    finally:
        tokenizer.LONG_CHARS = before
    assert token_ids == backend.encode(text, add_special_tokens=add_special_tokens).ids
    assert within == own.encode_within(text, add_special_tokens=add_special_tokens, limit=7)


def without_bytes():
    """As SmolLM's, whose vocabulary has no tokens for some control characters."""
    document = json.loads(samples.byte_level().to_str())
    for dropped in ("Ą", "ñ"):  # 0x04, and the first byte of characters that nobody uses
        del document["model"]["vocab"][dropped]
    return BackendTokenizer.from_str(json.dumps(document))


def bounded():
    composed = samples.byte_level()
    composed.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    split = samples.byte_level()
    split.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    pieces = samples.gemma()
    pieces.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return [samples.byte_level(), without_bytes(), composed, split, samples.gemma(), pieces]


@pytest.mark.parametrize("backend", bounded())
@settings(max_examples=examples(60), deadline=None)
@given(text=TEXTS)
def test_no_token_stands_for_more_characters_than_is_said(backend, text):
    size = token_size(backend)
    assert size is not None
    num_tokens = len(backend.encode(text, add_special_tokens=False).ids)
    assert size.fewest_tokens(text) <= num_tokens


def unbounded():
    stripped, folded, spaced, dropped, unknown = (samples.byte_level() for _ in range(5))
    stripped.normalizer = normalizers.Strip()
    folded.normalizer = normalizers.Replace("    ", " ")
    spaced.add_tokens([AddedToken("<mask>", lstrip=True)])
    dropped.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
    )
    unknown.pre_tokenizer = pre_tokenizers.Digits()
    return [stripped, folded, spaced, dropped, unknown, samples.bert(), samples.word_end_suffix()]


@pytest.mark.parametrize("backend", unbounded())
def test_no_bound_is_given_where_characters_may_vanish(backend):
    assert token_size(backend) is None


def test_a_text_that_cannot_fit_is_refused_with_its_numbers():
    size = TokenSize(longest=80)
    check_length("a" * 8079, "prompt", 100, size, is_cut=False)
    with pytest.raises(PromptTooLong, match=r"8080 characters, which are 101 tokens or more, max"):
        check_length("a" * 8080, "prompt", 100, size, is_cut=False)
    check_length("a" * 2**21, "prompt", 100, size, is_cut=True)
    with pytest.raises(InvalidInput, match=r"2097153 characters, the limit is 2097152; shorten"):
        check_length("a" * (2**21 + 1), "prompt", 100, size, is_cut=True)


def test_bytes_that_a_vocabulary_drops_do_not_count():
    backend = without_bytes()
    text = "\x04" * 5000 + "he"
    assert backend.encode(text).tokens == ["he"]
    assert token_size(backend).fewest_tokens(text) == 0


def test_other_threads_run_while_a_long_text_is_read():
    own = welcome(samples.byte_level())
    ticks, done = [time.perf_counter()], threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    started = time.perf_counter()
    token_ids = own.encode("hello world" * 30_000)
    own.decode(token_ids)
    took = time.perf_counter() - started
    done.set()
    thread.join()
    gaps = [later - earlier for earlier, later in itertools.pairwise(ticks)]
    assert len(ticks) > 5
    assert max(gaps) < max(0.05, took / 2)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it is Linux that tells")
def test_memory_of_a_long_text_is_given_back():
    own = welcome(samples.byte_level())
    own.encode("hello world" * 500)
    before = resident_mib()
    own.encode("hello world" * 30_000)
    deadline = time.monotonic() + 5
    while resident_mib() - before >= 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert resident_mib() - before < 20


def resident_mib():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() >> 20
