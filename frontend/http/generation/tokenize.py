"""POST /tokenize, /detokenize, by vLLM's shapes."""

import functools
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
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
from frontend.inputs.prompts import TokensPrompt
from frontend.multimodal.media import has_media
from frontend.text.long_texts import check_chars, read_texts
from frontend.text.tokenizer import Tokenizer


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A text, or a conversation; what stands below `messages` is for conversations."""

    model: str | None = None
    prompt: str | None = None
    content: str | list[str | int] | None = None
    """llama.cpp's name of a text, or of texts and tokens mixed; what follows belongs to it."""
    add_special: bool | None = None
    """Default: no."""
    parse_special: bool | None = None
    """False: special tokens are read as text."""
    with_pieces: bool | None = None
    add_special_tokens: bool | None = None
    """Default: for a text. A chat template writes them itself."""
    return_token_strs: bool | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenPiece(msgspec.Struct, frozen=True):
    """A part of a character is a list of its bytes."""

    id: int
    piece: str | list[int]


class TokenizeResponse(msgspec.Struct, frozen=True):
    """The tokens; of `content` nothing else, as llama.cpp has it."""

    tokens: list[int | TokenPiece]
    count: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    token_strs: list[str] | UnsetType | None = UNSET


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str
    content: str
    """The same: llama.cpp's name."""


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
    if asked.content is not None:
        return await _as_llama_cpp(asked, asked.content, llm)
    backend = llm.get_tokenizer().backend
    token_ids = await tokens_of(asked, llm)

    def make() -> Response:
        strings = None
        if asked.return_token_strs:
            strings = [backend.id_to_token(token_id) or "" for token_id in token_ids]
        tokens: Any = in_pieces(token_ids)
        texts: Any = None if strings is None else in_pieces(strings)
        length = llm.model.max_model_len
        return json_response(TokenizeResponse(tokens, len(token_ids), length, texts))

    return await built(make, len(token_ids))


def _check_ids(token_ids: list[int], llm: AsyncLLM, param: str) -> None:
    last = llm.model.vocab_size - 1
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= last:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id <= last)
        raise ApiError(400, f"token id {wrong} is not in 0 to {last}", param=param)


async def _as_llama_cpp(
    asked: TokenizeRequest, content: str | list[str | int], llm: AsyncLLM
) -> Response:
    parts = content if isinstance(content, list) else [content]
    tokenizer, token_ids = llm.get_tokenizer(), list[int]()
    for index, part in enumerate(parts):
        if isinstance(part, int):
            token_ids.append(part)
            continue
        check_chars(len(part), "content", llm.model.max_model_len, is_cut=True)
        plain, encode = asked.parse_special is False, llm.input_processor.encode
        adds = bool(asked.add_special) and index == 0
        token_ids += tokenizer.ids_before_text if plain and adds else ()
        read = functools.partial(encode, part, add_special_tokens=adds, is_cut=True)
        if plain:
            read = functools.partial(tokenizer.encode_as_text, part)
        token_ids += await read_texts(read, len(part))
    _check_ids(token_ids, llm, "content")

    def make() -> Response:
        pieces = (_piece(each, tokenizer) if asked.with_pieces else each for each in token_ids)
        return json_response(TokenizeResponse(in_pieces(pieces)))

    return await built(make, len(token_ids))


def _piece(token_id: int, tokenizer: Tokenizer) -> TokenPiece:
    raw = tokenizer.pieces.bytes_of(token_id)
    try:
        return TokenPiece(token_id, raw.decode())
    except UnicodeDecodeError:
        return TokenPiece(token_id, list(raw))


def has_images(asked: TokenizeRequest) -> bool:
    """Whether there are images or sounds."""
    return has_media([{"content": each.content} for each in asked.messages or ()])


async def tokens_of(asked: TokenizeRequest, llm: AsyncLLM) -> list[int]:
    """Raises ApiError, InvalidInput: not one of both, or a template that fails."""
    processor = llm.input_processor
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give prompt or messages, and not both", param="prompt")
    if asked.prompt is not None:
        for name in _CHAT_FIELDS:
            if getattr(asked, name) is not None:
                raise ApiError(400, f"{name} needs messages", param=name)
        adds = asked.add_special_tokens is not False
        encode = functools.partial(processor.encode, add_special_tokens=adds, is_cut=True)
        return await read_texts(functools.partial(encode, asked.prompt), len(asked.prompt))
    prompt = await conversation_prompt(asked, llm)
    if not asked.add_special_tokens:
        return prompt["prompt_token_ids"]
    if "multimodal" in prompt:
        what = "add_special_tokens goes without images and sounds; omit it"
        raise ApiError(400, what, param="add_special_tokens")
    text = prompt["prompt"]
    encode = functools.partial(processor.encode, text, is_cut=True)
    return await read_texts(encode, len(text))


async def conversation_prompt(asked: TokenizeRequest, llm: AsyncLLM) -> TokensPrompt:
    """Raises ApiError, InvalidInput: there is none, or a template that fails."""
    if asked.messages is None:
        raise ApiError(400, "messages is missing; give it", param="messages")
    tokenizer = llm.get_tokenizer()
    tools = template_tools(asked.tools)
    template = tokenizer.used_template(asked.chat_template or None, has_tools=bool(tools)) or ""
    continues = bool(asked.continue_final_message)
    adds_prompt = asked.add_generation_prompt
    return await llm.chat_prompt(
        await template_messages(asked.messages, template),
        is_cut=True,
        chat_template=asked.chat_template,
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=continues,
        tools=tools,
        **template_variables(asked.chat_template_kwargs),
    )


@operation("POST", "/detokenize", takes=DetokenizeRequest, gives=DetokenizeResponse)
async def detokenize(request: Request, asked: DetokenizeRequest) -> Response:
    """The text of tokens."""
    llm = await served_models(request).get(asked.model)
    tokens = asked.tokens
    _check_ids(tokens, llm, "tokens")
    text = functools.partial(llm.get_tokenizer().decode, tokens, skip_special_tokens=False)
    found = await read_texts(text, len(tokens))
    return json_response(DetokenizeResponse(found, found))
