"""Sampling options as typed at the terminal. Knows their names; their rules are SamplingParams'."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

if TYPE_CHECKING:
    from frontend.sampling_params import SamplingParams


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How to choose tokens. What is not given is as the model's authors recommend."""

    max_tokens: Annotated[
        int | None,
        Parameter(help="Most tokens to generate; default: up to the model's length."),
    ] = None
    min_tokens: Annotated[int | None, Parameter(help="Do not end before so many tokens.")] = None
    temperature: Annotated[float | None, Parameter(help="0 is greedy; higher is more varied.")] = (
        None
    )
    top_p: Annotated[float | None, Parameter(help="Nucleus sampling, above 0 to 1.")] = None
    top_k: Annotated[int | None, Parameter(help="Only the k likeliest tokens; 0 is all.")] = None
    min_p: Annotated[
        float | None, Parameter(help="Drop tokens below this share of the likeliest's.")
    ] = None
    repetition_penalty: Annotated[float | None, Parameter(help="1 is none.")] = None
    presence_penalty: Annotated[float | None, Parameter(help="From -2 to 2; 0 is none.")] = None
    frequency_penalty: Annotated[float | None, Parameter(help="From -2 to 2; 0 is none.")] = None
    seed: Annotated[int | None, Parameter(help="Same seed, same answer.")] = None
    stop: Annotated[
        list[str] | None,
        Parameter(help="End before this text; may be repeated.", negative=""),
    ] = None
    ignore_eos: Annotated[
        bool, Parameter(help="Go on behind the model's end-of-sequence.", negative="")
    ] = False

    def given(self) -> dict[str, Any]:
        """Only what was typed."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        # by identity: a temperature of 0 equals False
        return {
            name: value
            for name, value in options.items()
            if value is not None and value is not False
        }

    def to_params(self, defaults: Mapping[str, float], **more: Any) -> SamplingParams:
        """Over `defaults` (the model's), as increments for a stream of text.

        Raises:
            InvalidInput: values outside their limits, or that contradict each other.
        """
        from frontend.sampling_params import RequestOutputKind, SamplingParams

        recommended = SamplingParams.from_defaults(defaults)
        return dataclasses.replace(
            recommended,
            **{
                "max_tokens": None,
                **self.given(),
                **more,
                "output_kind": RequestOutputKind.DELTA,
            },
        )
