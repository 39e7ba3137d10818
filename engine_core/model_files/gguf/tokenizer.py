"""The tokenizer of a GGUF file as one tokenizer.json, built from the metadata alone: transformers
takes 3 s to import, and a client needs nothing but the JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine_core.model_files.errors import BrokenModelFile, UnsupportedModelFile
from engine_core.model_files.gguf.config import CONTROL, USER_DEFINED, GgufMetadata
from engine_core.model_files.gguf.encoder_tokenizer import (
    encoder_ends,
    respell_words,
    unigram_json,
    word_pieces_json,
)
from engine_core.model_files.gguf.pre_tokenizers import (
    PRE_TOKENIZERS,
    SENTENCEPIECE_LIKE,
    PreTokenizer,
    byte_level,
)
from engine_core.model_files.interface import TokenizerFiles, default_template

_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENCODER_IDS = {
    "cls_token": "cls_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
}
_FIM_IDS = {
    f"fim_{role}_token": f"fim_{role}_token_id"
    for role in ("pre", "suf", "mid", "pad", "rep", "sep")
}
_OLD_FIM_IDS = {
    "fim_pre_token": "prefix_token_id",
    "fim_suf_token": "suffix_token_id",
    "fim_mid_token": "middle_token_id",
}
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Ends of a turn or of a text that converters leave out of the metadata; llama.cpp knows them by
# their text as well. Only tokens of type control count.
_END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>"),
    *("<turn|>", "<|tool_response>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    *("<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>", "[e~["),
    "<\N{FULLWIDTH VERTICAL LINE}end\u2581of\u2581sentence\N{FULLWIDTH VERTICAL LINE}>",
)
_INNER_END = "<|end|>"
_OUTER_ENDS = ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})
"""Of models whose answers are several messages: with one of these pairs (gpt-oss, Solar Open)
`_INNER_END` ends a message, not the answer."""
_SHOWN_ENDS = ("<|tool_response>",)
"""What Gemma 4 ends a turn with when it wants an answer; converters call it user-defined."""
_PHI3_WITHOUT_SPACE = ("<unk>", "<s>", "<|endoftext|>")
_SLOW_VOCABULARY = 100_000


def end_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Tokens that end a text: the stated ones first, then known ends of a turn."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    types = metadata.get("tokenizer.ggml.token_type") or []
    stated = [metadata.get(f"tokenizer.ggml.{key}") for key in _END_IDS]
    control = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == CONTROL or token in _SHOWN_ENDS
    }
    if any(pair <= control.keys() for pair in _OUTER_ENDS):
        control.pop(_INNER_END, None)
    by_text = [control.get(text) for text in _END_TEXTS]
    return tuple(dict.fromkeys(i for i in stated + by_text if i is not None))


def build_tokenizer(meta: GgufMetadata, *, report: Callable[[str], None]) -> TokenizerFiles | None:
    """The file's tokenizer, or None where it has none.

    Raises:
        BrokenModelFile: the vocabulary contradicts itself.
        UnsupportedModelFile: a kind of vocabulary, or a way to cut text, that is not read.
    """
    metadata = meta.raw
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] | None = metadata.get("tokenizer.ggml.tokens")
    if kind in (None, "none", "no_vocab") or not tokens:
        return None
    if len(tokens) > _SLOW_VOCABULARY:
        report(f"building the tokenizer ({len(tokens)} tokens)")
    is_gemma = kind in ("llama", "gemma4") and meta.architecture.startswith("gemma")
    is_gemma |= kind == "gpt2" and metadata.get("tokenizer.ggml.pre") in SENTENCEPIECE_LIKE
    if is_gemma:
        tokens = _respell_gemma(tokens)
    elif kind == "bert":
        tokens = respell_words(tokens, metadata.get("tokenizer.ggml.token_type") or ())
    special = _special_tokens(meta, tokens)
    if kind == "gpt2" and not is_gemma:
        pre_tokenizer = _pre_tokenizer(meta, report)
        body = _byte_level_json(meta, tokens, pre_tokenizer)
        add_bos = pre_tokenizer.add_bos
    elif kind == "llama" or is_gemma:
        body = _sentencepiece_json(meta, tokens, special.get("unk_token"), is_gemma=is_gemma)
        add_bos = True
    elif kind == "bert" and meta.family.is_encoder:
        body, add_bos = word_pieces_json(meta, tokens), True
    elif kind == "t5" and meta.family.is_encoder:
        body, add_bos = unigram_json(meta, tokens), True
    else:
        raise UnsupportedModelFile(
            f"{meta.file} has a tokenizer of kind {kind!r}; gpt2, llama and gemma4 are read, and "
            f"bert and t5 of encoders; name the model's Hugging Face folder, or its "
            f"tokenizer.json, with --tokenizer"
        )
    ends = _ends(metadata, special, add_bos=add_bos)
    if meta.family.is_encoder:
        is_roberta = kind == "t5" or metadata.get("tokenizer.ggml.pre") == "roberta-bpe"
        ids = {token: token_id for token_id, token in enumerate(tokens)}
        ends = encoder_ends(meta, special, ids, is_roberta=is_roberta)
    document = {
        "version": "1.0",
        "added_tokens": _added_tokens(meta, tokens, special),
        "post_processor": ends,
        **body,
    }
    key = "tokenizer.chat_template"
    named = {"default": metadata.get(key)}
    named |= {k.removeprefix(f"{key}."): metadata[k] for k in metadata if k.startswith(f"{key}.")}
    template, others = default_template(named)
    shown = {key: text for key, text in special.items() if key not in _ENCODER_IDS}
    return TokenizerFiles(msgspec.json.encode(document), template, shown, others)


def _pre_tokenizer(meta: GgufMetadata, report: Callable[[str], None]) -> PreTokenizer:
    """The file's rule. One that names none, as before May 2024, is read by the rule that bears its
    architecture's name (qwen2), or else by GPT-2's, which may not be its own."""
    name = meta.raw.get("tokenizer.ggml.pre", "default")
    if name == "default":
        name = meta.architecture if meta.architecture in PRE_TOKENIZERS else "gpt-2"
        report(
            f"{meta.file} does not say how text is cut (tokenizer.ggml.pre); the rule of {name} is "
            f"used; convert it again, or name a tokenizer with --tokenizer"
        )
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelFile(
            f"{meta.file} cuts text by the rule {name!r}, which is not known here; name the "
            f"model's Hugging Face folder, or its tokenizer.json, with --tokenizer"
        )
    return PRE_TOKENIZERS[name]


def _special_tokens(meta: GgufMetadata, tokens: list[str]) -> dict[str, str]:
    special: dict[str, str] = {}
    known = _SPECIAL_IDS | _FIM_IDS | (_ENCODER_IDS if meta.family.is_encoder else {})
    for ours, key in (*_OLD_FIM_IDS.items(), *known.items()):
        token_id = meta.raw.get(f"tokenizer.ggml.{key}")
        if token_id is None:
            continue
        if not 0 <= token_id < len(tokens):
            raise BrokenModelFile(
                f"{meta.file}: {key} is {token_id}, the vocabulary has {len(tokens)} tokens; "
                f"convert the model again, or name a tokenizer with --tokenizer"
            )
        special[ours] = tokens[token_id]
    return special


def _added_tokens(
    meta: GgufMetadata, tokens: list[str], special: dict[str, str]
) -> list[dict[str, Any]]:
    """Tokens found whole in a text before it is cut: control, user-defined, and the named ones.
    What files do not say: but for BERT's the one for masked words takes the space before it, and
    Phi-3's take the space behind them.

    Left out: all but the last of several tokens spelled alike, which no text can reach, and Gemma's
    runs of spaces, which merges make."""
    metadata = meta.raw
    is_bert = metadata["tokenizer.ggml.model"] == "bert"
    is_phi3 = metadata["tokenizer.ggml.model"] == "llama" and meta.architecture == "phi3"
    kinds = dict(enumerate(metadata.get("tokenizer.ggml.token_type") or []))
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    for text in special.values():
        kinds[vocab[text]] = CONTROL
    mask = None if is_bert else special.get("mask_token")
    return [
        {
            "id": token_id,
            "content": token,
            **dict.fromkeys(("single_word", "normalized"), False),
            "lstrip": token == mask,
            "rstrip": is_phi3 and token not in _PHI3_WITHOUT_SPACE,
            "special": kinds[token_id] == CONTROL,
        }
        for token_id, token in enumerate(tokens if is_bert else metadata["tokenizer.ggml.tokens"])
        if kinds.get(token_id) in (CONTROL, USER_DEFINED) and vocab.get(token) == token_id
    ]


def _ends(
    metadata: dict[str, Any], special: dict[str, str], *, add_bos: bool
) -> dict[str, Any] | None:
    """The post-processor that puts BOS before a text and EOS behind it, where wanted."""
    wants = {
        "bos_token": metadata.get("tokenizer.ggml.add_bos_token", add_bos),
        "eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ends = {key: special[key] for key in wants if wants[key] and key in special}
    if not ends:
        return None

    def around(*sequences: str) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        for type_id, sequence in enumerate(sequences):
            text = {"Sequence": {"id": sequence, "type_id": type_id}}
            bos, eos = (
                [{"SpecialToken": {"id": ends[key], "type_id": type_id}}] if key in ends else []
                for key in wants
            )
            pieces += [*bos, text, *eos]
        return pieces

    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A", "B"),
        "special_tokens": {
            text: {
                "id": text,
                "ids": [metadata[f"tokenizer.ggml.{_SPECIAL_IDS[key]}"]],
                "tokens": [text],
            }
            for key, text in ends.items()
        },
    }


# ---------------------------------------------------------------------- byte-level BPE ("gpt2")


def _byte_level_json(
    meta: GgufMetadata, tokens: list[str], pre_tokenizer: PreTokenizer
) -> dict[str, Any]:
    """model, normalizer, pre_tokenizer and decoder of the tokenizer.json, for tokens that are
    spelled in GPT-2's byte alphabet. Merges are "left right", best first."""
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    return {
        "normalizer": {"type": "NFC"} if pre_tokenizer.normalize_nfc else None,
        "pre_tokenizer": pre_tokenizer.to_json(),
        "decoder": byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "ignore_merges": pre_tokenizer.ignore_merges,
            "vocab": vocab,
            "merges": _written_merges(meta, vocab),
        },
    }


def _written_merges(meta: GgufMetadata, vocab: dict[str, int]) -> list[tuple[str, str]]:
    """The file's merges, best first.
    Raises BrokenModelFile: one needs a token that is not there."""
    pairs: list[tuple[str, str]] = []
    for merge in meta.raw.get("tokenizer.ggml.merges") or ():
        left, _, right = merge.partition(" ")
        if left + right not in vocab or left not in vocab or right not in vocab:
            raise BrokenModelFile(
                f"{meta.file}: merge {merge!r} needs tokens that are not in the vocabulary; "
                f"convert the model again, or name a tokenizer with --tokenizer"
            )
        pairs.append((left, right))
    return pairs


# ---------------------------------------------------------------------- SentencePiece ("llama")


_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's visible space
_MISTRAL_V3 = "[INST]"  # a token of that vocabulary alone
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def _respell_gemma(tokens: list[str]) -> list[str]:
    """Gemma's tokens of several spaces are stored as spaces; the model spells them visibly."""
    return [_SPACE * len(t) if " " in t and not t.strip(" ") else t for t in tokens]


def _sentencepiece_json(
    meta: GgufMetadata, tokens: list[str], unk_token: str | None, *, is_gemma: bool
) -> dict[str, Any]:
    """model, normalizer, pre_tokenizer and decoder of the tokenizer.json, for tokens with visible
    spaces. What has the greater score is joined first; with Gemma, whose scores do not follow its
    merges, what has the smaller id, or as its file says. Gemma makes spaces visible before it cuts
    a text, not after.

    A space comes before each text between added tokens, also before one that begins with a space
    (Llama 2, Phi-3, TinyLlama); with Mistral's third vocabulary only before the first one, if it
    has none."""
    scores = meta.raw.get("tokenizer.ggml.scores")
    if is_gemma:
        scores = [-float(token_id) for token_id in range(len(tokens))]
    elif scores is None or len(scores) != len(tokens):
        raise BrokenModelFile(
            f"{meta.file}: {len(tokens)} tokens have {len(scores or ())} scores; convert the "
            f"model again, or name a tokenizer with --tokenizer"
        )
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    visible = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    if is_gemma:
        normalizer = visible
        pre_tokenizer = {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        }
    else:
        add_space_prefix = bool(meta.raw.get("tokenizer.ggml.add_space_prefix", True))
        kinds = meta.raw.get("tokenizer.ggml.token_type") or []
        if add_space_prefix and (_MISTRAL_V3, CONTROL) not in zip(tokens, kinds, strict=False):
            prefix = {"type": "Prepend", "prepend": _SPACE}
            normalizer = {"type": "Sequence", "normalizers": [prefix, visible]}
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
            "unk_token": unk_token,
            "fuse_unk": True,
            "byte_fallback": any(map(_BYTE_TOKEN.fullmatch, tokens[:1024])),
            "vocab": vocab,
            "merges": _written_merges(meta, vocab) or _merges(tokens, scores, vocab),
        },
    }


def _merges(
    tokens: list[str], scores: Sequence[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Every cut of a token into two tokens: best score, then longest left, then longest right."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = [
            (vocab[token[:cut]], vocab[token[cut:]], cut)
            for cut in range(1, len(token))
            if token[:cut] in vocab and token[cut:] in vocab
        ]
        for _, _, cut in sorted(cuts):
            found.append((score, cut, len(token) - cut, token[:cut], token[cut:]))
    # stable, also reversed: equal ones keep the order of their ids
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in found]
