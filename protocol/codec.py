"""Messages to frames and back, with one typed decoder for each direction. A message is one msgpack
frame, followed by the binary frames that its TensorRefs point at."""

import math
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from protocol.base import WIRE_VERSION, Message
from protocol.errors import MalformedMessage, WireVersionMismatch
from protocol.multimodal import TensorRef
from protocol.outputs import EngineMessage
from protocol.requests import ClientMessage

T = TypeVar("T")
Sent = TypeVar("Sent")

_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_engine_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)


class _VersionProbe(msgspec.Struct, array_like=True, tag=1):
    """The part of HELLO and WELCOME that every wire version shares."""

    wire_version: int


_probe = msgspec.msgpack.Decoder(_VersionProbe)

_MAX_DIMENSIONS = 8
_ELEMENT_BYTES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8}


def encode(message: Message) -> bytes:
    """The message frame. Binary parts, if any, are sent behind it as they are."""
    return _encoder.encode(message)


def decode_client_message(frame: bytes | memoryview) -> ClientMessage:
    """What a client sent.

    Raises:
        WireVersionMismatch: a HELLO of another version.
        MalformedMessage: anything that is not a ClientMessage.
    """
    return _decode(_client_decoder.decode, frame, "a client message")


def decode_engine_message(frame: bytes | memoryview) -> EngineMessage:
    """What the engine sent.

    Raises:
        WireVersionMismatch: a WELCOME of another version.
        MalformedMessage: anything that is not an EngineMessage.
    """
    return _decode(_engine_decoder.decode, frame, "an engine message")


def _decode(decode: Callable[[bytes | memoryview], T], frame: bytes | memoryview, kind: str) -> T:
    try:
        return understood(decode, frame, kind)
    except MalformedMessage:
        if (probe := _read(_probe, frame)) is not None:
            check_wire_version(probe.wire_version)
        raise


def understood(decode: Callable[[Sent], T], sent: Sent, kind: str) -> T:
    """What `decode` makes of what another process sent. Raises MalformedMessage, whatever goes
    wrong: the depth is what the interpreter's stack allows, and nothing sent may end a loop."""
    try:
        return decode(sent)
    except RecursionError:
        raise MalformedMessage(f"not {kind}: it nests too deeply") from None
    except Exception as error:
        what = error if isinstance(error, ValueError) else repr(error)
        raise MalformedMessage(f"not {kind}: {what!s:.1000}") from None


def _read(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview) -> T | None:
    try:
        return understood(decoder.decode, frame, "a message")
    except MalformedMessage:
        return None


def check_wire_version(theirs: int) -> None:
    """Raises WireVersionMismatch unless `theirs` is ours."""
    if theirs != WIRE_VERSION:
        raise WireVersionMismatch(ours=WIRE_VERSION, theirs=theirs)


def binary_frame(ref: TensorRef, frames: Sequence[bytes | memoryview]) -> memoryview:
    """The bytes that `ref` points at, checked against its shape and dtype.
    Raises MalformedMessage: no such frame, an unknown dtype, or a size that does not fit."""
    if not 0 <= ref.frame < len(frames):
        raise MalformedMessage(f"binary frame {ref.frame} is missing, {len(frames)} were sent")
    if ref.dtype not in _ELEMENT_BYTES:
        raise MalformedMessage(
            f"dtype {ref.dtype!r:.40} is unknown; use one of {[*_ELEMENT_BYTES]}"
        )
    if len(ref.shape) > _MAX_DIMENSIONS:
        raise MalformedMessage(
            f"a shape has {len(ref.shape)} dimensions, the limit is {_MAX_DIMENSIONS}"
        )
    if min(ref.shape, default=0) < 0:
        raise MalformedMessage(f"shape {ref.shape} has a negative size")
    expected_bytes = _ELEMENT_BYTES[ref.dtype] * math.prod(ref.shape)
    data = memoryview(frames[ref.frame])
    if data.nbytes != expected_bytes or max(ref.shape, default=0) > sys.maxsize:
        raise MalformedMessage(
            f"binary frame {ref.frame} has {data.nbytes} bytes, "
            f"shape {ref.shape} of {ref.dtype} needs {expected_bytes}"
        )
    return data


class _RequestProbe(msgspec.Struct, array_like=True, tag=2):
    """The part of an EngineRequest that says which request it is."""

    request_id: str


_request_probe = msgspec.msgpack.Decoder(_RequestProbe)


def request_id_of(frame: bytes | memoryview) -> str | None:
    """The id of a request that does not decode, if at least that part does."""
    probe = _read(_request_probe, frame)
    return None if probe is None else probe.request_id
