"""Frames for the engine's socket: those of every message, nested, cut, of other types, and of sizes
that no client has."""

import contextlib
import struct
from random import Random
from typing import Any

import msgspec

from protocol import calls
from protocol.base import WIRE_VERSION
from protocol.codec import decode_client_message, encode
from protocol.requests import Call, Hello
from tests.fuzz.mutation import EXTREMES
from tests.fuzz.server.cases import Case, size
from tests.protocol.sample_messages import CLIENT_MESSAGES, ENGINE_MESSAGES

_HELLO = encode(Hello(wire_version=WIRE_VERSION, client_name="fuzz"))
_OPERATORS = (
    calls.Drain, calls.PauseGeneration, calls.Sleep, calls.UpdateWeights, calls.LoadAdapter,
    calls.UnloadAdapter, calls.ResetPrefixCache,
)  # fmt: skip
"""Whoever may send these may stop the engine for all."""


def frames(rng: Random) -> Case:
    """Up to eight messages, behind a HELLO or without."""
    messages = [(_HELLO,)] if rng.random() < 0.7 else []
    while len(messages) < 1 + rng.randrange(8):
        frame = _frame(rng)
        if not _is_operators(frame):
            more = tuple(rng.randbytes(size(rng, 5000)) for _ in range(rng.randrange(3)))
            messages.append((frame, *more))
    return Case("frames", frames=tuple(messages))


def _frame(rng: Random) -> bytes:
    data = encode(rng.choice((*CLIENT_MESSAGES, *CLIENT_MESSAGES, *ENGINE_MESSAGES)))
    match rng.randrange(6):
        case 0:
            return data[: rng.randrange(len(data) + 1)]
        case 1:
            changed = bytearray(data)
            for _ in range(1 + rng.randrange(4)):
                changed[rng.randrange(len(data))] = rng.randrange(256)
            return bytes(changed)
        case 2:  # nested where a field is, or behind the last one
            deep = (
                rng.choice((b"\x91", b"\x81\xa1a", b"\xdd\0\0\0\x01")) * size(rng, 200_000) + b"\0"
            )
            if rng.random() < 0.5:
                return bytes([data[0] + 1]) + data[1:] + deep if 0x90 <= data[0] < 0x9F else deep
            at = rng.randrange(1, len(data))
            return data[:at] + deep + data[at:]
        case 3:  # lengths that lie
            head = rng.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb"))
            return (
                data[: rng.randrange(1, len(data))]
                + head
                + struct.pack(">I", rng.choice((2**32 - 1, 10**6)))
            )
    value = msgspec.msgpack.decode(data)
    return msgspec.msgpack.encode(_changed(value, rng))


def _changed(value: Any, rng: Random) -> Any:
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], _changed(value[at], rng), *value[at + 1 :]]
    if isinstance(value, list) and rng.random() < 0.3:
        return value * size(rng, 50_000)
    while True:
        found = rng.choice((*EXTREMES, "x" * size(rng, 1 << 20), [0] * size(rng, 1 << 20)))
        if not isinstance(found, int) or -(2**63) <= found < 2**64:
            return found if found != "\ud800" else "\u0000"


def _is_operators(frame: bytes) -> bool:
    with contextlib.suppress(Exception):  # it is what the engine has to bear
        message = decode_client_message(frame)
        return isinstance(message, Call) and isinstance(message.call, _OPERATORS)
    return False
