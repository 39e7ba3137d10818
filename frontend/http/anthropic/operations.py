"""Anthropic's routes."""

from frontend.http.anthropic.messages import count_tokens, messages
from frontend.http.anthropic.requests import CountTokensRequest, MessagesRequest
from frontend.http.anthropic.responses import Message, MessageEvent, TokenCount
from frontend.http.operations import Operation

OPERATIONS = [
    Operation("POST", "/v1/messages", messages, MessagesRequest, Message, MessageEvent),
    Operation("POST", "/v1/messages/count_tokens", count_tokens, CountTokensRequest, TokenCount),
]
