"""Anthropic's routes."""

from __future__ import annotations

from frontend.http.anthropic.messages import count_tokens, messages
from frontend.http.anthropic.requests import CountTokensRequest, MessagesRequest
from frontend.http.anthropic.responses import Message, MessageEvent, TokenCount
from frontend.http.operations import Operation

OPERATIONS = [
    Operation(
        method="POST",
        path="/v1/messages",
        handler=messages,
        takes=MessagesRequest,
        gives=Message,
        event=MessageEvent,
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        handler=count_tokens,
        takes=CountTokensRequest,
        gives=TokenCount,
    ),
]
