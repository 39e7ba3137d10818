"""The client's tokenizer against `tokenizers` itself."""

import gc
import json
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers import models

from frontend.errors import ChatTemplateError, InvalidInput
from frontend.text import tokenizer as tokenizer_module
from frontend.text.tokenizer import Tokenizer
from protocol.outputs import TokenizerInfo
from tests.frontend.text import tokenizer_samples as samples


def welcome(backend, **fields):
    info = TokenizerInfo(fingerprint="f", tokenizer_json=None, **fields)
    return Tokenizer.from_welcome(info, memoryview(backend.to_str().encode()))


def test_tokenizer_from_welcome_encodes_and_decodes_like_the_document():
    backend = samples.byte_level()
    tokenizer = welcome(backend, special_tokens={"eos_token": "</s>"})
    text = "hello 漢字 <|end|> 🎉"
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == "hello 漢字  🎉"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.special_tokens == {"eos_token": "</s>"}
    assert tokenizer.vocab_size == backend.get_vocab_size()


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma", "byte_fallback_metaspace"])
def test_the_bytes_of_tokens_joined_are_the_text(name):
    """Parts of characters, and spaces that a piece begins with, are each token's own."""
    tokenizer = welcome(getattr(samples, name)())
    text = "he h🎉\u6f22, he"
    ids = tokenizer.encode("he " + text, add_special_tokens=False)
    joined = b"".join(map(tokenizer.pieces.bytes_of, ids))
    assert joined.decode().strip() == tokenizer.decode(ids).strip()
    assert max(len(tokenizer.pieces.bytes_of(each)) for each in ids) < 4, "no emoji is one token"


def test_truncation_saved_in_the_document_does_not_cut_prompts():
    backend = samples.byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = welcome(backend)
    assert tokenizer.decode(tokenizer.encode("a long enough prompt")) == "a long enough prompt"


def test_special_tokens_of_the_post_processor_are_optional():
    from tokenizers.processors import TemplateProcessing

    backend = samples.byte_level()
    bos = backend.token_to_id("<s>")
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer = welcome(backend)
    assert tokenizer.encode("a")[0] == bos
    assert tokenizer.encode("a", add_special_tokens=False) == tokenizer.encode("a")[1:]


# a WordPiece token that begins with ## reads differently at the start of a text
@pytest.mark.parametrize("family", [family for family in samples.EXACT if family != "word_piece"])
def test_level_bytes_and_pieces_agree_with_the_decoder_for_every_token(family):
    tokenizer = welcome(samples.EXACT[family]())
    pieces = tokenizer.pieces
    for token_id in range(tokenizer.vocab_size):
        alone = tokenizer.decode([token_id], skip_special_tokens=False)
        assert pieces.text(token_id).lstrip(" ") == alone.lstrip(" ")


def test_text_of_a_token_keeps_the_leading_space_and_shows_parts_of_characters():
    tokenizer = welcome(samples.llama2())
    assert tokenizer.pieces.text(tokenizer.backend.token_to_id("▁hello")) == " hello"
    assert tokenizer.pieces.text(tokenizer.backend.token_to_id("<0xE6>")) == "\ufffd"
    assert tokenizer.pieces.text(tokenizer.vocab_size + 9) == ""


def test_impossible_input_is_refused_in_words():
    tokenizer = welcome(samples.byte_level())
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("half a pair: \ud83d")
    with pytest.raises(TypeError, match="int, it must be a str"):
        tokenizer.encode(3)
    with pytest.raises(ValueError, match="token id -1 is impossible"):
        tokenizer.decode([1, -1])


def test_unreadable_document_is_refused_in_words():
    info = TokenizerInfo(fingerprint="f", tokenizer_json=None)
    with pytest.raises(ValueError, match="install the version of tokenizers"):
        Tokenizer.from_welcome(info, b"{}")


def test_model_without_chat_template_says_what_to_do():
    with pytest.raises(ChatTemplateError, match="give chat_template"):
        welcome(samples.byte_level()).apply_chat_template([{"role": "user", "content": "a"}])


def test_special_tokens_are_variables_of_the_template_and_callers_override_them():
    tokenizer = welcome(
        samples.byte_level(),
        chat_template="{{ bos_token }}{{ messages[0].content }}{{ mood }}",
        special_tokens={"bos_token": "<s>"},
    )
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(messages, mood="!") == "<s>a!"
    assert tokenizer.apply_chat_template(messages, bos_token="") == "a"


def test_a_conversation_as_token_ids_has_no_special_tokens_but_the_templates():
    tokenizer = welcome(samples.byte_level(), chat_template="{{ messages[0].content }}")
    messages = [{"role": "user", "content": "a b"}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True)
    assert ids == tokenizer.encode("a b", add_special_tokens=False)
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "a b"
    with pytest.raises(ChatTemplateError, match="does not use return_dict"):
        tokenizer.apply_chat_template(messages, return_dict=True)


def test_equal_tokenizers_are_parsed_once_and_dropped_with_their_last_user():
    same = [welcome(samples.byte_level(), chat_template="x") for _ in range(2)]
    assert same[0] is same[1]
    other = welcome(samples.byte_level(), chat_template="y")
    assert other is not same[0]
    gc.collect()  # what other tests have left
    number = len(tokenizer_module.in_use)
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None
    assert len(tokenizer_module.in_use) == number - 1


def test_a_text_that_the_models_tokenizer_fails_on_is_an_invalid_input():
    """Found by fuzzing: a word outside a vocabulary without an unknown token."""
    tokenizer = welcome(BackendTokenizer(models.WordLevel({"a": 0}, unk_token="?")))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(InvalidInput, match="tokenizer fails on this text"):
        tokenizer.encode("b")


def test_a_document_that_makes_the_library_panic_is_named():
    """Found by fuzzing: a merge shorter than the prefix of words' later parts."""
    document = json.loads(samples.byte_level().to_str())
    vocab = {"a": 0, "b": 1, "ab": 2}
    document["model"] |= {"continuing_subword_prefix": "##", "vocab": vocab, "merges": [["a", "b"]]}
    info = TokenizerInfo(fingerprint="f", tokenizer_json=None)
    with pytest.raises(ValueError, match="the engine sent a tokenizer that"):
        Tokenizer.from_welcome(info, json.dumps(document).encode())


def test_a_tokenizer_is_freed_with_its_last_client_and_not_by_a_collection():
    backend = samples.byte_level()
    gc.disable()
    try:
        tokenizer = welcome(backend, special_tokens={"eos_token": "of this test alone"})
        assert tokenizer.pieces.text(backend.encode("hello").ids[0])
        left = weakref.ref(tokenizer), weakref.ref(tokenizer.pieces)
        del tokenizer
        assert [part() for part in left] == [None, None]
    finally:
        gc.enable()


PARTS = [*("the", "eng", "engine", "Aé", "aé", "[MASK]", "[CLS]", "e\u0301", "\u0301", "漢字", "Ж")]
PARTS += [
    *(" ", "  ", "\t", "\n", "\u00a0", "\u3000", "\0", "\u200d", ".", "'", "🎉", "İ", "x" * 13)
]
BY_WORDS = Tokenizer(samples.bert(), TokenizerInfo(fingerprint="f", tokenizer_json=None))


@settings(deadline=None)
@given(st.lists(st.sampled_from(PARTS) | st.characters(exclude_categories=["Cs"])).map("".join))
def test_a_text_of_known_words_has_the_tokens_of_the_whole_text(text):
    assert BY_WORDS.around_words == ([2], [3])
    assert BY_WORDS.encode_within(text) == (BY_WORDS.backend.encode(text).ids, None)


def test_a_text_of_known_words_is_cut_like_any_other():
    tokenizer = welcome(samples.bert())
    assert tokenizer.encode_within("a b c d", limit=4) == (tokenizer.encode("a b"), None)
    left = tokenizer.encode_within("a b c d", limit=4, side="left")
    assert left == (tokenizer.encode("c d"), None)
    for limit in range(8):
        for side in ("left", "right"):
            expected = tokenizer._cut_encoding("a b c d", None, True, limit, side).ids
            assert tokenizer.encode_within("a b c d", limit=limit, side=side) == (expected, None)
    bare = tokenizer.encode_within("a b", add_special_tokens=False)
    assert bare == (tokenizer.encode("a b", add_special_tokens=False), None)
    with pytest.raises(InvalidInput, match="lone surrogate"):
        tokenizer.encode_within("a \ud800")


def test_as_many_words_are_known_as_memory_is_meant_for_them(monkeypatch):
    monkeypatch.setattr(tokenizer_module, "_MAX_WORDS", 8)
    tokenizer = welcome(samples.bert())
    text = " ".join(f"word{number}" for number in range(50)) + " " + "x" * 1000
    assert tokenizer.encode_within(text)[0] == tokenizer.encode(text)
    assert 0 < len(tokenizer.known_words) <= 8
    assert max(map(len, tokenizer.known_words)) < 1000


@pytest.mark.parametrize("family", ["byte_level", "metaspace", "word_piece", "no_decoder"])
def test_words_are_looked_up_only_where_their_neighbours_do_not_count(family):
    assert welcome(getattr(samples, family)()).around_words is None
    backend = samples.bert()
    backend.add_tokens(["two words"])
    assert welcome(backend).around_words is None
