"""What a step's attention has to do, listed on the GPU once a step and read by every layer.

Buffers have a fixed capacity and grids follow host numbers alone: a captured step can be replayed.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

SHORTEST_SPLIT = 256
MOST_SPLITS = 64
"""Of a request whose span is a whole number of splits; others can touch two more, see
`split_bound`."""
TILE_ROWS = 128
"""Rows of a prefill tile: query tokens times query heads of a key/value head."""
MOST_DECODE_ROWS = 64
"""Of a decode tile: more rows would not fit in the registers of its four warps."""
ENTRY = 8
"""int32 of an entry. Keys are positions of the sequence; tokens are rows of q.

splits   request, first key, key stop, first token, token stop, position of first token, 0, 0
tiles    request, first token, token stop, position of first token, 0, 0, 0, 0; last tile first
"""


def split_length(span: int) -> int:
    """Keys of a split of a request that sees `span` keys: 256, doubled until 64 splits suffice."""
    length = SHORTEST_SPLIT
    while length * MOST_SPLITS < span:
        length *= 2
    return length


def split_bound(max_seq_len: int, sliding_window: int | None, max_queries: int) -> int:
    """Most splits that a decode request can have; a window's first split may be cut anywhere."""
    if sliding_window is None or sliding_window >= max_seq_len:
        span = max_seq_len
        return min(MOST_SPLITS, -(-span // SHORTEST_SPLIT))
    longest = min(MOST_SPLITS, -(-sliding_window // SHORTEST_SPLIT))
    return longest + 1 + -(-max_queries // SHORTEST_SPLIT)


def queries_per_tile(group_size: int) -> int:
    """Query tokens of a prefill tile at `group_size` query heads a key/value head."""
    return TILE_ROWS // group_size


def reference_splits(
    query_start_loc_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    num_decodes: int,
    sliding_window: int | None,
) -> list[list[int]]:
    """The list of splits as its definition reads."""
    starts, entries = query_start_loc_R1.tolist(), []
    for request, seq_len in enumerate(seq_lens_R.tolist()[:num_decodes]):
        start, stop = starts[request], starts[request + 1]
        position, low, span = seq_len - (stop - start), 0, seq_len
        if sliding_window is not None:
            low, span = max(0, position - sliding_window + 1), min(seq_len, sliding_window)
        length = split_length(span)
        first = low // length
        while stop > start and first * length < seq_len:
            keys = (max(low, first * length), min(seq_len, (first + 1) * length))
            entries.append([request, *keys, start, stop, position, 0, 0])
            first += 1
    return entries


def reference_tiles(
    query_start_loc_R1: torch.Tensor, seq_lens_R: torch.Tensor, num_decodes: int, tile_queries: int
) -> list[list[int]]:
    """The list of prefill tiles as its definition reads."""
    starts, entries = query_start_loc_R1.tolist(), []
    for request, seq_len in enumerate(seq_lens_R.tolist()):
        start, stop = starts[request], starts[request + 1]
        if request >= num_decodes:
            for first in reversed(range(start, stop, tile_queries)):
                position = seq_len - stop + first
                entries.append([request, first, stop, position, 0, 0, 0, 0])
    return entries


@triton.jit
def _cut_decode(start, stop, seq_len, window, SHORTEST: tl.constexpr, MOST: tl.constexpr):
    """(first key, split length, first split, number of splits) of scalars or vectors."""
    position = seq_len - (stop - start)
    low = tl.maximum(position - window + 1, 0)
    span = tl.minimum(seq_len, window)
    length = span * 0 + SHORTEST
    for _ in tl.static_range(18):
        length = tl.where(length.to(tl.int64) * MOST < span, length * 2, length)
    first = low // length
    count = tl.where(stop > start, tl.maximum((seq_len + length - 1) // length - first, 0), 0)
    return low, length, first, count


@triton.jit(do_not_specialize=["num_decodes", "capacity", "window"])
def list_splits_kernel(
    query_start_loc_R1,  # int32 [R + 1]
    seq_lens_R,  # int32 [R]
    splits_W8,  # int32 [W, 8], written
    first_split_R1,  # int32 [num_decodes + 1], written; the last is how many there are
    num_decodes,
    capacity,
    window,
    SHORTEST: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Program r counts the splits of the requests before it and writes those of request r."""
    request = tl.program_id(0)
    before = 0
    for chunk in range(0, request, BLOCK_R):
        request_R = chunk + tl.arange(0, BLOCK_R)
        mask_R = request_R < request
        start_R = tl.load(query_start_loc_R1 + request_R, mask=mask_R, other=0)
        stop_R = tl.load(query_start_loc_R1 + request_R + 1, mask=mask_R, other=0)
        seq_len_R = tl.load(seq_lens_R + request_R, mask=mask_R, other=0)
        _, _, _, count_R = _cut_decode(start_R, stop_R, seq_len_R, window, SHORTEST, MOST)
        before += tl.sum(tl.where(mask_R, count_R, 0), axis=0)
    start = tl.load(query_start_loc_R1 + request)
    stop = tl.load(query_start_loc_R1 + request + 1)
    seq_len = tl.load(seq_lens_R + request)
    low, length, first, count = _cut_decode(start, stop, seq_len, window, SHORTEST, MOST)
    tl.store(first_split_R1 + request, before)
    if request == num_decodes - 1:
        tl.store(first_split_R1 + num_decodes, before + count)
    for chunk in range(0, count, BLOCK_W):
        index_W = chunk + tl.arange(0, BLOCK_W)
        mask_W = (index_W < count) & (before + index_W < capacity)
        entry_W = splits_W8 + (before + index_W).to(tl.int64) * 8
        key_W = (first + index_W) * length
        zero_W = index_W * 0
        tl.store(entry_W + 0, zero_W + request, mask=mask_W)
        tl.store(entry_W + 1, tl.maximum(key_W, low), mask=mask_W)
        tl.store(entry_W + 2, tl.minimum(key_W + length, seq_len), mask=mask_W)
        tl.store(entry_W + 3, zero_W + start, mask=mask_W)
        tl.store(entry_W + 4, zero_W + stop, mask=mask_W)
        tl.store(entry_W + 5, zero_W + seq_len - (stop - start), mask=mask_W)
        tl.store(entry_W + 6, zero_W, mask=mask_W)
        tl.store(entry_W + 7, zero_W, mask=mask_W)


@triton.jit(do_not_specialize=["num_decodes", "num_prefills", "capacity"])
def list_tiles_kernel(
    query_start_loc_R1,  # int32 [R + 1]
    seq_lens_R,  # int32 [R]
    tiles_W8,  # int32 [W, 8], written
    num_tiles_1,  # int32 [1], written
    num_decodes,
    num_prefills,
    capacity,
    TILE_QUERIES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """Program r counts the tiles of the prefills before it and writes those of prefill r."""
    prefill = tl.program_id(0)
    before = 0
    for chunk in range(0, prefill, BLOCK_R):
        prefill_R = chunk + tl.arange(0, BLOCK_R)
        mask_R = prefill_R < prefill
        pointer_R = query_start_loc_R1 + num_decodes + prefill_R
        start_R = tl.load(pointer_R, mask=mask_R, other=0)
        stop_R = tl.load(pointer_R + 1, mask=mask_R, other=0)
        count_R = (stop_R - start_R + TILE_QUERIES - 1) // TILE_QUERIES
        before += tl.sum(tl.where(mask_R, count_R, 0), axis=0)
    request = num_decodes + prefill
    start = tl.load(query_start_loc_R1 + request)
    stop = tl.load(query_start_loc_R1 + request + 1)
    seq_len = tl.load(seq_lens_R + request)
    count = (stop - start + TILE_QUERIES - 1) // TILE_QUERIES
    if prefill == num_prefills - 1:
        tl.store(num_tiles_1, tl.minimum(before + count, capacity))
    for chunk in range(0, count, BLOCK_W):
        index_W = chunk + tl.arange(0, BLOCK_W)
        mask_W = (index_W < count) & (before + index_W < capacity)
        entry_W = tiles_W8 + (before + index_W).to(tl.int64) * 8
        token_W = start + (count - 1 - index_W) * TILE_QUERIES
        zero_W = index_W * 0
        tl.store(entry_W + 0, zero_W + request, mask=mask_W)
        tl.store(entry_W + 1, token_W, mask=mask_W)
        tl.store(entry_W + 2, zero_W + stop, mask=mask_W)
        tl.store(entry_W + 3, seq_len - stop + token_W, mask=mask_W)
        for column in tl.static_range(4, 8):
            tl.store(entry_W + column, zero_W, mask=mask_W)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """The lists of one step and the host numbers that launches are made from.

    Attributes:
        num_decodes: requests [0, num_decodes) are cut into splits of their keys.
        num_prefills: requests [num_decodes, num_decodes + num_prefills) into tiles of queries.
        max_decode_queries: most query tokens of a decode.
        max_tiles: at least as many as there are tiles.
        split_bound: most splits of a decode.
        num_query_heads, num_kv_heads, sliding_window: what the lists were made for.
        splits_W8, first_split_R1, tiles_W8, num_tiles_1: see ENTRY and the kernels.
        partial_out, partial_lse: float32, flat, scratch for the splits' results; may be shared by
            all groups of layers, because layers run one after another.
        num_programs: persistent programs of the decode kernel, four a multiprocessor.
    """

    num_decodes: int
    num_prefills: int
    max_decode_queries: int
    max_tiles: int
    split_bound: int
    num_query_heads: int
    num_kv_heads: int
    sliding_window: int | None
    splits_W8: torch.Tensor
    first_split_R1: torch.Tensor
    tiles_W8: torch.Tensor
    num_tiles_1: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    num_programs: int


class AttentionWorkspace:
    """The lists of one group of layers with equal heads and window, allocated once.

    Capacity in splits is `max_decodes * split_bound`, or less if the decodes of a step never hold
    more than `max_decode_keys` tokens together. A request that does not fit has its output filled
    with NaN: loud, and without writing out of bounds.
    `work`: of a step without requests, over the same lists."""

    def __init__(
        self,
        *,
        device: torch.device,
        max_decodes: int,
        max_prefill_tokens: int,
        max_prefills: int,
        max_seq_len: int,
        num_query_heads: int,
        num_kv_heads: int,
        head_size: int,
        num_programs: int,
        max_decode_queries: int = 1,
        sliding_window: int | None = None,
        max_decode_keys: int | None = None,
        partial_out: torch.Tensor | None = None,
        partial_lse: torch.Tensor | None = None,
    ) -> None:
        """Allocate. `partial_*` of another workspace may be given to share its scratch.
        Raises ValueError: heads that do not divide, too many heads or query tokens for a tile, or
        scratch that is too small."""
        if num_query_heads % num_kv_heads:
            raise ValueError(
                f"{num_query_heads} query heads over {num_kv_heads} key/value heads: the first must"
                " be a multiple of the second"
            )
        decode_rows = max_decode_queries * (num_query_heads // num_kv_heads)
        if max_decodes and decode_rows > MOST_DECODE_ROWS:
            raise ValueError(
                f"{max_decode_queries} query tokens a decode are {decode_rows} rows, the limit is"
                f" {MOST_DECODE_ROWS}; plan such requests as prefills"
            )
        self._max_decodes, self._max_prefills = max_decodes, max_prefills
        self._max_prefill_tokens = max_prefill_tokens
        most_splits = split_bound(max_seq_len, sliding_window, max_decode_queries)
        capacity = max_decodes * most_splits
        if max_decode_keys is not None:
            capacity = min(capacity, max_decode_keys // SHORTEST_SPLIT + 2 * max_decodes)
        self._tile_queries = queries_per_tile(num_query_heads // num_kv_heads)
        max_tiles = max_prefill_tokens // self._tile_queries + max_prefills

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rows = capacity * max_decode_queries * num_query_heads
        if partial_out is None:
            partial_out = torch.empty(rows * head_size, dtype=torch.float32, device=device)
        if partial_lse is None:
            partial_lse = torch.empty(rows, dtype=torch.float32, device=device)
        if partial_out.numel() < rows * head_size or partial_lse.numel() < rows:
            raise ValueError(
                f"scratch of {partial_out.numel()} and {partial_lse.numel()} numbers, but"
                f" {rows * head_size} and {rows} are needed; share the scratch of the largest group"
            )
        self.work = AttentionWork(
            num_decodes=0,
            num_prefills=0,
            max_decode_queries=max_decode_queries,
            max_tiles=0,
            split_bound=most_splits,
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            sliding_window=sliding_window,
            splits_W8=integers(capacity, ENTRY),
            first_split_R1=integers(max_decodes + 1),
            tiles_W8=integers(max_tiles, ENTRY),
            num_tiles_1=integers(1),
            partial_out=partial_out,
            partial_lse=partial_lse,
            num_programs=num_programs,
        )

    def plan(
        self,
        *,
        query_start_loc_R1: torch.Tensor,
        seq_lens_R: torch.Tensor,
        num_decodes: int,
        num_prefills: int = 0,
        num_prefill_tokens: int = 0,
    ) -> AttentionWork:
        """List the work of a step; launches at most two kernels and does not wait for them.

        Overwrites the lists of the step before. Safe to capture in a CUDA graph: with equal host
        numbers the launches are equal.

        Args:
            query_start_loc_R1: int32 [num_decodes + num_prefills + 1 or more]. Decodes come first.
                A padding request has no tokens, or a sequence length of 0.
            seq_lens_R: int32, with this step's tokens.
            num_prefill_tokens: query tokens of all prefills, or more.

        Raises:
            TypeError: a tensor is not int32.
            ValueError: more requests or tokens than the workspace was made for.
        """
        for tensor, name in ((query_start_loc_R1, "query_start_loc"), (seq_lens_R, "seq_lens")):
            if tensor.dtype != torch.int32:
                raise TypeError(f"{name} is {tensor.dtype}; give int32")
        if seq_lens_R.shape[0] < num_decodes + num_prefills:
            raise ValueError(
                f"{num_decodes} decodes and {num_prefills} prefills, but only"
                f" {seq_lens_R.shape[0]} sequence lengths; give one a request"
            )
        for value, limit, name in (
            (num_decodes, self._max_decodes, "decodes"),
            (num_prefills, self._max_prefills, "prefills"),
            (num_prefill_tokens, self._max_prefill_tokens, "prefill tokens"),
        ):
            if value > limit:
                raise ValueError(f"{value} {name}, the limit is {limit}; plan fewer a step")
        lists, work = (query_start_loc_R1, seq_lens_R), self.work
        if num_decodes:
            list_splits_kernel[(num_decodes,)](
                *lists,
                work.splits_W8,
                work.first_split_R1,
                num_decodes,
                work.splits_W8.shape[0],
                # without a window every key is inside it; half of int32 leaves room for sums
                1 << 30 if work.sliding_window is None else work.sliding_window,
                **_SPLITS_CONSTANTS,
            )
        if num_prefills:
            list_tiles_kernel[(num_prefills,)](
                *lists,
                work.tiles_W8,
                work.num_tiles_1,
                num_decodes,
                num_prefills,
                work.tiles_W8.shape[0],
                TILE_QUERIES=self._tile_queries,
                BLOCK_R=256,
                BLOCK_W=64,
            )
        return replace(
            work,
            num_decodes=num_decodes,
            num_prefills=num_prefills,
            max_tiles=num_prefill_tokens // self._tile_queries + num_prefills,
        )


_SPLITS_CONSTANTS: dict[str, int] = {
    "SHORTEST": SHORTEST_SPLIT,
    "MOST": MOST_SPLITS,
    "BLOCK_R": 256,
    "BLOCK_W": 64,
}
