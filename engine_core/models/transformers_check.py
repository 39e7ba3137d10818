"""Is a model behind a paged cache still the same? A made-up prompt in uneven chunks says so."""

import torch

from engine_core.models.interface import Model
from kernels.interface import AttentionMetadata, ForwardContext, Operations

_NUM_TOKENS = 23
_CHUNKS = (9, 1, 11, 1, 1)
_BLOCK_SIZE = 4


def probe_prompt(vocab_size: int) -> torch.Tensor:
    """int64 [T], spread over the vocabulary, the same every time."""
    return (torch.arange(_NUM_TOKENS, dtype=torch.int64) * 7919 + 13) % vocab_size


def largest_difference(
    model: Model,
    token_ids_T: torch.Tensor,
    expected_TV: torch.Tensor,
    *,
    ops: Operations,
    dtype: torch.dtype,
) -> float:
    """Largest difference of logits between chunks over a paged cache and one plain pass.

    Returns:
        The difference relative to the logits' standard deviation; infinite for NaN.
    """
    spec = model.kv_cache_spec
    num_blocks = -(-_NUM_TOKENS // _BLOCK_SIZE)
    kv_caches = [
        ops.allocate_kv_cache(num_blocks + 1, _BLOCK_SIZE, spec.num_kv_heads, spec.head_size, dtype)
        for _ in range(spec.num_layers)
    ]
    table_RM = torch.arange(num_blocks, 0, -1, dtype=torch.int32)[None]
    logits = []
    start = 0
    for length in _CHUNKS:
        positions_T = torch.arange(start, start + length)
        slots_T = (
            table_RM[0, positions_T // _BLOCK_SIZE].long() * _BLOCK_SIZE + positions_T % _BLOCK_SIZE
        )
        by_window: dict[int | None, AttentionMetadata] = {
            window: ops.plan_attention(
                query_start_loc_R1=torch.tensor([0, length], dtype=torch.int32),
                seq_lens_R=torch.tensor([start + length], dtype=torch.int32),
                block_table_RM=table_RM,
                slot_mapping_T=slots_T,
                block_size=_BLOCK_SIZE,
                num_query_heads=spec.num_query_heads,
                num_kv_heads=spec.num_kv_heads,
                dtype=dtype,
                sliding_window=window,
            )
            for window in set(spec.sliding_windows)
        }
        context = ForwardContext(
            kv_caches=kv_caches,
            metadata=[by_window[window] for window in spec.sliding_windows],
            ops=ops,
        )
        hidden_TE = model.forward(token_ids_T[positions_T], positions_T, context)
        logits.append(model.compute_logits(hidden_TE))
        start += length
    difference = (torch.cat(logits) - expected_TV).abs().max() / expected_TV.std().clamp_min(1e-9)
    return float(difference) if difference.isfinite() else float("inf")
