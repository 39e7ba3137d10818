"""The tokenizer of a Hugging Face folder as one JSON that encodes as transformers does. Tokens
that transformers adds from `tokenizer_config.json` are written into it; `add_bos_token` and
`add_eos_token` are ignored beside a tokenizer.json, as transformers ignores them."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from engine_core.model_files.errors import BrokenModelFile
from engine_core.model_files.interface import TokenizerFiles, default_template
from engine_core.model_files.json_file import read_json_object_if_present

logger = logging.getLogger(__name__)

SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "pad_token")
_LARGEST_ID = 1 << 24
_TEMPLATES = "additional_chat_templates"
_OTHER_SPECIAL_KEYS = ("sep_token", "cls_token", "mask_token")
_SLOW_TOKENIZER_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "tekken.json",
    "vocab.txt",
)


def tokenizer_files(folder: Path) -> tuple[Path, ...]:
    """The files that decide how text becomes tokens, for a fingerprint."""
    names = (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "chat_template.json",
        "merges.txt",
        *_SLOW_TOKENIZER_FILES,
    )
    found = [folder / name for name in names if (folder / name).is_file()]
    return (*found, *sorted((folder / _TEMPLATES).glob("*.jinja")))


def read_folder_tokenizer(folder: Path) -> TokenizerFiles | None:
    """The folder's tokenizer, or None where it holds none.
    Raises BrokenModelFile: a tokenizer file is there and makes no sense; OSError: or may not be
    read."""
    config = read_json_object_if_present(folder / "tokenizer_config.json")
    special_map = read_json_object_if_present(folder / "special_tokens_map.json")
    merged = {**special_map, **{k: v for k, v in config.items() if v is not None}}
    if (folder / "tokenizer.json").is_file():
        tokenizer_json = _complete_json(folder / "tokenizer.json", merged)
    elif any((folder / name).is_file() for name in _SLOW_TOKENIZER_FILES):
        tokenizer_json = _converted_by_transformers(folder)
    else:
        return None
    special_tokens = {
        key: text for key in SPECIAL_TOKEN_KEYS if (text := _text(merged.get(key))) is not None
    }
    template, others = default_template(_chat_templates(folder, config))
    if template is None and (folder / "tekken.json").is_file():
        template = _template_of_mistral(folder / "tekken.json")
    return TokenizerFiles(tokenizer_json, template, special_tokens, others)


def _text(token: Any) -> str | None:
    """A special token is a string, or an object with "content"."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _added(token: Any) -> AddedToken | None:
    if isinstance(token, str):
        return AddedToken(token, special=True, normalized=False)
    if not isinstance(token, dict) or not isinstance(token.get("content"), str):
        return None
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(token["content"], **{k: bool(token[k]) for k in flags if k in token})


def _complete_json(file: Path, merged: dict[str, Any]) -> bytes:
    raw = file.read_bytes()
    try:
        tokenizer = Tokenizer.from_str(raw.decode("utf-8"))
    except BaseException as error:  # `tokenizers` raises bare Exception, and panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise BrokenModelFile(
            f"{file} is not a tokenizer that `tokenizers` reads ({error}); download it again, or "
            f"name another with --tokenizer"
        ) from error
    # transformers cuts and pads only when a caller asks, whatever the file has enabled
    changed = tokenizer.truncation is not None or tokenizer.padding is not None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    changed |= _add_missing_tokens(tokenizer, merged, file.parent)
    if not changed:
        return raw
    if (largest := max(tokenizer.get_vocab().values(), default=0)) > _LARGEST_ID:
        raise BrokenModelFile(  # `tokenizers` writes a vocabulary by counting up to it
            f"{file} has a token of id {largest}, the limit is {_LARGEST_ID}; download it again"
        )
    return tokenizer.to_str().encode()


def _is_id(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


def _add_missing_tokens(tokenizer: Tokenizer, merged: dict[str, Any], folder: Path) -> bool:
    """Add what the config names and the JSON lacks, in transformers' order. True if any."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    decoder = merged.get("added_tokens_decoder") or {}
    extra = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    if not isinstance(decoder, dict) or not all(map(_is_id, decoder)):
        raise BrokenModelFile(
            f"{folder}: added_tokens_decoder is not an object by token ids; download "
            "tokenizer_config.json again"
        )
    if not isinstance(extra, dict | list):
        raise BrokenModelFile(
            f"{folder}: additional special tokens are {type(extra).__name__}, not a list; download "
            "tokenizer_config.json again"
        )
    by_id = sorted(decoder.items(), key=lambda item: int(item[0]))
    special = [merged.get(key) for key in (*SPECIAL_TOKEN_KEYS, *_OTHER_SPECIAL_KEYS)]
    special += list(extra.values() if isinstance(extra, dict) else extra)
    missing: list[AddedToken] = []
    for value, is_special in [(v, False) for _, v in by_id] + [(v, True) for v in special]:
        token = _added(value)
        if token is None or token.content in known:
            continue
        token.special = token.special or is_special
        known.add(token.content)
        missing.append(token)
    if missing:
        tokenizer.add_tokens(missing)
    return bool(missing)


def _converted_by_transformers(folder: Path) -> bytes:
    from transformers import AutoTokenizer  # 3 s: only where nothing else serves

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, mistral_format=False
        )
        return str(tokenizer.backend_tokenizer.to_str()).encode()
    except Exception as error:  # of many kinds, one for each missing package or odd file
        raise BrokenModelFile(
            f"{folder} has no tokenizer.json, and transformers cannot convert its tokenizer "
            f"({error}); name one that has a tokenizer.json with --tokenizer"
        ) from error


def _template_of_mistral(file: Path) -> str | None:
    try:
        from mistral_common.integrations.chat_templates import chat_templates

        made = chat_templates.convert_tokenizer_to_chat_template(
            file, use_special_token_variables=False
        )
        return str(made)
    except Exception as error:  # of many kinds: the package is missing, old, or knows no such file
        logger.warning(
            "%s has no chat template, and mistral-common makes none (%s); pip install "
            "engine-core[mistral], or give requests a chat_template",
            file.parent,
            error,
        )
        return None


def _chat_templates(folder: Path, config: dict[str, Any]) -> Mapping[str, object]:
    """Chat templates by name. Files of their own go before those of a config."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / _TEMPLATES).glob("*.jinja"))}
    found: dict[str, object] = {}
    for name, file in files.items():
        try:
            if file.is_file():
                found[name] = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BrokenModelFile(f"{file} cannot be read ({error}); check it") from error
    if found:
        return found
    legacy = read_json_object_if_present(folder / "chat_template.json")
    given = config.get("chat_template") or legacy.get("chat_template")
    if isinstance(given, list):
        entries = [entry for entry in given if isinstance(entry, dict)]
        return {str(entry.get("name")): entry.get("template") for entry in entries}
    return given if isinstance(given, dict) else {"default": given}
