"""What engines say to each other: msgpack as in protocol/, with blocks as binary frames."""

import hashlib

import msgspec

from engine_core.kv_cache.host_pool import HashKey
from protocol.base import Message

TRANSFER_VERSION = 1
"""Raise it with any change here."""
_CHECKSUM_BYTES = 32


class FetchBlocks(Message, frozen=True, tag=1):
    """Answered by BlocksFound or FetchRefused of the same number."""

    version: int
    number: int
    key: bytes
    """Of weights, code, dtypes and layout: blocks of another key are of no use."""
    blocks: list[tuple[int, bytes]]
    """(group, hash) each."""


class BlocksFound(Message, frozen=True, tag=2):
    number: int
    checksums: list[bytes]
    """Of each block that was asked for, in order, empty if it is not there. The contents of the
    others are the frames behind this one."""


class FetchRefused(Message, frozen=True, tag=3):
    number: int
    why: str


FetchAnswer = BlocksFound | FetchRefused

encoder = msgspec.msgpack.Encoder()
fetch_decoder = msgspec.msgpack.Decoder(FetchBlocks)
answer_decoder: msgspec.msgpack.Decoder[FetchAnswer] = msgspec.msgpack.Decoder(FetchAnswer)


def checksum(key: bytes, block: HashKey, contents: bytes | memoryview) -> bytes:
    """A checksum of a block's contents and of what it is."""
    group, block_hash = block
    digest = hashlib.blake2b(contents, digest_size=_CHECKSUM_BYTES)
    digest.update(key + group.to_bytes(4, "little") + block_hash)
    return digest.digest()
