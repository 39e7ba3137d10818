"""What full blocks are found by: hashes of their tokens, and of all before them."""

from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from struct import Struct

from engine_core.kv_cache.sequence_blocks import CONTENT_HASH_BYTES, ContentSpan
from protocol.block_hashes import BYTES_A_TOKEN

# protocol/block_hashes.py says how a block is named. All parts of the hash's input have a fixed
# length, so that different inputs are different bytes. Behind the tokens stands a part for each
# content span that touches the block:
#
#     block          |..........[=====]|        first  where the span's part begins in the block
#     span        ...           [==...          count  positions of the block that it has
#                                               offset of the part in the span; the content's hash
_PART = Struct(f"<IIQ{CONTENT_HASH_BYTES}s")


def extend_block_hashes(
    hashes: list[bytes],
    parent: bytes,
    token_bytes: bytes,
    block_size: int,
    content_spans: Sequence[ContentSpan] = (),
) -> None:
    """Append the hashes of the whole blocks in `token_bytes`, which follow on `parent` and, by
    number, on the hashes that are there. `token_bytes`: int32, little-endian."""
    num_bytes = block_size * BYTES_A_TOKEN
    append = hashes.append
    for start in range(0, len(token_bytes), num_bytes):
        contents = token_bytes[start : start + num_bytes]
        if content_spans:
            contents += _content_parts(content_spans, len(hashes) * block_size, block_size)
        parent = blake2b(parent + contents).digest()
        append(parent)


def _content_parts(spans: Sequence[ContentSpan], start: int, block_size: int) -> bytes:
    """What content spans add to the hash of the block of positions [start, start + block_size)."""
    parts = []
    for index in range(bisect_right(spans, start, key=lambda span: span.stop), len(spans)):
        span = spans[index]
        if span.start >= start + block_size:
            break
        first = max(span.start, start)
        count = min(span.stop, start + block_size) - first
        parts.append(_PART.pack(first - start, count, first - span.start, span.content_hash))
    return b"".join(parts)
