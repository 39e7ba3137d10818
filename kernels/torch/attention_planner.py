"""How a step's attention is cut into pieces that batched products can take."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface.operations import AttentionMetadata, AttentionPlanner, AttentionSpec

Int64Array = npt.NDArray[np.int64]

_TILE_ROWS = 768
"""Queries of a tile times query heads of a key/value head; 256 tokens at 3 heads. Causality is not
used inside a tile, so larger ones waste more; smaller ones make the fused kernel slower. 512-token
chunks were fastest here (3.5 ms, against 4.3 at twice and 4.5 at half the size)."""
_GROUP_KEY_ROWS = 8192
"""Keys of a group times key/value heads: 2 MiB of float32 at head size 64, which stays in the
cache between the gather and the products (at twice to eight times that, decode was 10-80 % slower).
"""
_GROUP_SCORES = 1 << 19
_GATHER_COST = 2
"""The cost of reading a key, in queries that use it."""
_GROUP_COST = 1024
"""The cost of a further group, in key-query pairs."""


@dataclass(frozen=True, slots=True)
class TileGroup:
    """G tiles padded to Q queries and L keys.

    Attributes:
        query_index: token of each padded query [G * Q]; None if they are all tokens in order.
        output_index: rows of the [G * Q] results that are real; None if all are.
        output_token: the token of each real result.
        key_rows: rows of the cache viewed as [B * S * K, D], in the order [G, K, L].
        mask: additive, broadcasts to [G, K, Q * (H / K), L]; None if everything is visible.
        first_distances: of each tile, the position of its first key less that of its first query.
    """

    num_tiles: int
    num_queries: int
    num_keys: int
    query_index: torch.Tensor | None
    output_index: torch.Tensor | None
    output_token: torch.Tensor | None
    key_rows: torch.Tensor
    mask: torch.Tensor | None
    first_distances: tuple[int, ...]
    placed_rows: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """The rows that `rows_in` gave."""

    def rows_in(self, rows_a_block: int, block_stride: int, row_stride: int) -> torch.Tensor:
        """`key_rows` where blocks and rows in them lie so far apart."""
        strides = block_stride, row_stride
        if block_stride == rows_a_block * row_stride:
            return self.key_rows if row_stride == 1 else self.key_rows * row_stride
        if strides not in self.placed_rows:
            blocks, rows = self.key_rows // rows_a_block, self.key_rows % rows_a_block
            self.placed_rows[strides] = blocks * block_stride + rows * row_stride
        return self.placed_rows[strides]


@dataclass(frozen=True, slots=True)
class _Tiles:
    """One entry a tile. Keys are positions [key_start, key_stop) of the request."""

    request: Int64Array
    query_start: Int64Array
    num_queries: Int64Array
    position: Int64Array
    key_start: Int64Array
    key_stop: Int64Array


class TilePlanner:
    """Cuts steps of any group; keeps mask templates.

        requests        chunk of 300 tokens    decode    decode    decode
        tiles           |100|100|100|             |         |         |
        groups          [100] [100] [100]       [ decode    decode ]  [ decode ]   similar lengths

    A tile is a run of queries of one request with the keys that they can see: exactly
    `[position of the first - window + 1, position of the last]`, so that neither a block's tail nor
    what has left the window is read. Tiles of similar shape form a group, padded to its
    largest; large tiles stand alone and their mask is a view of one template, because it depends on
    nothing but the distance between key and query."""

    def __init__(self) -> None:
        self._templates = MaskTemplates()

    def plan(
        self,
        *,
        query_start_loc_R1: Int64Array,
        seq_lens_R: Int64Array,
        block_table_RM: Int64Array,
        spec: AttentionSpec,
        ends_T: npt.NDArray[np.int32] | None = None,
    ) -> tuple[TileGroup, ...]:
        """The groups of a step; every token is a query of exactly one of them."""
        heads_per_kv = spec.num_query_heads // spec.num_kv_heads
        tile_queries = max(16, _TILE_ROWS // heads_per_kv)
        tiles = _cut_tiles(query_start_loc_R1, seq_lens_R, tile_queries, spec, ends_T)
        num_tokens = int(query_start_loc_R1[-1])
        return tuple(
            self._build_group(tiles, members, num_tokens, block_table_RM, spec, ends_T)
            for members in _group_tiles(tiles, spec.num_kv_heads, heads_per_kv)
        )

    def _build_group(
        self,
        tiles: _Tiles,
        members: Int64Array,
        num_tokens: int,
        block_table_RM: Int64Array,
        spec: AttentionSpec,
        ends_T: npt.NDArray[np.int32] | None,
    ) -> TileGroup:
        block_size, num_kv_heads = spec.block_size, spec.num_kv_heads
        heads_per_kv = spec.num_query_heads // num_kv_heads
        sliding_window, dtype = spec.sliding_window, spec.dtype
        num_queries_G = tiles.num_queries[members]
        key_start_G1 = tiles.key_start[members, None]
        key_stop_G1 = tiles.key_stop[members, None]
        num_tiles, num_queries = len(members), int(num_queries_G.max())
        num_keys = int((key_stop_G1 - key_start_G1).max())

        # Padding repeats the tile's own last key and query: finite numbers of the same request.
        key_GL = key_start_G1 + np.arange(num_keys)
        read_GL = np.minimum(key_GL, key_stop_G1 - 1)
        logical_GL, offset_GL = np.divmod(read_GL, block_size)
        slots_GL = block_table_RM[tiles.request[members, None], logical_GL] * block_size + offset_GL
        key_rows = slots_GL[:, None, :] * num_kv_heads + np.arange(num_kv_heads)[None, :, None]
        step_Q = np.arange(num_queries)
        step_GQ = np.minimum(step_Q, num_queries_G[:, None] - 1)
        query_GQ = tiles.query_start[members, None] + step_GQ

        query_index = output_index = output_token = None
        flat = query_GQ.reshape(-1)
        if flat.size != num_tokens or not np.array_equal(flat, np.arange(num_tokens)):
            query_index = output_token = torch.from_numpy(flat)
            real = np.flatnonzero((step_Q < num_queries_G[:, None]).reshape(-1))
            if real.size != flat.size:
                output_index = torch.from_numpy(real)
                output_token = torch.from_numpy(flat[real])

        mask: torch.Tensor | None = None
        if num_tiles == 1 and not spec.bidirectional and ends_T is None:
            if num_queries > 1:
                mask = self._templates.get(
                    num_before=int(tiles.position[members[0]] - key_start_G1[0, 0]),
                    num_queries=num_queries,
                    heads_per_kv=heads_per_kv,
                    sliding_window=sliding_window,
                    dtype=dtype,
                )
        elif num_queries > 1 or bool((key_GL >= key_stop_G1).any()):
            ends_GQ = None if ends_T is None else ends_T[query_GQ]
            query_GQ = tiles.position[members, None] + step_GQ
            mask = _group_mask(key_GL, query_GQ, key_stop_G1, heads_per_kv, spec, ends_GQ)
        return TileGroup(
            num_tiles=num_tiles,
            num_queries=num_queries,
            num_keys=num_keys,
            query_index=query_index,
            output_index=output_index,
            output_token=output_token,
            key_rows=torch.from_numpy(key_rows.reshape(-1)),
            mask=mask,
            first_distances=tuple((tiles.key_start - tiles.position)[members].tolist()),
        )


def _cut_tiles(
    query_start_loc_R1: Int64Array,
    seq_lens_R: Int64Array,
    tile_queries: int,
    spec: AttentionSpec,
    ends_T: npt.NDArray[np.int32] | None,
) -> _Tiles:
    num_queries_R = np.diff(query_start_loc_R1)
    num_tiles_R = -(-num_queries_R // tile_queries)
    # as equal as whole numbers allow: 130 queries are 65 + 65, not 128 + 2
    size_R = -(-num_queries_R // np.maximum(num_tiles_R, 1))
    request = np.repeat(np.arange(len(seq_lens_R)), num_tiles_R)
    first_R = np.cumsum(num_tiles_R) - num_tiles_R
    offset = (np.arange(len(request)) - first_R[request]) * size_R[request]
    num_queries = np.minimum(size_R[request], num_queries_R[request] - offset)
    position = (seq_lens_R - num_queries_R)[request] + offset
    key_start = np.zeros_like(position)
    key_stop = seq_lens_R[request] if spec.bidirectional else position + num_queries
    if spec.sliding_window is not None:
        key_start = np.maximum(key_start, position - spec.sliding_window + 1)
        key_stop = np.minimum(key_stop, position + num_queries - 1 + spec.sliding_window)
    if ends_T is not None:
        key_stop = ends_T[query_start_loc_R1[request] + offset + num_queries - 1].astype(np.int64)
    return _Tiles(
        request=request,
        query_start=query_start_loc_R1[request] + offset,
        num_queries=num_queries,
        position=position,
        key_start=key_start,
        key_stop=key_stop,
    )


def _group_tiles(tiles: _Tiles, num_kv_heads: int, heads_per_kv: int) -> list[Int64Array]:
    """Cut the tiles, ordered by shape, where padding would cost more than a group of its own."""
    num_keys = tiles.key_stop - tiles.key_start
    order = np.lexsort((num_keys, tiles.num_queries))
    cuts: list[int] = []
    first, area = 0, 0
    queries_of, keys_of = tiles.num_queries[order].tolist(), num_keys[order].tolist()
    most_keys = 0
    for index, (queries, keys) in enumerate(zip(queries_of, keys_of, strict=True)):
        own_area = (queries + _GATHER_COST) * keys
        count, widest = index - first + 1, max(most_keys, keys)
        padded_keys = count * widest
        if index > first and (
            padded_keys * num_kv_heads > _GROUP_KEY_ROWS
            or padded_keys * num_kv_heads * heads_per_kv * queries > _GROUP_SCORES
            or padded_keys * (queries + _GATHER_COST)
            > 1.25 * (area + own_area) + min(_GROUP_COST, area)
        ):
            cuts.append(index)
            first, area, widest = index, 0, keys
        area, most_keys = area + own_area, widest
    return np.split(order, cuts) if len(order) else []


def _group_mask(
    key_GL: Int64Array,
    query_GQ: Int64Array,
    key_stop_G1: Int64Array,
    heads_per_kv: int,
    spec: AttentionSpec,
    ends_GQ: npt.NDArray[np.int32] | None,
) -> torch.Tensor:
    """Additive [G, 1, Q * heads_per_kv, L], or [G, 1, 1, L] for one query a tile.

    Keys past a tile's own are later than its last query, so causality hides them too."""
    key_G1L, query_GQ1 = key_GL[:, None, :], query_GQ[:, :, None]
    if spec.bidirectional:
        visible_GQL = np.broadcast_to(
            key_G1L < key_stop_G1[:, :, None], (*query_GQ.shape, key_GL.shape[1])
        ).copy()
    elif ends_GQ is not None:
        visible_GQL = key_G1L < ends_GQ[:, :, None]
    else:
        visible_GQL = key_G1L <= query_GQ1
    if spec.sliding_window is not None:
        visible_GQL &= key_G1L > query_GQ1 - spec.sliding_window
        if spec.bidirectional:
            visible_GQL &= key_G1L < query_GQ1 + spec.sliding_window
    if visible_GQL.shape[1] > 1:
        visible_GQL = np.repeat(visible_GQL, heads_per_kv, axis=1)
    mask = torch.zeros(visible_GQL.shape, dtype=spec.dtype)
    return mask.masked_fill_(torch.from_numpy(~visible_GQL), float("-inf")).unsqueeze(1)


_SMALLEST_CONTEXT = 1024


class MaskTemplates:
    """Causal masks of any context length, as views of one template for each (heads, window, dtype).

    A mask depends only on the distance from query to key, so that moving a window over the columns
    of one template gives the mask of every tile:

                  columns: key position - position of the tile's first query
                   -W ......... -3 -2 -1   0  1  2  3
      query 0       0 ......... 0  0  0    0  x  x  x      x is -inf, W the widest context so far
      query 1       0 ......... 0  0  0    0  0  x  x
      query 2       0 ......... 0  0  0    0  0  0  x

    Each row is repeated for the query heads that share a key/value head. A template doubles when a
    longer context comes."""

    def __init__(self) -> None:
        self._templates: dict[tuple[int, int | None, torch.dtype], torch.Tensor] = {}
        self._num_before: dict[tuple[int, int | None, torch.dtype], int] = {}

    def get(
        self,
        *,
        num_before: int,
        num_queries: int,
        heads_per_kv: int,
        sliding_window: int | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Mask of a tile whose keys begin `num_before` before its first query and end with its
        last: a view [1, 1, num_queries * heads_per_kv, num_before + num_queries]."""
        key = (heads_per_kv, sliding_window, dtype)
        template = self._templates.get(key)
        rows = num_queries * heads_per_kv
        width = self._num_before.get(key, 0)
        if template is None or template.shape[0] < rows or width < num_before:
            most_queries = num_queries
            if template is not None:
                most_queries = max(num_queries, template.shape[0] // heads_per_kv)
            width = max(width, _SMALLEST_CONTEXT)
            while width < num_before:
                width *= 2
            template = _build(width, most_queries, heads_per_kv, sliding_window, dtype)
            self._templates[key], self._num_before[key] = template, width
        return template[:rows, width - num_before : width + num_queries][None, None]


def _build(
    num_before: int,
    num_queries: int,
    heads_per_kv: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    query_Q1 = torch.arange(num_queries).unsqueeze(1)
    key_L = torch.arange(-num_before, num_queries)
    hidden_QL = key_L > query_Q1
    if sliding_window is not None:
        hidden_QL |= key_L <= query_Q1 - sliding_window
    mask_QL = torch.zeros(hidden_QL.shape, dtype=dtype).masked_fill_(hidden_QL, float("-inf"))
    return mask_QL.repeat_interleave(heads_per_kv, dim=0)


class TorchAttentionPlanner(AttentionPlanner):
    """See `AttentionPlanner`. The groups of a backend share `tiles`, for its masks."""

    def __init__(self, tiles: TilePlanner, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self._tiles = tiles

    def _plan_work(
        self, step: AttentionMetadata, num_decodes: int, num_decode_tokens: int
    ) -> tuple[TileGroup, ...]:
        return self._tiles.plan(
            query_start_loc_R1=step.query_start_loc_R1.numpy().astype(np.int64),
            seq_lens_R=step.seq_lens_R.numpy().astype(np.int64),
            block_table_RM=step.block_table_RM.numpy().astype(np.int64),
            spec=self._spec,
            ends_T=None if step.ends_T is None else step.ends_T.numpy(),
        )
