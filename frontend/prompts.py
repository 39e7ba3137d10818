"""The forms in which a caller may give a prompt, and the checks before it is sent.

Owns prompt parsing, tokenising and length. Must not know sampling or sockets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NotRequired, Protocol, TypedDict

from frontend.errors import InvalidInput


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is only reported back."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptInput = str | Sequence[int] | TextPrompt | TokensPrompt
"""One prompt."""
PromptsInput = PromptInput | Sequence[PromptInput]
"""One prompt or several."""

_KNOWN_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})


class Encoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt ready to send. `text` is None if only token ids were given."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Turns what callers give into `Prompt`s that this model can take."""

    encoder: Encoder | None
    max_model_len: int
    vocab_size: int

    def read(
        self, prompt: object, *, truncate_to: int | None = None, name: str = "prompt"
    ) -> Prompt:
        """One prompt, tokenised and checked.

        Args:
            truncate_to: keep the last so many tokens; -1 as many as the model takes; None all.
            name: what to call it in an error.

        Raises:
            InvalidInput: no known form, empty, too long, or ids outside the vocabulary.
        """
        text, token_ids, cache_salt = _parse(prompt, name)
        if token_ids is None:
            token_ids = self._encode(text, name)
        if not token_ids:
            raise InvalidInput(f"{name} is empty; give at least one token")
        if truncate_to is not None:
            kept = self.max_model_len - 1 if truncate_to == -1 else truncate_to
            token_ids = token_ids[-kept:]
        self._check(token_ids, name)
        return Prompt(text, token_ids, cache_salt)

    def _encode(self, text: str | None, name: str) -> list[int]:
        assert text is not None
        if self.encoder is None:
            raise InvalidInput(
                f"{name} is text, and the engine's model came without a tokenizer; send "
                "prompt_token_ids"
            )
        return self.encoder.encode(text)

    def _check(self, token_ids: list[int], name: str) -> None:
        limit = self.max_model_len - 1
        if len(token_ids) > limit:
            raise InvalidInput(
                f"{name} has {len(token_ids)} tokens, the limit is max_model_len - 1 = {limit}; "
                "shorten it, set truncate_prompt_tokens, or start the engine with a larger "
                "--max-model-len"
            )
        if min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise InvalidInput(
                f"{name} holds token id {wrong}, the vocabulary ends at {self.vocab_size - 1}; "
                "use this model's own tokenizer"
            )


def split_prompts(prompts: object) -> list[object]:
    """A list of single prompts from one prompt or several; their contents are not looked at.

    Raises:
        InvalidInput: neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise InvalidInput(
            f"prompts are of type {type(prompts).__name__}; give a string, token ids, a "
            "dictionary with 'prompt' or 'prompt_token_ids', or a list of those"
        )
    if prompts and all(_is_whole(item) for item in prompts):
        return [prompts]
    return list(prompts)


def with_cache_salt(prompt: Prompt, cache_salt: str | None, name: str = "prompt") -> Prompt:
    """The prompt with a salt that was given beside it.

    Raises:
        InvalidInput: no salt, or another one than the prompt's own.
    """
    cache_salt = _salt(cache_salt, name)
    if cache_salt is None or cache_salt == prompt.cache_salt:
        return prompt
    if prompt.cache_salt is not None:
        raise InvalidInput(
            f"{name} has cache_salt {prompt.cache_salt!r}, and {cache_salt!r} was given beside it; "
            "give one of them"
        )
    return replace(prompt, cache_salt=cache_salt)


def _salt(salt: object, name: str) -> str | None:
    if salt is None or (isinstance(salt, str) and salt):
        return salt
    raise InvalidInput(f"cache_salt of {name} is {salt!r}, it must be a non-empty string")


def _parse(prompt: object, name: str) -> tuple[str | None, list[int] | None, str | None]:
    if isinstance(prompt, str):
        return _text(prompt, name), None, None
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt, name)
    return None, _token_ids(prompt, name), None


def _parse_mapping(
    prompt: Mapping[object, object], name: str
) -> tuple[str | None, list[int] | None, str | None]:
    unknown = [key for key in prompt if key not in _KNOWN_KEYS and prompt[key] is not None]
    if unknown:
        raise InvalidInput(
            f"{name} has {unknown[0]!r}, which this engine does not support; known are "
            f"{sorted(_KNOWN_KEYS)}"
        )
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    salt = _salt(prompt.get("cache_salt"), name)
    if text is None and token_ids is None:
        raise InvalidInput(f"{name} has neither 'prompt' nor 'prompt_token_ids'; give one")
    return (
        None if text is None else _text(text, name),
        None if token_ids is None else _token_ids(token_ids, name),
        salt,
    )


def _text(text: object, name: str) -> str:
    if not isinstance(text, str):
        raise InvalidInput(f"the text of {name} is of type {type(text).__name__}, it must be str")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput(
            f"{name} holds half of a surrogate pair, which is not text; decode it again from its "
            "bytes"
        ) from None
    return text


def _token_ids(token_ids: object, name: str) -> list[int]:
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes | bytearray):
        raise InvalidInput(
            f"{name} is of type {type(token_ids).__name__}; give a string, a list of token ids, or "
            "a dictionary with 'prompt' or 'prompt_token_ids'"
        )
    for token_id in token_ids:
        if not _is_whole(token_id):
            raise InvalidInput(f"{name} holds {token_id!r}, token ids must be whole numbers")
    return list(token_ids)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
