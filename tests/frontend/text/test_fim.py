"""Prompts of filling in the middle."""

import pytest
from fake_model import byte_tokenizer, ids_of
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as BackendTokenizer

from frontend import AsyncLLM, InvalidInput, SamplingParams
from frontend.inputs.fim import fim_format, text_ids
from frontend.text.fim_formats import fim_tokens, format_rows
from frontend.text.tokenizer import Tokenizer
from protocol.outputs import TokenizerInfo

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|file_sep|>")


def tokenizer_of(backend, **special_tokens):
    info = TokenizerInfo(fingerprint="x", tokenizer_json=None, special_tokens=special_tokens)
    return Tokenizer(backend, info)


def with_tokens(*tokens, **special_tokens):
    backend = byte_tokenizer()
    backend.add_tokens([*tokens])
    return tokenizer_of(backend, **special_tokens)


def prompt_of(tokenizer, model, prefix="a", suffix="b"):
    """The text of a prompt."""
    known = fim_format(tokenizer, model)
    ids = known.joined(text_ids(tokenizer, prefix), text_ids(tokenizer, suffix, goes_on=True))
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("name", format_rows())
def test_a_vocabulary_is_known_by_its_tokens(name):
    row = format_rows()[name]
    own = [row["prompt"].replace("{prefix}", "|").replace("{suffix}", "|"), *row.get("ends", ())]
    tokens = [token for token in fim_tokens({}) if token in row["prompt"] or token in own]
    tokenizer = with_tokens(*tokens, *row.get("repo", ())[-1:], *row.get("file", ())[-1:])
    assert prompt_of(tokenizer, f"my-{name}-4b") == row["prompt"].format(prefix="a", suffix="b")
    known = fim_format(tokenizer, f"my-{name}-4b")
    for role, found in (("repo", known.repo), ("file", known.file)):
        assert (found is None) == (role not in row)
        assert found is None or tokenizer.id_to_token(found) == row[role][-1]
    ends = {tokenizer.id_to_token(each) for each in known.stop_token_ids}
    assert ends >= {*row.get("ends", ()), *row.get("repo", ())[-1:], *row.get("file", ())[-1:]}


def test_tokens_that_a_file_names_go_before_known_ones():
    names = {"fim_pre_token": "<P>", "fim_suf_token": "<S>", "fim_mid_token": "<M>"}
    own = with_tokens(*QWEN, *names.values(), "<X>", **names, fim_pad_token="<X>")
    assert prompt_of(own, "x") == "<P>a<S>b<M>"
    known = fim_format(own, "x")
    assert [own.id_to_token(each) for each in known.stop_token_ids] == ["<P>", "<S>", "<M>", "<X>"]
    # these are a family's, whose order they have
    for tokens, prompt in (
        (
            ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
            "<[fim-suffix]>b<[fim-prefix]>a<[fim-middle]>",
        ),
        (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), "[SUFFIX]b[PREFIX]a"),
    ):
        names = dict(zip(names, tokens, strict=True))
        assert prompt_of(with_tokens(*QWEN, *tokens, **names), "x") == prompt


def test_special_tokens_in_a_text_are_text():
    tokenizer = with_tokens(*QWEN, "<own>")
    text = "x = '<|fim_middle|><eos><own>'"
    ids = text_ids(tokenizer, text)
    own = tokenizer.backend.token_to_id("<own>")
    before, _, behind = text.partition("<own>")
    assert ids == [*ids_of_bytes(before), own, *ids_of_bytes(behind)]
    assert tokenizer.encode(text) != ids, "elsewhere they are tokens"


def ids_of_bytes(text):
    return [each for character in text for each in ids_of(character)]


def sentencepiece():
    """CodeLlama's way: a space before each text, and BOS."""
    words = ["<unk>", "<s>", "\u2581", "a", "b", "\u2581a", "\u2581b", "\u2581<PRE>", "\u2581<SUF>"]
    words += ["\u2581<MID>", "\u2581<EOT>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: index for index, word in enumerate(words)}
    merges = [("\u2581", "a"), ("\u2581", "b")]
    backend = BackendTokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = [word for word in words if "<" in word[:2] and not word.startswith("<0x")]
    backend.add_special_tokens([AddedToken(each, normalized=False) for each in special])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    return tokenizer_of(backend), vocab


def test_no_space_of_sentencepieces_stands_before_the_text_behind_the_gap():
    """As CodeLlama's and Codestral's authors train it."""
    tokenizer, vocab = sentencepiece()
    known = fim_format(tokenizer, "x")
    ids = known.joined(text_ids(tokenizer, "a b"), text_ids(tokenizer, "b a", goes_on=True))
    assert [tokenizer.id_to_token(each) for each in ids] == [
        "<s>", "\u2581<PRE>", "\u2581a", "\u2581b", "\u2581<SUF>", "b", "\u2581a", "\u2581<MID>"
    ]  # fmt: skip
    assert vocab["\u2581<EOT>"] in known.stop_token_ids


async def test_a_client_fills_in(start_engine):
    engine = start_engine(more_tokens=QWEN)
    async with AsyncLLM(engine.address) as llm:
        pre, suf, mid = range(257, 260)
        for prefix in ("a", "a" * 3000):
            prompt = {"prompt": prefix, "suffix": "b"}
            params = SamplingParams(max_tokens=2, stop_token_ids=[7])
            if len(prefix) > 1:
                with pytest.raises(InvalidInput, match="prompt has 3004 tokens"):
                    _ = [each async for each in llm.generate(prompt, params)]
                continue
            *_, last = [each async for each in llm.generate(prompt, params)]
        assert last.prompt == "a"
        asked = engine.requests[-1]
        assert asked.prompt_token_ids == [pre, *ids_of("a"), suf, *ids_of("b"), mid]
        assert asked.sampling_params.stop_token_ids == (7, pre, suf, mid, 261, 260)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        _ = [each async for each in llm.generate({"prompt": "", "suffix": ""}, params)]
        assert engine.requests[-1].prompt_token_ids == [pre, suf, mid]
        assert engine.requests[-1].sampling_params.stop_token_ids == ()
        for wrong, why in (
            ({"prompt": [1], "suffix": "b"}, "the text of prompt is of type list"),
            ({"prompt": "a", "suffix": 1}, "the suffix of prompt is of type int"),
        ):
            with pytest.raises(InvalidInput, match=why):
                _ = [each async for each in llm.generate(wrong, params)]
        params = SamplingParams(truncate_prompt_tokens=5)
        with pytest.raises(InvalidInput, match="truncate_prompt_tokens is 5, and prompt has a suf"):
            _ = [each async for each in llm.generate({"prompt": "a", "suffix": "b"}, params)]


async def test_a_model_without_such_tokens_is_named(client):
    with pytest.raises(InvalidInput, match="'fake' has no tokens for filling in; omit suffix"):
        _ = [each async for each in client.generate({"prompt": "a", "suffix": "b"})]
