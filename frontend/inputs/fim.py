"""Filling in the middle: prompts of a text before a gap and one behind it, by the tokens that a
family of models was trained with (`fim_formats.toml`), or that its file names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from frontend.errors import InvalidInput
from frontend.sampling_params import SamplingParams
from frontend.text.fim_formats import PREFIX, SUFFIX, format_rows, prompt_parts
from frontend.text.long_texts import LONG_CHARS, check_length
from frontend.text.token_pieces import Joining
from frontend.text.tokenizer import Tokenizer, needed
from protocol.outputs import ModelInfo

_STATED = ("fim_pre_token", "fim_suf_token", "fim_mid_token")
"""Special tokens that a model's file names; beside them there may be fim_pad, fim_rep, fim_sep."""
_OF_TEXT_AHEAD = "\N{WHITE SMILING FACE}"
"""SentencePiece puts a space before a text that begins with anything, so also before this one."""


@dataclass(frozen=True, slots=True)
class FimFormat:
    """How a model is asked to fill in.

    Attributes:
        begin: tokens that its tokenizer puts before any text.
        prompt: tokens, and `{prefix}` and `{suffix}` where these texts stand.
        repo, file: the tokens before the name of a repository, and of a file; None: it has none.
        stop_token_ids: tokens that end what is filled in, beside its ends of a text.
    """

    begin: tuple[int, ...]
    prompt: tuple[int | str, ...]
    repo: int | None
    file: int | None
    stop_token_ids: tuple[int, ...]

    def joined(
        self, prefix: Sequence[int], suffix: Sequence[int], before: Sequence[int] = ()
    ) -> list[int]:
        """The prompt's tokens. `before`: those of other files."""
        texts = {PREFIX: prefix, SUFFIX: suffix}
        token_ids = [*self.begin, *before]
        for part in self.prompt:
            token_ids += texts[part] if isinstance(part, str) else [part]
        return token_ids


def fim_format(tokenizer: Tokenizer, model: str) -> FimFormat:
    """The format of a model of this name. Raises InvalidInput: it has no such tokens."""
    stated = tokenizer.special_tokens
    wanted = {stated[name] for name in _STATED if name in stated}
    for row in format_rows().values():
        parts = prompt_parts(row["prompt"])
        tokens = set(parts) - {PREFIX, SUFFIX}
        is_stated = len(wanted) < len(_STATED) or tokens <= wanted
        if is_stated and row.get("named", "") in model.lower() and _ids(tokenizer, parts):
            return _of_row(tokenizer, parts, row)
    if len(wanted) == len(_STATED):
        pre, suf, mid = (stated[name] for name in _STATED)
        return _of_row(tokenizer, [pre, PREFIX, suf, SUFFIX, mid], {})
    raise InvalidInput(
        f"{model!r:.200} has no tokens for filling in; omit suffix, or serve a model that has"
    )


def _ids(tokenizer: Tokenizer, parts: Sequence[str]) -> tuple[int | str, ...] | None:
    """None: the vocabulary lacks one."""
    ids = tokenizer.backend.token_to_id
    found = tuple(part if part in (PREFIX, SUFFIX) else ids(part) for part in parts)
    return None if None in found else found  # type: ignore[return-value]


def _of_row(tokenizer: Tokenizer, parts: Sequence[str], row: Mapping[str, Any]) -> FimFormat:
    stated = tokenizer.special_tokens

    def known(name: str, texts: Sequence[str]) -> list[int]:
        given = [stated[name]] if name in stated else []
        found = map(tokenizer.backend.token_to_id, (*given, *texts))
        return [token_id for token_id in found if token_id is not None]

    prompt = _ids(tokenizer, parts)
    assert prompt is not None, "the file names tokens of its own vocabulary"
    repo, file = (
        known("fim_rep_token", row.get("repo", ())),
        known("fim_sep_token", row.get("file", ())),
    )
    ends = known("fim_pad_token", row.get("ends", ()))
    own = [part for part in prompt if isinstance(part, int)]
    return FimFormat(
        begin=tokenizer.ids_before_text,
        prompt=prompt,
        repo=next(iter(repo), None),
        file=next(iter(file), None),
        stop_token_ids=tuple(dict.fromkeys([*own, *repo, *file, *ends])),
    )


def text_ids(tokenizer: Tokenizer, text: str, *, goes_on: bool = False) -> list[int]:
    """Tokens of a text that stands within such a prompt, in which special tokens are text.
    `goes_on`: no space of SentencePiece's stands before it.
    Raises InvalidInput, TypeError: see `Tokenizer.encode`."""
    if goes_on and tokenizer.pieces.joining is not Joining.BYTE_LEVEL:
        ahead = tokenizer.encode_as_text(_OF_TEXT_AHEAD)
        token_ids = tokenizer.encode_as_text(_OF_TEXT_AHEAD + text)
        if token_ids[: len(ahead)] == ahead:
            return token_ids[len(ahead) :]
    return tokenizer.encode_as_text(text)


def fim_prompt(
    prompt: Mapping[str, Any], tokenizer: Tokenizer, model: ModelInfo, name: str
) -> dict[str, Any]:
    """A prompt with a `suffix`, with its tokens, too. Raises InvalidInput: the model has no tokens
    for that, or a text is none or too long."""
    texts: list[str] = []
    for what, text in (("text", prompt.get("prompt")), ("suffix", prompt["suffix"])):
        if not isinstance(text, str):
            raise InvalidInput(
                f"the {what} of {name} is of type {type(text).__name__}; to fill in it must be str"
            )
        if len(text) > max(LONG_CHARS, length := model.max_model_len):
            check_length(text, name, length, tokenizer.token_size, is_cut=False)
        texts.append(text)
    known = fim_format(tokenizer, model.name)
    prefix, suffix = text_ids(tokenizer, texts[0]), text_ids(tokenizer, texts[1], goes_on=True)
    return {**prompt, "prompt_token_ids": known.joined(prefix, suffix)}


def filled_in(
    prompt: object, params: SamplingParams, tokenizer: Tokenizer | None, model: ModelInfo, name: str
) -> tuple[object, SamplingParams]:
    """A prompt with a `suffix` as its tokens, and parameters under which the answer ends where the
    gap is filled; any other as it is. Raises InvalidInput: see `fim_prompt`."""
    if not isinstance(prompt, Mapping) or prompt.get("suffix") is None:
        return prompt, params
    if params.truncate_prompt_tokens is not None:
        raise InvalidInput(
            f"truncate_prompt_tokens is {params.truncate_prompt_tokens}, and {name} has a suffix; "
            "omit it, and shorten both texts"
        )
    tokenizer = needed(tokenizer)
    if prompt.get("prompt_token_ids") is None:
        prompt = fim_prompt(prompt, tokenizer, model, name)
    if not params.ignore_eos:
        ends = fim_format(tokenizer, model.name).stop_token_ids
        params = replace(params, stop_token_ids=[*(params.stop_token_ids or ()), *ends])
    return {key: value for key, value in prompt.items() if key != "suffix"}, params
