"""The tokenizer of a GGUF file as one tokenizer.json.

Owns special tokens, the ends of a text and the choice of vocabulary kind. Built from the metadata
with neither transformers (3 s to import) nor a `tokenizers` object (the JSON is what a client
needs). Must not know tensors.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from engine_core.model_files.errors import BrokenModelFile, UnsupportedModelFile
from engine_core.model_files.gguf.byte_level import byte_level_json
from engine_core.model_files.gguf.metadata import GgufMetadata
from engine_core.model_files.gguf.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from engine_core.model_files.gguf.sentencepiece import respell_gemma, sentencepiece_json
from engine_core.model_files.interface import TokenizerFiles

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_SPECIAL_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Ends of a turn or of a text that converters leave out of the metadata; llama.cpp knows them by
# their text as well. Only tokens of type control count.
_END_TEXTS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>")
_SLOW_VOCABULARY = 100_000


def end_token_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Tokens that end a text: the stated ones first, then known ends of a turn."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    types = metadata.get("tokenizer.ggml.token_type") or []
    stated = [metadata.get(f"tokenizer.ggml.{key}") for key in _END_IDS]
    control = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind == _CONTROL
    }
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
    if kind in (None, "none") or not tokens:
        return None
    if len(tokens) > _SLOW_VOCABULARY:
        report(f"building the tokenizer ({len(tokens)} tokens)")
    if kind == "gpt2":
        pre_tokenizer = _pre_tokenizer(meta)
        merges = metadata.get("tokenizer.ggml.merges") or []
        body = byte_level_json(meta.file, tokens, merges, pre_tokenizer)
        add_bos = pre_tokenizer.add_bos
    elif kind == "llama":
        is_gemma = meta.architecture.startswith("gemma")
        tokens = respell_gemma(tokens) if is_gemma else tokens
        scores = metadata.get("tokenizer.ggml.scores")
        if not is_gemma and (scores is None or len(scores) != len(tokens)):
            raise BrokenModelFile(
                f"{meta.file}: {len(tokens)} tokens have {len(scores or ())} scores; convert the "
                f"model again, or name a tokenizer with --tokenizer"
            )
        body = sentencepiece_json(
            tokens,
            None if is_gemma else scores,
            unk_token=_special_tokens(meta, tokens).get("unk_token"),
            is_gemma=is_gemma,
            add_space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        )
        add_bos = True
    else:
        raise UnsupportedModelFile(
            f"{meta.file} has a tokenizer of kind {kind!r}; gpt2 and llama are read; name the "
            f"model's Hugging Face folder, or its tokenizer.json, with --tokenizer"
        )
    special = _special_tokens(meta, tokens)
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, tokens, special),
        "post_processor": _ends(metadata, special, add_bos=add_bos),
        **body,
    }
    template = metadata.get("tokenizer.chat_template")
    return TokenizerFiles(
        msgspec.json.encode(document),
        template if isinstance(template, str) else None,
        special,
    )


def _pre_tokenizer(meta: GgufMetadata) -> PreTokenizer:
    name = meta.raw.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelFile(
            f"{meta.file} cuts text by the rule {name!r}, which is not known here; name the "
            f"model's Hugging Face folder, or its tokenizer.json, with --tokenizer"
        )
    return PRE_TOKENIZERS[name]


def _special_tokens(meta: GgufMetadata, tokens: list[str]) -> dict[str, str]:
    special: dict[str, str] = {}
    for ours, key in _SPECIAL_IDS.items():
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
    metadata: dict[str, Any], tokens: list[str], special: dict[str, str]
) -> list[dict[str, Any]]:
    """Tokens found whole in a text before it is cut: control, user-defined, and the named ones.

    Left out: all but the last of several tokens spelled alike, which no text can reach, and Gemma's
    runs of spaces, which merges make.
    """
    kinds = dict(enumerate(metadata.get("tokenizer.ggml.token_type") or []))
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    for text in special.values():
        kinds[vocab[text]] = _CONTROL
    return [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kinds[token_id] == _CONTROL,
        }
        for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"])
        if kinds.get(token_id) in (_CONTROL, _USER_DEFINED) and vocab.get(token) == token_id
    ]


def _ends(
    metadata: dict[str, Any], special: dict[str, str], *, add_bos: bool
) -> dict[str, Any] | None:
    """The post-processor that puts BOS before a text and EOS behind it, where wanted."""
    wants = {
        "bos_token": metadata.get("tokenizer.ggml.add_bos_token", add_bos),
        "eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    bos, eos = (special.get(key) if wants[key] else None for key in wants)
    if bos is None and eos is None:
        return None

    def around(*sequences: str) -> list[dict[str, Any]]:
        pieces: list[dict[str, Any]] = []
        for type_id, sequence in enumerate(sequences):
            text = {"Sequence": {"id": sequence, "type_id": type_id}}
            first = {"SpecialToken": {"id": bos, "type_id": type_id}}
            last = {"SpecialToken": {"id": eos, "type_id": type_id}}
            pieces += [*([first] if bos else []), text, *([last] if eos else [])]
        return pieces

    ids = {
        special[key]: metadata[f"tokenizer.ggml.{_SPECIAL_IDS[key]}"]
        for key in wants
        if wants[key] and key in special
    }
    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": around("A", "B"),
        "special_tokens": {
            text: {"id": text, "ids": [token_id], "tokens": [text]}
            for text, token_id in ids.items()
        },
    }
