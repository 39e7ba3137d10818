"""What a model runner is made of."""

from __future__ import annotations

import dataclasses

import torch

from engine_core.model_runner.cache_layout import CacheLayout
from engine_core.models import Model
from kernels.interface.operations import Operations


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """
    Attributes:
        model: weights and forward pass.
        ops: the backend that the model was loaded with.
        layout: how layers share blocks.
        num_blocks: usable blocks on the device; one more is allocated for the null block, id 0.
        num_host_blocks: blocks in host memory that a plan may copy from and to.
        block_size: tokens a block.
        max_num_seqs: rows.
        max_model_len: most tokens a row.
        max_num_batched_tokens: most tokens of a step.
        dtype: of the activations.
        kv_dtype: of the cache.
        eos_token_ids: what min_tokens forbids beside a request's own stop tokens.
    """

    model: Model
    ops: Operations
    layout: CacheLayout
    num_blocks: int
    num_host_blocks: int = 0
    block_size: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    eos_token_ids: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        """KV-cache groups, each with a block table of its own."""
        return len(self.layout.groups)

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self.model.kv_cache_spec.vocab_size
