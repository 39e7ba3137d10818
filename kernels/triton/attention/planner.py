"""`AttentionPlanner` of the Triton backend: one workspace a KV-cache group, with shared scratch."""

import torch

from kernels.interface.operations import AttentionMetadata, AttentionPlanner, AttentionSpec
from kernels.triton.attention import decode as attention_decode
from kernels.triton.attention.latent import limits_of
from kernels.triton.attention.lists import most_decode_rows, tile_rows
from kernels.triton.attention.work import AttentionWork, AttentionWorkspace, WorkLimits
from kernels.triton.device_limits import LARGEST_HEAD, SHORT_SHARED_BYTES, shared_memory

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INTERPRETED_PROGRAMS = 3
_LARGEST_FLOAT32_HEAD = 128
"""Tiles of more would not fit in a multiprocessor's shared memory."""


class SplitScratch:
    """Float32 memory for the results of splits: one for all groups of a backend, because layers run
    one after another. Groups should be made before any graph is captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def of(self, num_rows: int, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse), flat, for at least `num_rows` rows of `head_size` numbers. What was given out
        before stays valid if a larger one must be made."""
        self._out = self._at_least(num_rows * head_size, self._out)
        self._lse = self._at_least(num_rows, self._lse)
        return self._out, self._lse

    def _at_least(self, number: int, present: torch.Tensor | None) -> torch.Tensor:
        if present is not None and present.numel() >= number:
            return present
        return torch.empty(number, dtype=torch.float32, device=self._device)


class TritonAttentionPlanner(AttentionPlanner):
    """See `kernels.interface.operations.AttentionPlanner`.

    Decodes are cut into splits of their keys, all else into tiles of queries, and the keys of a few
    tiles into splits, too. Both kernels give a request the same bits whatever else is in the step,
    but a token not the same bits as a decode, in a short chunk and in a long one. So with
    `only_tiles` every request is cut into tiles that see all keys: then a token's bits do not
    depend on how its sequence was chunked either; so are sequences whose tokens see both sides of
    themselves. Groups of more query heads than a split of a
    decode has room for are always cut into tiles."""

    def __init__(
        self, spec: AttentionSpec, *, device: torch.device, scratch: SplitScratch, only_tiles: bool
    ) -> None:
        """Raises ValueError: heads, a block size or a dtype that the kernels cannot take."""
        _check(spec)
        if device.type == "cuda" and spec.value_size is None:
            _check_float32(spec, shared_memory(device))
        super().__init__(spec)
        is_latent = spec.value_size is not None
        group_size = spec.num_query_heads // spec.num_kv_heads
        only_tiles |= spec.bidirectional
        self._only_tiles = only_tiles or (
            group_size > most_decode_rows(spec.head_size) and not is_latent
        )
        limits = (
            limits_of(spec, device, only_tiles=only_tiles)
            if is_latent
            else WorkLimits(
                max_requests=spec.max_num_seqs,
                max_prefill_tokens=spec.max_num_batched_tokens,
                max_seq_len=spec.max_model_len,
                num_query_heads=spec.num_query_heads,
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                max_decode_queries=0 if self._only_tiles else 1,
                sliding_window=spec.sliding_window,
                splits_tiles=not only_tiles,
                both_sides=spec.bidirectional,
            )
        )
        partial_out, partial_lse = scratch.of(limits.num_rows, limits.head_size)
        self._workspace = AttentionWorkspace(
            limits,
            device=device,
            num_programs=_num_programs(device, programs_a_multiprocessor(spec)),
            partial_out=partial_out,
            partial_lse=partial_lse,
        )

    def _plan_work(
        self, step: AttentionMetadata, num_decodes: int, num_decode_tokens: int
    ) -> AttentionWork:
        """
        Raises:
            ValueError: more requests or tokens than the planner was made for, or decodes of more
                than one token.
            TypeError: `query_start_loc_R1` or `seq_lens_R` is not int32.
        """
        if step.ends_T is not None and self._spec.value_size is not None:
            raise ValueError("tokens that see behind themselves have no kernel for latents")
        num_requests = step.seq_lens_R.shape[0]
        if num_decode_tokens > num_decodes:
            raise ValueError(
                f"{num_decodes} decodes of {num_decode_tokens} tokens: one token each is the limit;"
                " plan requests with more as prefills, after the decodes"
            )
        if self._only_tiles:
            num_decodes = num_decode_tokens = 0
        return self._workspace.plan(
            query_start_loc_R1=step.query_start_loc_R1,
            seq_lens_R=step.seq_lens_R,
            has_decodes=num_decodes > 0,
            num_prefills=num_requests - num_decode_tokens,
            num_prefill_tokens=step.slot_mapping_T.shape[0] - num_decode_tokens,
            # without decodes even one token may have its keys split
            num_long_prefills=None if self._only_tiles else step.num_long_prefills,
            ends_T=step.ends_T,
        )


def programs_a_multiprocessor(spec: AttentionSpec) -> int:
    """Of the decode kernel, as the registers that it takes leave room for (see the table of
    compiled kernels)."""
    if spec.value_size is not None:
        return 1  # eight warps with 128 sums of values in each thread
    of_one_warp = attention_decode.programs_a_multiprocessor(
        head_size=spec.head_size,
        group_size=spec.num_query_heads // spec.num_kv_heads,
        kv_bytes=spec.kv_dtype.itemsize,
    )
    if of_one_warp:
        return of_one_warp
    if spec.dtype == torch.float32:
        return 2
    if spec.kv_dtype == torch.float8_e4m3fn:
        return 3 if spec.head_size <= 64 else 2
    return 4 if spec.head_size <= 128 else 3 if spec.head_size <= 256 else 2


def _num_programs(device: torch.device, a_multiprocessor: int) -> int:
    """Persistent programs of the decode kernel."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    properties = torch.cuda.get_device_properties(device)
    return a_multiprocessor * int(properties.multi_processor_count)


def _check(spec: AttentionSpec) -> None:
    head_size, block_size = spec.head_size, spec.block_size
    limit = tile_rows(head_size) if spec.value_size is None else 128
    if spec.num_query_heads > limit * spec.num_kv_heads:
        raise ValueError(
            f"{spec.num_query_heads} query heads over {spec.num_kv_heads} key/value heads: the "
            f"limit is {limit} query heads a key/value head; run this model with --device cpu"
        )
    if head_size > LARGEST_HEAD and spec.value_size is None:
        raise ValueError(
            f"heads of {head_size} elements, the limit is {LARGEST_HEAD}; run this model with "
            "--device cpu"
        )
    if block_size & (block_size - 1) or block_size < 1:
        raise ValueError(
            f"block size {block_size} is not a power of two; choose --block-size 16, 32, 64 or 128"
        )
    if spec.dtype not in _DTYPES or spec.kv_dtype not in (spec.dtype, torch.float8_e4m3fn):
        raise ValueError(
            f"a model of {spec.dtype} with a KV cache of {spec.kv_dtype}: the model must be "
            "bfloat16, float16 or float32, and the cache of that dtype or float8_e4m3fn; choose "
            "--dtype and --kv-cache-dtype so"
        )


def _check_float32(spec: AttentionSpec, shared_bytes: int) -> None:
    """Refuse what a GPU has no room for, and the interpreter has."""
    if spec.dtype != torch.float32:
        return
    is_short = shared_bytes < SHORT_SHARED_BYTES
    limit = _LARGEST_FLOAT32_HEAD // 2 if is_short else _LARGEST_FLOAT32_HEAD
    if spec.head_size > limit:
        raise ValueError(
            f"heads of {spec.head_size} elements in float32, the limit on this GPU is "
            f"{limit}; choose --dtype bfloat16 or float16"
        )
    if spec.kv_dtype != spec.dtype:
        raise ValueError(
            f"a float32 model with a KV cache of {spec.kv_dtype} does not run on a GPU; choose "
            "--dtype bfloat16 or float16, or leave --kv-cache-dtype at auto"
        )
