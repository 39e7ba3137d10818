"""English text that every machine has, and its tokens."""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path
from typing import TYPE_CHECKING

from engine_core.model_files import ModelFilesError, open_model_files

if TYPE_CHECKING:
    import tokenizers


def english_text(path: Path | None = None) -> str:
    """The file's text; without one, the reference of the Python language that comes with Python.
    Raises ValueError: the file is empty or cannot be read as UTF-8."""
    if path is None:
        topics = pydoc_data.topics.topics
        return "\n".join(topics[name] for name in sorted(topics))
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as text: {error}; give another file") from error
    if not text.strip():
        raise ValueError(f"{path} is empty; give a text to cut prompts from")
    return text


def tokens_of(text: str, model: str) -> list[int]:
    """The model's tokens, without special ones at the ends. Raises ValueError: the model has no
    tokenizer, or cannot be opened."""
    return list(_tokenizer_of(model).encode(text, add_special_tokens=False).ids)


def prefix_of(model: str) -> list[int]:
    """The special tokens that the model's tokenizer begins a text with; often none or one."""
    backend = _tokenizer_of(model)
    plain, whole = (backend.encode("a", add_special_tokens=also).ids for also in (False, True))
    return list(whole[: whole.index(plain[0])])


def _tokenizer_of(model: str) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        found = open_model_files(model, report=lambda _line: None).tokenizer()
    except ModelFilesError as error:
        raise ValueError(str(error)) from error
    if found is None:
        raise ValueError(f"{model} has no tokenizer to cut a text with; give another model")
    backend = tokenizers.Tokenizer.from_str(found.tokenizer_json.decode())
    backend.no_truncation()
    return backend
