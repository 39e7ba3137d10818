"""The models of a server in Anthropic's form."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec
from starlette.requests import Request

from frontend.http.generation.answer_bodies import ModelCard


class Model(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    lifecycle: Literal["active"] = "active"
    created_at: datetime
    max_input_tokens: int | None
    max_tokens: int | None
    """The most tokens of an answer."""


class Models(msgspec.Struct, frozen=True, kw_only=True):
    """All of them: a page is never full."""

    data: list[Model]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


def asks_anthropic(request: Request) -> bool:
    """Whether the client is one of Anthropic's API: they all name its version."""
    return "anthropic-version" in request.headers


def model_of_card(card: ModelCard) -> Model:
    return Model(
        id=card.id,
        display_name=card.id,
        created_at=datetime.fromtimestamp(card.created, UTC),
        max_input_tokens=card.max_model_len,
        max_tokens=card.max_model_len,
    )


def models_of_cards(cards: Sequence[ModelCard]) -> Models:
    data = [model_of_card(card) for card in cards]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return Models(data=data, first_id=first, last_id=last)
