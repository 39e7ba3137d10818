"""`AttentionPlanner` of the torch backend: a group's numbers, and the shared cutting.

Owns nothing but the joining. Must not know how a step is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.interface.attention import AttentionMetadata
from kernels.torch.attention_plan import TilePlanner


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchAttentionPlanner:
    """See `kernels.interface.operations.AttentionPlanner`. The order of requests does not matter
    to it.

    Attributes:
        tiles: shared by the groups of a backend, because masks depend on no group.
    """

    tiles: TilePlanner
    num_query_heads: int
    num_kv_heads: int
    block_size: int
    sliding_window: int | None
    dtype: torch.dtype

    def plan(
        self,
        *,
        query_start_loc_R1: torch.Tensor,
        seq_lens_R: torch.Tensor,
        block_table_RM: torch.Tensor,
        slot_mapping_T: torch.Tensor,
        num_decodes: int,
        num_decode_tokens: int,
    ) -> AttentionMetadata:
        """See `AttentionPlanner.plan`."""
        groups = self.tiles.plan(
            query_start_loc_R1=query_start_loc_R1.numpy().astype(np.int64),
            seq_lens_R=seq_lens_R.numpy().astype(np.int64),
            block_table_RM=block_table_RM.numpy().astype(np.int64),
            block_size=self.block_size,
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            dtype=self.dtype,
            sliding_window=self.sliding_window,
        )
        return AttentionMetadata(
            query_start_loc_R1=query_start_loc_R1,
            seq_lens_R=seq_lens_R,
            block_table_RM=block_table_RM,
            slot_mapping_T=slot_mapping_T,
            block_size=self.block_size,
            sliding_window=self.sliding_window,
            plan=groups,
        )
