"""Bodies of llama.cpp's completions. A field of a request that is not here is refused by name; one
whose type allows a single value has only that, which asks for nothing."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from protocol.presets import LlamaSamplers

_Off = Annotated[float, Meta(le=0)]
_Number = int | float | None
"""Taken and of no effect."""


class CompletionRequest(LlamaSamplers, forbid_unknown_fields=True, kw_only=True):
    """POST /completion. None: as the model's authors recommend, else llama.cpp's default."""

    model: str | None = None
    """None: the server's first."""
    prompt: str | list[Any] | dict[str, Any] = ""
    """A text, tokens, both mixed, `{"prompt_string": text}`, or a list of those."""
    stream: bool | None = None
    n_predict: Annotated[int, Meta(ge=-1)] | None = None
    """Most tokens; -1: as many as there is room for; 0: the prompt is computed and cached."""
    max_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """The same, as `max_completion_tokens`."""
    max_completion_tokens: Annotated[int, Meta(ge=-1)] | None = None
    n_cmpl: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    """The same as `n_cmpl`."""
    temperature: float | None = None
    """0 and below: greedy."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    samplers: list[str] | str | None = None  # type: ignore[assignment]
    """By names or letters: their order; what is not among them is off."""
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: list[Any] | dict[str, float | Literal[False]] | None = None
    n_probs: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    """The same as `n_probs`."""
    grammar: str | None = None
    """GBNF."""
    json_schema: dict[str, Any] | None = None
    n_indent: Annotated[int, Meta(ge=0)] | None = None
    """An answer ends at a line that is indented less."""
    t_max_predict_ms: int | None = None
    """Milliseconds after which an answer ends with its line."""
    cache_prompt: bool | None = None
    """False: no cached prompt is used."""
    id_slot: int | None = None
    """Its session, where several engines serve the model."""
    return_tokens: bool | None = None
    timings_per_token: bool | None = None
    response_fields: list[str] | None = None
    n_keep: _Number = None
    """Of no effect: an answer ends where the context is full. So are the next ones."""
    n_discard: _Number = None
    n_cache_reuse: _Number = None
    t_max_prompt_ms: _Number = None
    sse_ping_interval: _Number = None
    backend_sampling: bool | None = None
    mirostat: Literal[0] | None = None
    mirostat_tau: _Number = None
    mirostat_eta: _Number = None
    adaptive_target: _Off | None = None
    adaptive_decay: _Number = None
    min_keep: Literal[0] | None = None
    post_sampling_probs: Literal[False] | None = None
    return_progress: Literal[False] | None = None
    lora: Annotated[list[Any], Meta(max_length=0)] | None = None
    image_data: Annotated[list[Any], Meta(max_length=0)] | None = None


class ExtraText(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A piece of another file."""

    text: str
    filename: str = "tmp"
    time: _Number = None


class InfillRequest(CompletionRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /infill."""

    input_prefix: str | list[str | int]
    input_suffix: str | list[str | int]
    input_extra: list[ExtraText] = []
    prompt: str = ""
    """Stands behind `input_prefix`."""


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or an event of a stream, of which the last has the fields behind
    `tokens_evaluated`, and neither text nor tokens."""

    index: int
    content: str
    tokens: list[int]
    """Empty in a whole answer without `return_tokens`."""
    id_slot: int
    """The slot that was asked for, or -1."""
    stop: bool
    tokens_predicted: int
    tokens_evaluated: int
    model: str | UnsetType = UNSET
    generation_settings: dict[str, Any] | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    has_new_line: bool | UnsetType = UNSET
    truncated: bool | UnsetType = UNSET
    stop_type: Literal["eos", "limit", "word"] | UnsetType = UNSET
    stopping_word: str | UnsetType = UNSET
    tokens_cached: int | UnsetType = UNSET
    """Tokens of the prompt and the answer that the cache has at the end."""
    timings: dict[str, float] | UnsetType = UNSET
    completion_probabilities: list[Any] | UnsetType = UNSET
