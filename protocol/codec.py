"""Messages to frames and back, with one typed decoder for each direction. A message is one msgpack
frame, followed by the binary frames that its TensorRefs point at."""

import contextlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from protocol.base import WIRE_VERSION, Message
from protocol.errors import MalformedMessage, WireVersionMismatch
from protocol.multimodal import TensorRef
from protocol.outputs import EngineMessage
from protocol.requests import ClientMessage

T = TypeVar("T")

_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError)
_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_engine_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)


class _VersionProbe(msgspec.Struct, array_like=True, tag=1):
    """The part of HELLO and WELCOME that every wire version shares."""

    wire_version: int


_probe = msgspec.msgpack.Decoder(_VersionProbe)

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
    return _decode(_client_decoder, frame, "a client message")


def decode_engine_message(frame: bytes | memoryview) -> EngineMessage:
    """What the engine sent.

    Raises:
        WireVersionMismatch: a WELCOME of another version.
        MalformedMessage: anything that is not an EngineMessage.
    """
    return _decode(_engine_decoder, frame, "an engine message")


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview, kind: str) -> T:
    try:
        return decoder.decode(frame)
    except _DECODE_ERRORS as error:
        with contextlib.suppress(*_DECODE_ERRORS):
            check_wire_version(_probe.decode(frame).wire_version)
        raise MalformedMessage(f"not {kind}: {error}") from None


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
        raise MalformedMessage(f"dtype {ref.dtype!r} is unknown; use one of {[*_ELEMENT_BYTES]}")
    expected_bytes = _ELEMENT_BYTES[ref.dtype]
    for size in ref.shape:
        if size < 0:
            raise MalformedMessage(f"shape {ref.shape} has a negative size")
        expected_bytes *= size
    data = memoryview(frames[ref.frame])
    if data.nbytes != expected_bytes:
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
    try:
        return _request_probe.decode(frame).request_id
    except _DECODE_ERRORS:
        return None
