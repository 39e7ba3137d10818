"""Code of the operator's that changes logits: what such a class is, and which requests it takes.
Imports no torch: a package that offers one needs nothing else of this project."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from protocol.errors import InvalidParameter
from protocol.sampling import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

ENTRY_POINT_GROUP = "engine_core.logits_processors"


@dataclasses.dataclass(frozen=True, slots=True)
class ServedVocabulary:
    """What a processor is made with.

    Attributes:
        vocab_size: length of a row of logits.
        eos_token_ids: of the model.
        tokenizer_json: tokenizer.json's text (`tokenizers.Tokenizer.from_str`); None: the model
            came without one.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    tokenizer_json: str | None


class LogitsProcessor(Protocol):
    """Named with `--logits-processors`. One instance serves all requests, on the engine's thread.

    It sees the model's raw logits. Masks, biases, penalties and temperature come after it: a
    grammar holds whatever it does. Drafts are verified with it: `apply` gets a row of logits for
    each, as if the drafts before it had been sampled. Therefore what it does has to follow from
    (request, output so far), never from how often it was called.

    An exception ends the request that it is about, and no other."""

    extra_args: Collection[str]
    """Keys of a request's `extra_args` that it takes."""

    def __init__(self, vocabulary: ServedVocabulary) -> None: ...

    def validate_params(self, params: SamplingParams, extra_args: Mapping[str, Any]) -> None:
        """Of every request before it is queued; `extra_args` may hold other processors' too.
        Raises ValueError: refused, with this text."""

    def add_row(
        self,
        row: int,
        params: SamplingParams,
        extra_args: Mapping[str, Any],
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
    ) -> bool:
        """A sequence takes a row of the batch, whether the one before it was removed or not. A
        sample of n > 1 has a row of its own; one that was preempted comes again, with its output.
        Returns whether its logits are to be changed: else the row costs nothing."""

    def remove_row(self, row: int) -> None:
        """Its sequence has ended or was preempted."""

    def apply(
        self,
        logits: "torch.Tensor",
        rows: Sequence[int],
        output_token_ids: "Sequence[npt.NDArray[np.int32]]",
    ) -> "torch.Tensor":
        """
        Args:
            logits: [R, vocab_size], float32; may be changed in place.
            rows: [R], whose they are. With drafts a row occurs several times.
            output_token_ids: [R], all tokens behind the prompt, drafts included; to be read only.

        Returns:
            the new logits, of the same shape; -inf makes a token impossible.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class NamedProcessor:
    """`name`: as the operator gave it."""

    name: str
    processor: LogitsProcessor


def read_extra_args(params: SamplingParams) -> dict[str, Any]:
    """Raises InvalidParameter: no object of JSON."""
    if params.extra_args is None:
        return {}
    try:
        return msgspec.json.decode(params.extra_args, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidParameter(f"extra_args are no object of JSON: {error}") from error


def check_extra_args(processors: Sequence[NamedProcessor], params: SamplingParams) -> None:
    """Raises InvalidParameter: a key that no processor takes, or values that one refuses."""
    extra_args = read_extra_args(params)
    known = sorted({name for each in processors for name in each.processor.extra_args})
    unknown = sorted(extra_args.keys() - set(known))
    if unknown and not processors:
        raise InvalidParameter(
            f"extra_args has {unknown[0]!r:.100}, and this engine has no logits processors, which "
            "alone read it; omit it, or start the engine with --logits-processors"
        )
    if unknown:
        raise InvalidParameter(
            f"extra_args has {unknown[0]!r:.100}, which no logits processor of this engine takes; "
            f"they take {', '.join(known) or 'none'}"
        )
    for each in processors:
        try:
            each.processor.validate_params(params, extra_args)
        except ValueError as error:
            raise InvalidParameter(f"logits processor {each.name}: {error}") from error
        except Exception as error:  # whatever it is, the loop goes on
            raise InvalidParameter(what_failed(each.name, error)) from error


def what_failed(name: str, error: Exception) -> str:
    return f"logits processor {name} failed: {type(error).__name__}: {error!s:.500}"
