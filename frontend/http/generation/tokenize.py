"""POST /tokenize, /detokenize, by vLLM's shapes."""

import functools
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from frontend.async_llm import AsyncLLM
from frontend.http.api_errors import ApiError
from frontend.http.event_stream import built, in_pieces, json_response
from frontend.http.generation.conversation import (
    template_messages,
    template_tools,
    template_variables,
)
from frontend.http.generation.requests import ChatMessage, Tool
from frontend.http.operations import operation
from frontend.http.served_models import served_models
from frontend.multimodal.media import has_media
from frontend.text.long_texts import read_texts


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A text, or a conversation; what stands below `messages` is for conversations."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    """Default: for a text. A chat template writes them itself."""
    return_token_strs: bool | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


_CHAT_FIELDS = (
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)


@operation("POST", "/tokenize", takes=TokenizeRequest, gives=TokenizeResponse)
async def tokenize(request: Request, asked: TokenizeRequest) -> Response:
    """The tokens of a text or of a conversation."""
    llm = await served_models(request).get(asked.model)
    backend = llm.get_tokenizer().backend
    token_ids = await tokens_of(asked, llm)

    def make() -> Response:
        strings = None
        if asked.return_token_strs:
            strings = [backend.id_to_token(token_id) or "" for token_id in token_ids]
        tokens: Any = in_pieces(token_ids)
        texts: Any = None if strings is None else in_pieces(strings)
        length = llm.model.max_model_len
        return json_response(TokenizeResponse(len(token_ids), length, tokens, texts))

    return await built(make, len(token_ids))


def has_images(asked: TokenizeRequest) -> bool:
    """Whether there are images or sounds."""
    return has_media([{"content": each.content} for each in asked.messages or ()])


async def tokens_of(asked: TokenizeRequest, llm: AsyncLLM) -> list[int]:
    """Raises ApiError, InvalidInput: not one of both, or a template that fails."""
    tokenizer, processor = llm.get_tokenizer(), llm.input_processor
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give prompt or messages, and not both", param="prompt")
    if asked.prompt is not None:
        for name in _CHAT_FIELDS:
            if getattr(asked, name) is not None:
                raise ApiError(400, f"{name} needs messages", param=name)
        adds = asked.add_special_tokens is not False
        encode = functools.partial(processor.encode, add_special_tokens=adds, is_cut=True)
        return await read_texts(functools.partial(encode, asked.prompt), len(asked.prompt))
    assert asked.messages is not None
    tools = template_tools(asked.tools)
    template = tokenizer.used_template(asked.chat_template or None, has_tools=bool(tools)) or ""
    continues = bool(asked.continue_final_message)
    adds_prompt = asked.add_generation_prompt
    prompt = await llm.chat_prompt(
        await template_messages(asked.messages, template),
        is_cut=True,
        chat_template=asked.chat_template,
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        tools=tools,
        **template_variables(asked.chat_template_kwargs),
    )
    if not asked.add_special_tokens:
        return prompt["prompt_token_ids"]
    if "multimodal" in prompt:
        what = "add_special_tokens goes without images and sounds; omit it"
        raise ApiError(400, what, param="add_special_tokens")
    text = prompt["prompt"]
    encode = functools.partial(processor.encode, text, is_cut=True)
    return await read_texts(encode, len(text))


@operation("POST", "/detokenize", takes=DetokenizeRequest, gives=DetokenizeResponse)
async def detokenize(request: Request, asked: DetokenizeRequest) -> Response:
    """The text of tokens."""
    llm = await served_models(request).get(asked.model)
    tokens, last = asked.tokens, llm.model.vocab_size - 1
    if tokens and not 0 <= min(tokens) <= max(tokens) <= last:
        wrong = next(token_id for token_id in tokens if not 0 <= token_id <= last)
        raise ApiError(400, f"token id {wrong} is not in 0 to {last}", param="tokens")
    text = functools.partial(llm.get_tokenizer().decode, tokens, skip_special_tokens=False)
    return json_response(DetokenizeResponse(await read_texts(text, len(tokens))))
