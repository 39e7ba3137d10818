"""Inputs of several parts (the files of a folder, the frames of a message), and mutations of them
that know JSON and binary headers: bits alone seldom reach past a parser."""

import contextlib
import dataclasses
import json
import random
import struct
from collections.abc import Callable, Sequence

_LENGTH = struct.Struct("<I")
_NUMBERS = (0, 1, -1, 2, 7, 31, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1)
EXTREMES = (
    *_NUMBERS, 2**63, 2**64, 10**30, -(2**63), 0.0, -0.5, 1e-300, 1e308, float("nan"),
    float("inf"), True, False, None, "", "\0", "../x", "a" * 70_000, "\ud800", "1", [], {}, [[]],
    [None], {"": None}, ["a", 1], [1, "a"], {"a": {"a": 1}},
)  # fmt: skip


def join_parts(parts: Sequence[bytes]) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def split_parts(data: bytes) -> list[bytes]:
    """Any bytes are parts: a length beyond the end means the rest."""
    parts = []
    while len(data) >= _LENGTH.size:
        length = _LENGTH.unpack_from(data)[0]
        parts.append(data[_LENGTH.size : _LENGTH.size + length])
        data = data[_LENGTH.size + length :]
    return parts


@dataclasses.dataclass(frozen=True)
class Target:
    """
    Attributes:
        run: raises for a defect only.
        seeds: valid inputs, each the parts that `run` takes.
        words: what mutations write into texts.
    """

    run: Callable[[list[bytes]], None]
    seeds: Sequence[Sequence[bytes]]
    words: tuple[bytes, ...] = ()

    def __call__(self, data: bytes) -> None:
        self.run(split_parts(data))

    def inputs(self) -> list[bytes]:
        return [join_parts(parts) for parts in self.seeds]


def mutate(
    data: bytes,
    rng: random.Random,
    *,
    words: Sequence[bytes] = (),
    mutate_bytes: Callable[[bytes], bytes] | None = None,
) -> bytes:
    """One part of `data` changed.

    Args:
        words: what may be written into texts.
        mutate_bytes: the fuzzer's own mutator, for half of the changes.
    """
    parts = split_parts(data) or [b""]
    index = rng.randrange(len(parts))
    part = parts[index]
    if mutate_bytes is not None and rng.random() < 0.4:
        parts[index] = mutate_bytes(part)
        return join_parts(parts)
    header_bytes = 0
    if len(part) > 10 and part[8:9] == b"{":  # safetensors: its length, a header in JSON, the rest
        header_bytes = int.from_bytes(part[:8], "little")
    text = part[8 : 8 + header_bytes] if header_bytes else part
    changed: bytes | None = None
    if text[:1] in (b"{", b"[") and rng.random() < 0.8:
        with contextlib.suppress(ValueError, RecursionError):
            changed = json.dumps(_mutated_json(json.loads(text), rng)).encode()
    if changed is None:
        parts[index] = _mutated_bytes(part, rng, words)
    elif header_bytes:
        parts[index] = len(changed).to_bytes(8, "little") + changed + part[8 + header_bytes :]
    else:
        parts[index] = changed
    return join_parts(parts)


def _mutated_json(value: object, rng: random.Random) -> object:
    """One node replaced, removed, doubled, renamed, or nested deep."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        chosen = rng.choice(EXTREMES)
        if rng.random() < 0.02:
            for _ in range(rng.choice((10, 200, 5000))):
                chosen = [chosen]
        return chosen
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    kind = rng.random()
    if kind < 0.1:
        del value[key]
    elif kind < 0.2:
        value[key] = value[rng.choice(keys)]
    elif kind < 0.3:
        if isinstance(value, dict):
            value[str(key) + rng.choice(("", "x", "\0"))] = value.pop(key)
        else:
            value.append(value[key])
    else:
        value[key] = _mutated_json(value[key], rng)
    return value


def _mutated_bytes(part: bytes, rng: random.Random, words: Sequence[bytes]) -> bytes:
    data = bytearray(part)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(7 if words else 6):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                number = rng.choice(_NUMBERS)
                size = rng.choice((1, 2, 4, 8))
                data[at : at + size] = (number % 256**size).to_bytes(size, "little")
            case 2:
                del data[at : at + rng.choice((1, 2, 4, 8, 64, 1000))]
            case 3:
                start = rng.randrange(len(data) + 1)
                data[at:at] = data[start : start + rng.choice((1, 4, 8, 12, 24, 100))]
            case 4:
                data[at : at + 8] = rng.choice((2**63, 2**64 - 1, 2**40)).to_bytes(8, "little")
            case 5:
                data[at:at] = rng.randbytes(rng.choice((1, 4, 8)))
            case _:
                data[at:at] = rng.choice(words)
    return bytes(data)
