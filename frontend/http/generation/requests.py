"""Bodies of OpenAI's requests. A field that is not here is refused by name; one that is here and
has a single value that works is checked by `parameters.py`."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.presets import LlamaSamplers

Count = Annotated[int, Meta(ge=1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    """A last event with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """Usage so far in every event, as vLLM has it."""
    include_obfuscation: Literal[False] | None = None


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Always enforced, so `strict` is of no effect, as are name and description."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = msgspec.field(name="schema", default=None)
    """None: any JSON."""
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = msgspec.field(name="schema", default=None)
    """The schema of a json_object, as llama.cpp and instructor have it."""
    structures: list[dict[str, Any]] | None = None
    """Of vLLM's structural_tag: `begin`, `schema` and `end` of each."""
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None
    """Of a structural_tag, in their place: one of xgrammar's formats."""


class StructuredOutputsFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's `structured_outputs`: exactly one of the first six."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class RepetitionDetection(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class GenerationRequest(LlamaSamplers, forbid_unknown_fields=True, kw_only=True):
    """What chat completions and completions share. None: the model's own default."""

    model: str | None = None
    """None: the server's first."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    user: str | None = None
    """Divides its caller's share of the engine."""
    safety_identifier: str | None = None
    """OpenAI's newer name of `user`."""
    prompt_cache_key: str | None = None
    """Its session, where several engines serve the model; every prompt is cached."""
    session_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    """vLLM's name of `prompt_cache_key`."""
    priority: int | None = None
    """Smaller is more urgent."""
    cache_salt: str | None = None
    """A salt: only requests with the same one share cached prompts."""
    request_id: Annotated[str, Meta(max_length=256)] | None = None
    """It stands in each event."""
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsFields | None = None
    guided_json: str | dict[str, Any] | None = None
    """vLLM's older names of the fields of `structured_outputs`."""
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    """Taken and of no effect: nothing is stored."""
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    best_of: int | None = None
    """Draw so many samples, and give the `n` likeliest."""
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    logprob_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: Annotated[int, Meta(ge=-1)] | None = None
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = None
    """Taken and of no effect, as mirostat is off, as is `mirostat_eta`."""
    mirostat_eta: float | None = None
    vllm_xargs: dict[str, Any] | None = None
    """`extra_args` for the engine's logits processors."""
    use_beam_search: Literal[False] | None = None
    length_penalty: Annotated[float, Meta(ge=1, le=1)] | None = None
    truncation_side: Literal["left"] | None = None
    watermarking: Literal[False] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    return_tokens_as_token_ids: bool | None = None
    """Name tokens `token_id:N` among log-probabilities."""


class CompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]] | None = None
    """A text, token ids, or a list of prompts."""
    prompt_embeds: str | list[str] | None = None
    """Base64 of a safetensors file with one tensor [positions, hidden size], or several of those:
    prompts before those of `prompt`. The engine takes them with --enable-prompt-embeds."""
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    """0: with `echo`, the prompt alone."""
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0)] | None = None
    suffix: str | None = None
    """What stands behind the gap that is filled; empty: there is none."""
    add_special_tokens: bool | None = None


class FunctionDefinition(
    msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    arguments: str | dict[str, Any] = ""


class AssistantToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Left in by clients that joined a stream."""


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """With what OpenAI's answers and LiteLLM's have, as clients send them back."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[AssistantToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[dict[str, Any]] | None = None
    provider_specific_fields: dict[str, Any] | None = None


class ChatCompletionRequest(GenerationRequest, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    """Default: unless the final message is continued."""
    continue_final_message: bool | None = None
    add_special_tokens: Literal[False] | None = None
    """The template writes them."""
    echo: bool | None = None
    """Begin the answer with the last message, if that is the assistant's."""
    include_reasoning: bool | None = None
    """False: reasoning is left out of the answer."""
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    """Texts for templates that read them."""
    reasoning_effort: str | None = None
    """The effort to reason, for templates that read it."""
    modalities: Annotated[list[Literal["text"]], Meta(min_length=1)] | None = None
    verbosity: Literal["medium"] | None = None
    return_prompt_text: bool | None = None
    """The text that the template made, as `prompt_text` of the answer."""
