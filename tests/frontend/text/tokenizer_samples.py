"""Small tokenizers of the families that models use, built from nothing."""

import string

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

_WORDS = ["hello", "wor", "ld", "▁hello", "▁", "▁▁", "▁wo", ".", "漢", "é", "��"]
SPECIAL = ["<s>", "</s>", "<|end|>"]


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM: every byte is a token, some pairs are merged."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    # merged tokens that hold parts of characters: "Ġ" is a space, "æ¼" begins a CJK character
    for token in ["æ¼", "¢h", "Ġh", "ðŁ", "İī", "he"]:
        vocab[token] = len(vocab)
    merges = [("æ", "¼"), ("Ġ", "h"), ("ð", "Ł"), ("İ", "ī"), ("h", "e"), ("¢", "h")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("plain added ▁"), AddedToken("<think>"), AddedToken("é é")])
    tokenizer.add_special_tokens([*SPECIAL, "<begin▁of▁sentence>"])
    return tokenizer


def _byte_fallback(decoder: decoders.Decoder) -> Tokenizer:
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    pieces += [c for c in string.ascii_letters + ",!" if c not in pieces]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<s>"))
    tokenizer.decoder = decoder
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def llama2() -> Tokenizer:
    """SentencePiece with byte tokens; a leading space of the whole text is stripped."""
    return _byte_fallback(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    )


def gemma() -> Tokenizer:
    """SentencePiece with byte tokens; nothing is stripped."""
    return _byte_fallback(
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    )


def metaspace() -> Tokenizer:
    """As T5: unigram pieces, no byte tokens."""
    pieces = [(piece, -1.0) for piece in [*SPECIAL, *_WORDS, *string.ascii_lowercase]]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def byte_fallback_metaspace() -> Tokenizer:
    """Byte tokens with Metaspace behind them, as some converted models have."""
    return _byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


def word_piece() -> Tokenizer:
    pieces = [*SPECIAL, *string.ascii_lowercase, *("##" + c for c in string.ascii_lowercase), "."]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="<s>"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def bert() -> Tokenizer:
    """As of encoders, with an added token whose case counts and one that is a word by itself."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = string.ascii_lowercase + string.digits + "éж字漢語"
    pieces = [*special, *letters, *("##" + each for each in letters), *".,!?'-", "the", "##ing"]
    vocab = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=12))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.add_special_tokens([AddedToken("[MASK]", lstrip=True), *special[:4]])
    tokenizer.add_tokens([AddedToken("eng", single_word=True), AddedToken("Aé", normalized=False)])
    return tokenizer


def no_decoder() -> Tokenizer:
    """Words joined with spaces."""
    pieces = [*SPECIAL, "one", "two", "three"]
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, unk_token="<s>"))
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_end_suffix() -> Tokenizer:
    """As GPT-1: the last token's suffix becomes nothing, every other one a space."""
    pieces = [*SPECIAL, "a</w>", "b", "c</w>", "d", "漢</w>"]
    tokenizer = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def replaced_after_fuse() -> Tokenizer:
    """A decoder of no known family: what a token adds depends on its neighbours."""
    tokenizer = _byte_fallback(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]))
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace(Regex("▁"), " ")]
    )
    return tokenizer


EXACT = {
    "byte_level": byte_level,
    "llama2": llama2,
    "gemma": gemma,
    "metaspace": metaspace,
    "byte_fallback_metaspace": byte_fallback_metaspace,
    "word_piece": word_piece,
    "no_decoder": no_decoder,
    "word_end_suffix": word_end_suffix,
}
