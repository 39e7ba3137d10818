"""How a step's attention is cut into pieces: decodes into splits of their keys, prefills into tiles
of queries, and the keys of a few tiles into splits, too. A request's cut depends on it alone."""

import torch
import triton
import triton.language as tl

from kernels.interface.long_prefills import LONG_SEQUENCE, MOST_SPLIT_ROWS

SHORT_SPAN = 1024
SHORTEST_SPLIT = 128
"""Of requests that see at most SHORT_SPAN keys; of others twice that. A split costs a program about
the reading of as many keys; more splits are for a request that is alone."""
MOST_SPLITS = 64
"""Of a request whose span is a whole number of splits; others can touch two more, see
`split_bound`."""
KEY_TILE = 128
"""Splits of tiles begin at multiples of the most keys that a prefill multiplies at once."""
SPLIT_PROGRAMS = MOST_SPLIT_ROWS // 64
"""Tiles x splits x key/value heads of one prefill at most: about a GPU's multiprocessors."""
SHORTEST_TILE_SPLIT = LONG_SEQUENCE
"""Keys; fewer are not worth the joining."""
MOST_SPLIT_PREFILLS = 16
"""Of one launch: scratch is for so many. More take more launches, and no other bits."""
ENTRY = 8
"""int32 of an entry. Keys are positions of the sequence; tokens are rows of q.

splits       request, key start, key stop, first token, token stop, position of first token,
             the request's first split, its splits
tiles        request, first token, token stop, position of first token, 0, 0, 0, 0; of prefills
             whose keys are not split, a request's last tile first
tile splits  request, first token, token stop, position of first token, key start, key stop,
             the tile's first entry, its splits; the n-th prefill that is split has a fixed number
             of entries from n times that number on, and those behind its last have 0 splits
"""


def split_length(span: int, shortest: int = SHORTEST_SPLIT) -> int:
    """Keys of a split of a request that sees `span` keys: 128 up to 1024 of them, then 256, doubled
    until 64 splits suffice."""
    if span <= SHORT_SPAN:
        return shortest
    length = 2 * shortest
    while length * MOST_SPLITS < span:
        length *= 2
    return length


def split_bound(
    max_seq_len: int,
    sliding_window: int | None,
    max_queries: int,
    shortest: int = SHORTEST_SPLIT,
) -> int:
    """Most splits that a decode request can have; a window's first split may be cut anywhere."""
    span = max_seq_len if sliding_window is None else min(max_seq_len, sliding_window)
    longest = max(
        -(-min(span, SHORT_SPAN) // shortest),
        min(MOST_SPLITS, -(-span // (2 * shortest))),
    )
    if span == max_seq_len:
        return longest
    return longest + 1 + -(-max_queries // shortest)


def tile_split_length(num_tiles: int, span: int, num_kv_heads: int) -> int:
    """Keys of a split of a prefill of `num_tiles` tiles that sees `span` keys, a multiple of a
    tile's; `span` or more: it is not split. A function of this prefill alone."""
    most = SPLIT_PROGRAMS // (max(1, num_tiles) * num_kv_heads)
    if most < 2:
        return max(span, SHORTEST_TILE_SPLIT)
    return max(SHORTEST_TILE_SPLIT, -(-span // most // KEY_TILE) * KEY_TILE)


def tile_rows(head_size: int) -> int:
    """Rows of a prefill tile: query tokens times query heads of a key/value head. Results of more
    would not fit in the registers of its eight warps."""
    return 128 if head_size <= 256 else 64


def most_decode_rows(head_size: int) -> int:
    """Most rows of a decode tile: it has half of the warps of a prefill tile."""
    return tile_rows(head_size) // 2


def queries_per_tile(group_size: int, head_size: int) -> int:
    """Query tokens of a prefill tile at `group_size` query heads a key/value head."""
    return tile_rows(head_size) // group_size


def reference_splits(
    query_start_loc_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    max_decode_queries: int,
    sliding_window: int | None,
) -> list[list[int]]:
    """The list of splits as its definition reads."""
    starts = query_start_loc_R1.tolist()
    entries: list[list[int]] = []
    for request, seq_len in enumerate(seq_lens_R.tolist()):
        start, stop = starts[request], starts[request + 1]
        position, low, span = seq_len - (stop - start), 0, seq_len
        if sliding_window is not None:
            low, span = max(0, position - sliding_window + 1), min(seq_len, sliding_window)
        length = split_length(span)
        keys = [
            (max(low, first), min(seq_len, first + length))
            for first in range(low // length * length, seq_len, length)
        ]
        if 0 < stop - start <= max_decode_queries:
            shared = (start, stop, position, len(entries), len(keys))
            entries += [[request, *pair, *shared] for pair in keys]
    return entries


def reference_tiles(
    query_start_loc_R1: torch.Tensor,
    seq_lens_R: torch.Tensor,
    *,
    max_decode_queries: int,
    tile_queries: int,
    num_kv_heads: int = 1,
    splits_tiles: bool = False,
    sliding_window: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """The lists of prefill tiles and of their splits as their definitions read."""
    starts, slots = query_start_loc_R1.tolist(), SPLIT_PROGRAMS // num_kv_heads
    entries: list[list[int]] = []
    split_entries: list[list[int]] = []
    for request, seq_len in enumerate(seq_lens_R.tolist()):
        start, stop = starts[request], starts[request + 1]
        if stop - start <= max_decode_queries:
            continue
        tiles = list(reversed(range(start, stop, tile_queries)))
        base = 0
        if sliding_window is not None:
            base = max(0, seq_len - (stop - start) - sliding_window + 1) // KEY_TILE * KEY_TILE
        length = tile_split_length(len(tiles), seq_len - base, num_kv_heads)
        splits = -(-(seq_len - base) // length) if splits_tiles else 1
        if splits == 1:
            entries += [
                [request, first, stop, seq_len - stop + first, 0, 0, 0, 0] for first in tiles
            ]
            continue
        before = len(split_entries)
        for first in tiles:
            shared = (len(split_entries), splits)
            for start_key in range(base, base + splits * length, length):
                keys = (start_key, start_key + length)
                split_entries.append([request, first, stop, seq_len - stop + first, *keys, *shared])
        split_entries += [[0] * ENTRY] * (slots - (len(split_entries) - before))
    return entries, split_entries


@triton.jit
def _cut_decode(
    start, stop, seq_len, window, SHORT: tl.constexpr, SHORTEST: tl.constexpr, MOST: tl.constexpr,
    QUERIES: tl.constexpr,
):  # fmt: skip
    """(first key, split length, first split, number of splits) of scalars or vectors."""
    low = tl.maximum(seq_len - (stop - start) - window + 1, 0)
    span = tl.minimum(seq_len, window)
    length = tl.where(span <= SHORT, SHORTEST, 2 * SHORTEST)
    for _ in tl.static_range(18):
        length = tl.where(length.to(tl.int64) * MOST < span, length * 2, length)
    first = low // length
    is_decode = (stop > start) & (stop - start <= QUERIES)
    count = tl.where(is_decode, tl.maximum((seq_len + length - 1) // length - first, 0), 0)
    return low, length, first, count


@triton.jit
def _cut_prefill(
    start, stop, seq_len, window, TILE_QUERIES: tl.constexpr, QUERIES: tl.constexpr,
    MOST: tl.constexpr, SHORTEST: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """(first key, split length, tiles, splits of each) of scalars or vectors. MOST 0: no splits."""
    queries = tl.where(stop - start > QUERIES, stop - start, 0)
    tiles = (queries + TILE_QUERIES - 1) // TILE_QUERIES
    base = tl.maximum(seq_len - queries - window + 1, 0) // KEYS * KEYS
    length = tl.maximum(seq_len - base, 1)
    most = MOST // tl.maximum(tiles, 1)
    shortest = tl.where(most < 2, tl.maximum(length, SHORTEST), SHORTEST)
    if MOST > 0:
        part = (length + tl.maximum(most, 1) - 1) // tl.maximum(most, 1)
        length = tl.maximum((part + KEYS - 1) // KEYS * KEYS, shortest)
    splits = tl.where(tiles > 0, (seq_len - base + length - 1) // length, 1)
    return base, length, tiles, splits


@triton.jit(do_not_specialize=["num_requests", "window"])
def list_work_kernel(
    query_start_loc_R1,  # int32 [R + 1]
    seq_lens_R,  # int32 [R]
    splits_W8,  # int32 [W, 8], written if HAS_SPLITS
    tiles_W8,  # int32 [W, 8], written if HAS_TILES
    tile_splits_W8,  # int32 [W, 8], likewise
    counts_3,  # int32 [3]: splits; tiles; prefills whose tiles are split
    num_requests,  # R
    window,
    QUERIES: tl.constexpr,  # requests of at most so many tokens are decodes
    SHORT: tl.constexpr,
    SHORTEST: tl.constexpr,
    MOST: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    TILE_MOST: tl.constexpr,  # entries of a prefill whose tiles are split; 0: none are
    TILE_SHORTEST: tl.constexpr,
    KEYS: tl.constexpr,  # see KEY_TILE
    HAS_SPLITS: tl.constexpr,
    HAS_TILES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program r counts the entries of the requests before it and writes those of request r."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    request = tl.program_id(0)
    splits_before = 0
    tiles_before = 0
    split_before = 0
    for chunk in range(0, request, BLOCK_R):
        request_R = chunk + tl.arange(0, BLOCK_R)
        mask_R = request_R < request
        start_R = tl.load(query_start_loc_R1 + request_R, mask=mask_R, other=0)
        stop_R = tl.load(query_start_loc_R1 + request_R + 1, mask=mask_R, other=0)
        seq_len_R = tl.load(seq_lens_R + request_R, mask=mask_R, other=0)
        if HAS_SPLITS:
            _, _, _, count_R = _cut_decode(
                start_R, stop_R, seq_len_R, window, SHORT, SHORTEST, MOST, QUERIES
            )
            splits_before += tl.sum(tl.where(mask_R, count_R, 0), axis=0)
        if HAS_TILES:
            _, _, tiles_R, parts_R = _cut_prefill(
                start_R, stop_R, seq_len_R, window, TILE_QUERIES, QUERIES, TILE_MOST, TILE_SHORTEST,
                KEYS,
            )  # fmt: skip
            tiles_before += tl.sum(tl.where(mask_R & (parts_R == 1), tiles_R, 0), axis=0)
            split_before += tl.sum((mask_R & (parts_R > 1)).to(tl.int32), axis=0)
    start = tl.load(query_start_loc_R1 + request)
    stop = tl.load(query_start_loc_R1 + request + 1)
    seq_len = tl.load(seq_lens_R + request)
    is_last = request == num_requests - 1
    if HAS_SPLITS:
        low, length, first, count = _cut_decode(
            start, stop, seq_len, window, SHORT, SHORTEST, MOST, QUERIES
        )
        if is_last:
            tl.store(counts_3, splits_before + count)
        for chunk in range(0, count, BLOCK_W):
            index_W = chunk + tl.arange(0, BLOCK_W)
            mask_W = index_W < count
            entry_W = splits_W8 + (splits_before + index_W).to(tl.int64) * 8
            key_W = (first + index_W) * length
            zero_W = index_W * 0
            tl.store(entry_W + 0, zero_W + request, mask=mask_W)
            tl.store(entry_W + 1, tl.maximum(key_W, low), mask=mask_W)
            tl.store(entry_W + 2, tl.minimum(key_W + length, seq_len), mask=mask_W)
            tl.store(entry_W + 3, zero_W + start, mask=mask_W)
            tl.store(entry_W + 4, zero_W + stop, mask=mask_W)
            tl.store(entry_W + 5, zero_W + seq_len - (stop - start), mask=mask_W)
            tl.store(entry_W + 6, zero_W + splits_before, mask=mask_W)
            tl.store(entry_W + 7, zero_W + count, mask=mask_W)
    if HAS_TILES:
        base, length, tiles, parts = _cut_prefill(
            start, stop, seq_len, window, TILE_QUERIES, QUERIES, TILE_MOST, TILE_SHORTEST, KEYS
        )
        is_split = parts > 1
        if is_last:
            tl.store(counts_3 + 1, tiles_before + tl.where(is_split, 0, tiles))
            tl.store(counts_3 + 2, split_before + is_split.to(tl.int32))
        entries = tiles_W8 + tl.cast(tiles_before, tl.int64) * 8
        number = tiles
        if is_split:
            entries = tile_splits_W8 + tl.cast(split_before, tl.int64) * (TILE_MOST * 8)
            number = TILE_MOST
        for chunk in range(0, number, BLOCK_W):
            index_W = chunk + tl.arange(0, BLOCK_W)
            mask_W = index_W < number
            entry_W = entries + index_W * 8
            is_entry_W = index_W < tiles * parts
            tile_W = index_W // parts
            split_W = index_W % parts
            token_W = start + (tiles - 1 - tile_W) * TILE_QUERIES
            key_W = tl.where(is_split, base + split_W * length, 0)
            tile_first_W = split_before * TILE_MOST + tile_W * parts
            zero_W = index_W * 0
            tl.store(entry_W + 0, tl.where(is_entry_W, request, zero_W), mask=mask_W)
            tl.store(entry_W + 1, tl.where(is_entry_W, token_W, zero_W), mask=mask_W)
            tl.store(entry_W + 2, tl.where(is_entry_W, stop, zero_W), mask=mask_W)
            tl.store(entry_W + 3, tl.where(is_entry_W, seq_len - stop + token_W, 0), mask=mask_W)
            is_entry_W = is_entry_W & is_split
            tl.store(entry_W + 4, tl.where(is_entry_W, key_W, 0), mask=mask_W)
            tl.store(entry_W + 5, tl.where(is_entry_W, key_W + length, 0), mask=mask_W)
            tl.store(entry_W + 6, tl.where(is_entry_W, tile_first_W, 0), mask=mask_W)
            tl.store(entry_W + 7, tl.where(is_entry_W, parts, zero_W), mask=mask_W)
