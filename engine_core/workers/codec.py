"""Plans and options to msgpack and back: dataclasses by their fields' names, arrays as bytes."""

import dataclasses
from array import array
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine_core.model_runner.sampled_tokens import SampledTokens
from engine_core.options.engine import EngineOptions
from engine_core.scheduler import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.plan import MaskRows, TokenMasks

_ARRAY = 1
"""Extension: dtype, shape and bytes of an array."""


@dataclasses.dataclass(frozen=True, slots=True)
class SentMasks:
    """`TokenMasks` that are there."""

    rows: MaskRows
    failed: dict[str, str]

    def wait(self) -> MaskRows:
        return self.rows

    def failures(self) -> dict[str, str]:
        return self.failed

    def refused(self) -> Collection[str]:
        return ()  # rank 0 tells, from its own masks


def encode_plan(plan: SchedulerOutput) -> bytes:
    """Waits for the plan's masks: workers have no grammars."""
    return _plans_out.encode(plan)


def decode_plan(frame: "bytes | memoryview") -> SchedulerOutput:
    """Raises msgspec.MsgspecError: not what `encode_plan` gave."""
    return _plans_in.decode(frame)


def is_empty(plan: SchedulerOutput) -> bool:
    """Whether a runner has nothing to do for it."""
    return not (
        plan.total_num_scheduled_tokens
        or plan.finished_req_ids
        or plan.preempted_req_ids
        or plan.scheduled_new_reqs
        or plan.resumed_reqs
        or plan.block_updates
        or plan.free_encoder_mm_hashes
        or plan.copies.disk is not None
        or not plan.copies.is_empty
    )


def encode_sampled(sampled: Sequence[SampledTokens]) -> bytes:
    return _plans_out.encode(sampled)


def decode_sampled(frame: bytes) -> list[SampledTokens]:
    return _sampled_in.decode(frame)


@dataclasses.dataclass(slots=True)
class _Output(ModelRunnerOutput):
    """msgspec cannot tell a list from an array."""

    sampled_token_ids: Any
    draft_token_ids: DraftTokenIds | None = None


def encode_output(output: ModelRunnerOutput) -> bytes:
    return _plans_out.encode(output)


def decode_output(frame: bytes) -> ModelRunnerOutput:
    return _outputs_in.decode(frame)


def encode_options(options: EngineOptions) -> bytes:
    return msgspec.msgpack.encode(options, enc_hook=_encode)


def decode_options(frame: bytes) -> EngineOptions:
    return msgspec.msgpack.decode(frame, type=EngineOptions, dec_hook=_decode)


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of objects has no bytes")
        parts = (value.dtype.str, value.shape, value.tobytes())
        return msgspec.msgpack.Ext(_ARRAY, msgspec.msgpack.encode(parts))
    if isinstance(value, array | np.generic):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, TokenMasks):
        return SentMasks(value.wait(), value.failures())
    raise TypeError(f"{type(value).__name__} cannot be sent to a worker")


def _decode(kind: Any, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    if kind is TokenMasks:
        return SentMasks(MaskRows(**value["rows"]), value["failed"])
    assert isinstance(value, np.ndarray), kind
    return value


def _decode_extension(code: int, frame: memoryview) -> Any:
    assert code == _ARRAY
    # written by nobody, but torch warns of an array that cannot be
    dtype, shape, contents = msgspec.msgpack.decode(frame, type=tuple[str, list[int], bytearray])
    return np.frombuffer(contents, dtype).reshape(shape)


_plans_out = msgspec.msgpack.Encoder(enc_hook=_encode)
_hooks: Any = {"dec_hook": _decode, "ext_hook": _decode_extension}
_plans_in: msgspec.msgpack.Decoder[SchedulerOutput] = msgspec.msgpack.Decoder(
    SchedulerOutput, **_hooks
)
_sampled_in: msgspec.msgpack.Decoder[list[SampledTokens]] = msgspec.msgpack.Decoder(
    list[SampledTokens], **_hooks
)
_outputs_in: msgspec.msgpack.Decoder[_Output] = msgspec.msgpack.Decoder(_Output, **_hooks)
