"""Tokenizers of encoders' GGUF files as parts of a tokenizer.json: WordPiece ("bert"), XLM-R's
Unigram ("t5"), and the tokens around texts and pairs of them."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from typing import Any

from engine_core.model_files.gguf.config import CONTROL, UNKNOWN, GgufMetadata

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_CONTINUES = "##"
_LONGEST_WORD = 100  # in characters; BERT's own limit
_CAPITAL = re.compile("[A-Z]")


def respell_words(tokens: list[str], types: Sequence[int]) -> list[str]:
    """BERT's vocabulary as BERT spells it: llama.cpp marks the pieces that begin a word, BERT those
    that do not. `types`: of the tokens, or empty."""
    kinds = dict(enumerate(types))
    return [_respelled(token, kinds.get(number) == CONTROL) for number, token in enumerate(tokens)]


def _respelled(token: str, is_control: bool) -> str:
    # converters before 2024 left everything in brackets as it is
    if is_control or (token.startswith("[") and token.endswith("]") and len(token) > 2):
        return token
    if token.startswith(_SPACE) and token != _SPACE:
        return token.removeprefix(_SPACE)
    return _CONTINUES + token


def word_pieces_json(meta: GgufMetadata, tokens: list[str]) -> dict[str, Any]:
    """model, normalizer, pre_tokenizer and decoder of the tokenizer.json. `tokens`: as BERT spells
    them. A file that does not say whether case counts is of a model that has no capitals."""
    raw = meta.raw
    has_capitals = any(_CAPITAL.search(token) for token in tokens if not token.startswith("["))
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "lowercase": bool(raw.get("tokenizer.ggml.normalizer.lowercase", not has_capitals)),
        "strip_accents": raw.get("tokenizer.ggml.normalizer.strip_accents"),
    }
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": _CONTINUES, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": tokens[_unknown_id(meta, tokens)],
            "continuing_subword_prefix": _CONTINUES,
            "max_input_chars_per_word": _LONGEST_WORD,
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
        },
    }


def unigram_json(meta: GgufMetadata, tokens: list[str]) -> dict[str, Any]:
    """model, normalizer, pre_tokenizer and decoder of XLM-R's tokenizer.json, whose words are cut
    at any space."""
    raw = meta.raw
    scores = raw.get("tokenizer.ggml.scores") or ()
    if len(scores) != len(tokens):
        meta.broken(f"{len(tokens)} tokens have {len(scores)} scores")
    charsmap = bytes(byte & 255 for byte in raw.get("tokenizer.ggml.precompiled_charsmap") or ())
    encoded = base64.b64encode(charsmap).decode()
    prefixes = bool(raw.get("tokenizer.ggml.add_space_prefix", True))
    metaspace = {
        "type": "Metaspace",
        "replacement": _SPACE,
        "prepend_scheme": "always" if prefixes else "never",
        "split": True,
    }
    return {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": encoded} if encoded else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace],
        },
        "decoder": metaspace,
        "model": {
            "type": "Unigram",
            "unk_id": _unknown_id(meta, tokens),
            "vocab": list(zip(tokens, scores, strict=True)),
            "byte_fallback": False,
        },
    }


def _unknown_id(meta: GgufMetadata, tokens: list[str]) -> int:
    types = meta.raw.get("tokenizer.ggml.token_type") or []
    stated = meta.raw.get("tokenizer.ggml.unknown_token_id")
    token_id = types.index(UNKNOWN) if stated is None and UNKNOWN in types else stated
    if token_id is None or not 0 <= token_id < len(tokens):
        meta.broken(f"unknown_token_id is {token_id} of {len(tokens)} tokens")
    return int(token_id)


def encoder_ends(
    meta: GgufMetadata, special: dict[str, str], ids: dict[str, int], *, is_roberta: bool
) -> dict[str, Any] | None:
    """The post-processor that puts CLS before a text and SEP behind it, unless the file says
    otherwise; None: neither is there.

    Args:
        special: "cls_token" and others, as far as the file has them.
        ids: of the tokens.
        is_roberta: two SEP are between the texts of a pair, and no text is of a second type.
    """
    wants = {
        part: meta.raw.get(f"tokenizer.ggml.add_{part}_token", default)
        for part, default in (("bos", True), ("eos", True), ("sep", False))
    }
    first = special.get("cls_token", special.get("bos_token")) if wants["bos"] else None
    wants_last = wants["eos"] or wants["sep"]
    last = special.get("sep_token", special.get("eos_token")) if wants_last else None
    if first is None and last is None:
        return None

    def token(text: str | None, type_id: int = 0) -> list[dict[str, Any]]:
        return [] if text is None else [{"SpecialToken": {"id": text, "type_id": type_id}}]

    single = [*token(first), {"Sequence": {"id": "A", "type_id": 0}}, *token(last)]
    second = 0 if is_roberta else 1
    between = token(last) if is_roberta else []
    behind = [{"Sequence": {"id": "B", "type_id": second}}, *token(last, second)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *between, *behind],
        "special_tokens": {
            text: {"id": text, "ids": [ids[text]], "tokens": [text]}
            for text in (first, last)
            if text is not None
        },
    }
