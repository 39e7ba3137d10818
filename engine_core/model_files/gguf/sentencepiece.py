"""A SentencePiece vocabulary of a GGUF file (`tokenizer.ggml.model` "llama") as tokenizer.json.

SentencePiece joins the two neighbours that make the piece of the best score; BPE joins the pair of
the lowest merge rank. So every way to cut a piece in two that are pieces becomes a merge, ranked by
the piece's score, as transformers' `generate_merges` does. Must not know special tokens.
"""

import re
from collections.abc import Sequence
from typing import Any

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's visible space
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def respell_gemma(tokens: list[str]) -> list[str]:
    """Gemma's tokens of several spaces are stored as spaces; the model spells them visibly."""
    return [_SPACE * len(t) if " " in t and not t.strip(" ") else t for t in tokens]


def sentencepiece_json(
    tokens: list[str],
    scores: Sequence[float] | None,
    *,
    unk_token: str | None,
    is_gemma: bool,
    add_space_prefix: bool,
) -> dict[str, Any]:
    """model, normalizer, pre_tokenizer and decoder of the tokenizer.json.

    Args:
        tokens: by id, spaces visible.
        scores: by id, greater is joined first; None: the order of the ids (Gemma, whose scores do
            not follow its merges).
        is_gemma: spaces are made visible before the text is cut, not after.
        add_space_prefix: a text begins as if with a space.
    """
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    ranks = scores if scores is not None else [-float(i) for i in range(len(tokens))]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any]
    if is_gemma:
        normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        pre_tokenizer = {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        }
    else:
        pre_tokenizer = {
            "type": "Metaspace",
            "replacement": _SPACE,
            "prepend_scheme": "first" if add_space_prefix else "never",
            "split": False,
        }
        if add_space_prefix:
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unk_token,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": any(map(_BYTE_TOKEN.fullmatch, tokens[:1024])),
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(tokens, ranks, vocab),
        },
    }


def _merges(
    tokens: list[str], ranks: Sequence[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Every cut of a token into two tokens: best score, then longest left, then longest right."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, rank in zip(tokens, ranks, strict=True):
        cuts = [
            (vocab[token[:cut]], vocab[token[cut:]], cut)
            for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab
        ]
        for _, _, cut in sorted(cuts):
            found.append((rank, cut, len(token) - cut, token[:cut], token[cut:]))
    # stable, also reversed: equal ones keep the order of their ids
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in found]
