"""What a head for drafts reads and writes, without an engine. Not a test."""

import torch

from kernels.interface.operations import AttentionSpec, ForwardContext, allocate_kv_cache


def context_for(head, num_tokens, ops):
    """One sequence in one chunk."""
    spec, keys = head.spec, head.spec.keys_of(0)
    heads = {
        "num_query_heads": spec.num_query_heads,
        "num_kv_heads": keys.num_kv_heads,
        "head_size": keys.key_size,
        "value_size": keys.value_size_in_keys,
    }
    num_blocks = -(-num_tokens // 4)
    planner = ops.make_attention_planner(
        AttentionSpec(
            **heads,
            block_size=4,
            sliding_window=None,
            max_num_seqs=1,
            max_num_batched_tokens=num_tokens,
            max_model_len=num_tokens,
            dtype=torch.float32,
            kv_dtype=torch.float32,
        )
    )
    cache = allocate_kv_cache(ops, 1 + num_blocks, keys.kv_shape(4, torch.float32))
    metadata = planner.plan(
        query_start_loc_R1=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens_R=torch.tensor([num_tokens], dtype=torch.int32),
        block_table_RM=torch.arange(1, 1 + num_blocks, dtype=torch.int32)[None],
        slot_mapping_T=torch.arange(num_tokens) + 4,
        num_decodes=0,
        num_decode_tokens=0,
    )
    return ForwardContext(kv_caches=[cache], metadata=[metadata], ops=ops)
