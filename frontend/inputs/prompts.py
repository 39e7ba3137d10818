"""The forms of a prompt, from vLLM's types to its parts."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict

from frontend.errors import InvalidInput
from frontend.inputs.encoder_prompts import EncoderDecoderPrompt
from frontend.sampling_params import as_invalid_input
from protocol.requests import check_name

if TYPE_CHECKING:
    from frontend.multimodal.inputs import MultiModalPrompt

_NOT_TEXT = ("prompt_token_ids", "prompt_embeds", "multi_modal_data", "multimodal")
_KNOWN_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    multi_modal_data: NotRequired[Mapping[str, Any]]
    """{"image": one or several, "audio": one or several}; the text has a placeholder for each."""
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is only reported back."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]
    multimodal: NotRequired["MultiModalPrompt"]
    """`multi_modal_data`, processed: of `InputProcessor.with_media`."""
    cache_salt: NotRequired[str]


class InfillPrompt(TypedDict):
    """The text before a gap that is to be filled and the text behind it, for models with tokens for
    that (Qwen-Coder, StarCoder, CodeLlama, Codestral ...). Special tokens in the texts are text."""

    prompt: str
    suffix: str
    prompt_token_ids: NotRequired[list[int]]
    """The tokens of both texts, as `InputProcessor.tokenized` gives them."""
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """Hidden states in place of tokens, or of some of them; `prompt` is only reported back."""

    prompt_embeds: Any
    """[positions, hidden size] in float32, float16 or bfloat16: an array of numpy or torch."""
    prompt_token_ids: NotRequired[list[int]]
    prompt_is_token_ids: NotRequired[list[bool]]
    """Of each of `prompt_token_ids` whether it is one; else the next row stands there, or, if there
    are as many rows as ids, its own."""
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


PromptInput = (
    str
    | Sequence[int]
    | TextPrompt
    | TokensPrompt
    | InfillPrompt
    | EmbedsPrompt
    | EncoderDecoderPrompt
)
"""One prompt."""
PromptsInput = PromptInput | Sequence[PromptInput]
"""One prompt or several."""

ChatMessage = Mapping[str, Any]


class PooledPrompt(NamedTuple):
    """A prompt for a vector, a class or a score. `second`: where the second text begins."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None
    second: int | None


def has_data(prompt: object) -> bool:
    """Whether it takes long to decode."""
    return isinstance(prompt, Mapping) and bool(
        prompt.get("multi_modal_data") or has_data(prompt.get("encoder_prompt"))
    )


def chars_of(prompt: object) -> int:
    """Characters that are to be turned into tokens, without those beside images and sounds."""
    if isinstance(prompt, Mapping):
        if any(prompt.get(key) is not None for key in _NOT_TEXT):
            return 0
        prompt = (prompt.get("prompt"), prompt.get("suffix"))
    if isinstance(prompt, tuple):  # of texts, as one prompt
        return sum(map(chars_of, prompt))
    return len(prompt) if isinstance(prompt, str) else 0


def chat_chars(messages: object) -> int:
    """Of the texts of a conversation, whatever its template adds or leaves out."""
    number = 0
    for message in messages if isinstance(messages, list | tuple) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = content if isinstance(content, list | tuple) else [{"text": content}]
        texts = (part.get("text") for part in parts if isinstance(part, Mapping))
        number += sum(len(text) for text in texts if isinstance(text, str))
    return number


def split_prompts(prompts: object) -> list[object]:
    """A list of single prompts from one prompt or several, unchecked.
    Raises InvalidInput: neither."""
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


def one_salt(own: str | None, beside: str | None, name: str) -> str | None:
    """The one salt of a prompt that has its own and one given beside it."""
    beside = _checked_salt(beside, name)
    if own is not None and beside not in (None, own):
        raise InvalidInput(
            f"{name} has cache_salt {own!r}, and {beside!r} was given beside it; give one of them"
        )
    return beside if own is None else own


def _checked_salt(salt: object, name: str) -> str | None:
    if salt is None:
        return None
    if isinstance(salt, str) and salt:
        with as_invalid_input():
            check_name(f"cache_salt of {name}", salt)
        return salt
    raise InvalidInput(f"cache_salt of {name} is {salt!r}, it must be a non-empty string")


def parse_prompt(prompt: object, name: str) -> tuple[str | None, list[int] | None, str | None]:
    """Text, token ids and cache salt of a prompt in any of its forms."""
    if isinstance(prompt, str):
        return prompt, None, None
    if not isinstance(prompt, Mapping):
        return None, _token_ids(prompt, name), None
    unknown = [key for key in prompt if key not in _KNOWN_KEYS and prompt[key] is not None]
    if unknown:
        raise InvalidInput(
            f"{name} has {unknown[0]!r}, which this engine does not support; known are "
            f"{sorted(_KNOWN_KEYS)}"
        )
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise InvalidInput(f"{name} has neither 'prompt' nor 'prompt_token_ids'; give one")
    if text is not None and not isinstance(text, str):
        raise InvalidInput(f"the text of {name} is of type {type(text).__name__}, it must be str")
    if token_ids is not None:
        token_ids = _token_ids(token_ids, name)
    return text, token_ids, _checked_salt(prompt.get("cache_salt"), name)


def _token_ids(token_ids: object, name: str) -> list[int]:
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, str | bytes | bytearray):
        raise InvalidInput(
            f"{name} is of type {type(token_ids).__name__}; give a string, a list of token ids, or "
            "a dictionary with 'prompt' or 'prompt_token_ids'"
        )
    if set(map(type, token_ids)) == {int}:
        return list(token_ids)
    for token_id in token_ids:
        if not _is_whole(token_id):
            raise InvalidInput(f"{name} holds {token_id!r}, token ids must be whole numbers")
    return list(token_ids)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
