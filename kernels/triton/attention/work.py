"""What a step's attention has to do, listed on the GPU once a step and read by every layer.

Buffers have a fixed capacity and grids follow host numbers alone: a captured step can be replayed.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from kernels.triton.attention.lists import (
    ENTRY,
    KEY_TILE,
    MOST_SPLIT_PREFILLS,
    MOST_SPLITS,
    SHORT_SPAN,
    SHORTEST_SPLIT,
    SHORTEST_TILE_SPLIT,
    SPLIT_PROGRAMS,
    list_work_kernel,
    most_decode_rows,
    queries_per_tile,
    split_bound,
    tile_rows,
)
from kernels.triton.device_limits import dependent_launch


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionVariant:
    """Which of two ways a workspace's launches go; chosen when it is made, until a run has decided.

    Attributes:
        prompts_in_gluon: prompts that `gluon_prefill.takes` take its kernel.
        float8_by_bits: float8 keys and values become 16-bit ones by their bits, see `tile.widen`.
    """

    prompts_in_gluon: bool = False
    float8_by_bits: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """The lists of one step and the host numbers that launches are made from.

    Attributes:
        num_requests: R.
        has_decodes: whether requests of at most `max_decode_queries` tokens may be among them;
            they are cut into splits of their keys, all others into tiles of queries.
        max_tiles: at least as many as there are; 0: there are none.
        max_split_prefills: at least as many prefills as have the keys of their tiles split.
        max_decode_queries: 0: there are only tiles.
        split_bound: most splits of a decode.
        tile_slots: entries of a prefill that is split; 0: none is.
        num_query_heads, num_kv_heads, sliding_window: what the lists were made for.
        both_sides: tokens see all of their sequence, or a window on both sides.
        splits_W8, tiles_W8, tile_splits_W8, counts_3: see ENTRY and the kernel.
        partial_out, partial_lse: float32, flat, scratch for the splits' results; may be shared by
            all groups of layers, because layers run one after another.
        num_scratch_rows: of them, for these layers.
        decode_arrivals_RK, tile_arrivals: int32, how many splits of a request (of a tile) are done
            and not joined; all 0 between two launches.
        num_programs: persistent programs of the decode kernel, as many as run at once.
        ends_T: int32 [T], see `AttentionMetadata`; read for prefills.
        variant: of the kernels.
    """

    num_requests: int
    has_decodes: bool
    max_tiles: int
    max_split_prefills: int
    max_decode_queries: int
    split_bound: int
    tile_slots: int
    num_query_heads: int
    num_kv_heads: int
    sliding_window: int | None
    both_sides: bool
    splits_W8: torch.Tensor
    tiles_W8: torch.Tensor
    tile_splits_W8: torch.Tensor
    counts_3: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor
    num_scratch_rows: int
    decode_arrivals_RK: torch.Tensor
    tile_arrivals: torch.Tensor
    num_programs: int
    ends_T: torch.Tensor | None = None
    variant: AttentionVariant = AttentionVariant()

    @property
    def host_numbers(self) -> tuple[Hashable, ...]:
        """All of them that launches follow from."""
        return (
            self.num_requests,
            self.max_tiles,
            self.max_split_prefills,
            self.max_decode_queries,
            self.split_bound,
            self.tile_slots,
            self.num_query_heads,
            self.num_kv_heads,
            self.sliding_window,
            self.both_sides,
            self.num_scratch_rows,
            self.num_programs,
            self.variant,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkLimits:
    """What a workspace is made for, of one group of layers with equal heads and window.

    Attributes:
        max_requests, max_prefill_tokens, max_seq_len: of a step.
        max_decode_queries: requests of at most so many tokens are decodes; 0: none is.
        splits_tiles: few queries that see many keys have these split: a GPU is not filled by their
            tiles. Then a token's bits depend on the chunk that it is in.
        both_sides: a token also sees what comes behind it. There are only tiles, whose keys are not
            split.
        shortest_split: see `SHORTEST_SPLIT`, which is what has run; 64 is to be tried.
    Raises ValueError: heads that do not divide, too many heads or query tokens for a tile."""

    max_requests: int
    max_prefill_tokens: int
    max_seq_len: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    max_decode_queries: int = 1
    sliding_window: int | None = None
    splits_tiles: bool = True
    both_sides: bool = False
    shortest_split: int = SHORTEST_SPLIT

    def __post_init__(self) -> None:
        if self.num_query_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_query_heads} query heads over {self.num_kv_heads} key/value heads: the "
                "first must be a multiple of the second"
            )
        if self.decode_rows > (limit := most_decode_rows(self.head_size)):
            raise ValueError(
                f"{self.max_decode_queries} query tokens a decode are {self.decode_rows} rows, the "
                f"limit is {limit}; plan such requests as prefills"
            )

    @property
    def decode_rows(self) -> int:
        return self.max_decode_queries * (self.num_query_heads // self.num_kv_heads)

    @property
    def tile_queries(self) -> int:
        return queries_per_tile(self.num_query_heads // self.num_kv_heads, self.head_size)

    @property
    def split_bound(self) -> int:
        return split_bound(
            self.max_seq_len, self.sliding_window, self.max_decode_queries, self.shortest_split
        )

    @property
    def tile_slots(self) -> int:
        """Entries of a prefill that is split; 0: none can be."""
        slots = SPLIT_PROGRAMS // self.num_kv_heads
        is_long = self.max_seq_len > SHORTEST_TILE_SPLIT
        return slots if self.splits_tiles and is_long and slots > 1 else 0

    @property
    def num_split_prefills(self) -> int:
        return min(MOST_SPLIT_PREFILLS, self.max_requests)

    @property
    def num_rows(self) -> int:
        """Of scratch: those of decodes, then, in the same memory, those of prefills."""
        decodes = 0
        if self.max_decode_queries:
            decodes = self.max_requests * self.split_bound * self.decode_rows * self.num_kv_heads
        tiles = self.num_split_prefills * self.tile_slots * self.num_kv_heads
        return max(decodes, tiles * tile_rows(self.head_size))


class AttentionWorkspace:
    """The lists of one group of layers, allocated once.
    `work`: of a step without requests, over the same lists."""

    def __init__(
        self,
        limits: WorkLimits,
        *,
        device: torch.device,
        num_programs: int,
        partial_out: torch.Tensor | None = None,
        partial_lse: torch.Tensor | None = None,
        variant: AttentionVariant = AttentionVariant(),
    ) -> None:
        """Allocate. `partial_*` of another workspace may be given to share its scratch.
        Raises ValueError: scratch that is too small."""
        self.limits = limits
        capacity = 0
        if limits.max_decode_queries:
            capacity = limits.max_requests * limits.split_bound

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        rows, numbers = limits.num_rows, limits.num_rows * limits.head_size
        if partial_out is None:
            partial_out = torch.empty(numbers, dtype=torch.float32, device=device)
        if partial_lse is None:
            partial_lse = torch.empty(rows, dtype=torch.float32, device=device)
        if partial_out.numel() < numbers or partial_lse.numel() < rows:
            raise ValueError(
                f"scratch of {partial_out.numel()} and {partial_lse.numel()} numbers, but"
                f" {numbers} and {rows} are needed; share the scratch of the largest group"
            )
        slots = limits.num_split_prefills * limits.tile_slots
        self.work = AttentionWork(
            num_requests=0,
            has_decodes=False,
            max_tiles=0,
            max_split_prefills=0,
            max_decode_queries=limits.max_decode_queries,
            split_bound=limits.split_bound,
            tile_slots=limits.tile_slots,
            num_query_heads=limits.num_query_heads,
            num_kv_heads=limits.num_kv_heads,
            sliding_window=limits.sliding_window,
            both_sides=limits.both_sides,
            splits_W8=integers(capacity, ENTRY),
            tiles_W8=integers(
                self._max_tiles(limits.max_prefill_tokens, limits.max_requests), ENTRY
            ),
            tile_splits_W8=integers(limits.max_requests * limits.tile_slots, ENTRY),
            counts_3=integers(3),
            partial_out=partial_out,
            partial_lse=partial_lse,
            num_scratch_rows=rows,
            decode_arrivals_RK=integers(limits.max_requests, limits.num_kv_heads),
            tile_arrivals=integers(max(1, slots) * limits.num_kv_heads),
            num_programs=num_programs,
            variant=variant,
        )

    def _max_tiles(self, num_tokens: int, num_prefills: int) -> int:
        """Most tiles of as many prefills with so many tokens at most."""
        return num_tokens // self.limits.tile_queries + num_prefills

    def plan(
        self,
        *,
        query_start_loc_R1: torch.Tensor,
        seq_lens_R: torch.Tensor,
        has_decodes: bool = True,
        num_prefills: int = 0,
        num_prefill_tokens: int = 0,
        num_long_prefills: int | None = None,
        ends_T: torch.Tensor | None = None,
    ) -> AttentionWork:
        """List the work of a step; launches one kernel and does not wait for it.

        Overwrites the lists of the step before. Safe to capture in a CUDA graph: with equal host
        numbers the launches are equal, and which requests decode is found on the device.

        Args:
            query_start_loc_R1: int32 [R + 1 or more]. A padding request has no tokens.
            seq_lens_R: int32 [R], with this step's tokens.
            has_decodes: whether requests of at most `max_decode_queries` tokens may be among them.
            num_prefills: requests of more tokens, or more than there are.
            num_prefill_tokens: query tokens of all prefills, or more.
            num_long_prefills: of them those with more than SHORTEST_TILE_SPLIT keys, or more; None:
                perhaps all.
            ends_T: see `AttentionMetadata`; of a request with one token it is that token's own.

        Raises:
            TypeError: a tensor is not int32.
            ValueError: more requests or tokens than the workspace was made for.
        """
        for tensor, name in ((query_start_loc_R1, "query_start_loc"), (seq_lens_R, "seq_lens")):
            if tensor.dtype != torch.int32:
                raise TypeError(f"{name} is {tensor.dtype}; give int32")
        limits, num_requests = self.limits, seq_lens_R.shape[0]
        for value, limit, name in (
            (num_requests, limits.max_requests, "requests"),
            (num_prefill_tokens, limits.max_prefill_tokens, "prefill tokens"),
        ):
            if value > limit:
                raise ValueError(f"{value} {name}, the limit is {limit}; plan fewer a step")
        has_decodes = has_decodes and limits.max_decode_queries > 0
        work, device = self.work, seq_lens_R.device
        if num_requests and (has_decodes or num_prefills):
            list_work_kernel[(num_requests,)](
                query_start_loc_R1,
                seq_lens_R,
                work.splits_W8,
                work.tiles_W8,
                work.tile_splits_W8,
                work.counts_3,
                num_requests,
                # without a window every key is inside it; half of int32 leaves room for sums
                1 << 30 if work.sliding_window is None else work.sliding_window,
                HAS_SPLITS=has_decodes,
                HAS_TILES=num_prefills > 0,
                **list_constants(limits, has_decodes=has_decodes),
                **dependent_launch(device),
            )
        num_long = num_prefills if num_long_prefills is None else num_long_prefills
        return replace(
            work,
            num_requests=num_requests,
            has_decodes=has_decodes and num_requests > 0,
            max_tiles=self._max_tiles(num_prefill_tokens, num_prefills) if num_prefills else 0,
            max_split_prefills=min(num_long, num_prefills) if limits.tile_slots else 0,
            ends_T=ends_T,
        )


def list_constants(limits: WorkLimits, *, has_decodes: bool) -> dict[str, int]:
    """Constants of `list_work_kernel`, but for what a step has."""
    return {
        "QUERIES": limits.max_decode_queries if has_decodes else 0,
        "SHORT": SHORT_SPAN,
        "SHORTEST": limits.shortest_split,
        "MOST": MOST_SPLITS,
        "TILE_QUERIES": limits.tile_queries,
        "TILE_MOST": limits.tile_slots,
        "TILE_SHORTEST": SHORTEST_TILE_SPLIT,
        "KEYS": KEY_TILE,
        "BLOCK_R": 256,
        "BLOCK_W": 64,
    }
