"""Which tokens end a text: the first of generation config, config and tokenizer that says so.

Must not know files or formats.
"""

import json
from collections.abc import Callable, Iterable
from typing import Any

from engine_core.model_files.interface import TokenizerFiles


def resolve_eos_token_ids(
    configs: Iterable[dict[str, Any]], tokenizer: Callable[[], TokenizerFiles | None]
) -> tuple[int, ...]:
    """Ids of `eos_token_id` in the first config that has it, else of the tokenizer's eos_token.

    Args:
        configs: in order of precedence.
        tokenizer: asked only if no config answers.
    """
    for config in configs:
        value = config.get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        numbers = tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and i >= 0))
        if numbers:
            return numbers
    files = tokenizer()
    eos_token = files.special_tokens.get("eos_token") if files is not None else None
    if files is None or eos_token is None:
        return ()
    eos_id = _token_id(json.loads(files.tokenizer_json), eos_token)
    return () if eos_id is None else (eos_id,)


def _token_id(tokenizer: dict[str, Any], token: str) -> int | None:
    for added in tokenizer.get("added_tokens", ()):
        if added["content"] == token:
            return int(added["id"])
    vocab = tokenizer["model"].get("vocab", {})
    if isinstance(vocab, dict):
        return vocab.get(token)
    return next((i for i, (text, _) in enumerate(vocab) if text == token), None)
