"""The tensors of steps on the device: the rows that last, and the inputs of one step.

Owns their shapes, dtypes and padding. Must not know kernels: who writes them is
`kernels.triton.step_inputs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRows:
    """Tokens and block tables of the running sequences, a row each, kept from step to step.

    Attributes:
        token_ids: int32 [rows, max_model_len].
        block_tables: int32 [G, rows, M], a table a KV-cache group. Always ids in range.
    """

    token_ids: torch.Tensor
    block_tables: torch.Tensor

    @staticmethod
    def allocate(
        *, num_rows: int, max_model_len: int, block_size: int, num_groups: int, device: torch.device
    ) -> DeviceRows:
        width = -(-max_model_len // block_size)
        return DeviceRows(
            token_ids=torch.zeros((num_rows, max_model_len), dtype=torch.int32, device=device),
            block_tables=torch.zeros(
                (num_groups, num_rows, width), dtype=torch.int32, device=device
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """What `prepare_step` writes. T and R count the padding of a bucket.

    |<- real ->|<- padding ->|  of T: token 0, position 0, slot -1
    |<- real ->|<- padding ->|  of R: no tokens, seq_len 0, block table as it was

    Attributes:
        token_ids_T: int64 [T].
        positions_T: int64 [T].
        slot_mappings_GT: int64 [G, T].
        query_start_loc_R1: int32 [R + 1]; padding starts and ends where the real tokens end.
        seq_lens_R: int32 [R], tokens in the cache after this step.
        block_tables_GRM: int32 [G, R, M]. Ids behind a sequence's end are those of earlier steps,
            in range.
        logits_at_R: int64 [R], index along T of the last token of the n-th due sequence, then 0.
    """

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    slot_mappings_GT: torch.Tensor
    query_start_loc_R1: torch.Tensor
    seq_lens_R: torch.Tensor
    block_tables_GRM: torch.Tensor
    logits_at_R: torch.Tensor

    @staticmethod
    def allocate(
        *, num_tokens: int, num_sequences: int, num_groups: int, width: int, device: torch.device
    ) -> StepTensors:
        """Tensors of the largest step; `first` gives those of a bucket."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return StepTensors(
            token_ids_T=zeros(num_tokens),
            positions_T=zeros(num_tokens),
            slot_mappings_GT=zeros(num_groups, num_tokens),
            query_start_loc_R1=zeros(num_sequences + 1, dtype=torch.int32),
            seq_lens_R=zeros(num_sequences, dtype=torch.int32),
            block_tables_GRM=zeros(num_groups, num_sequences, width, dtype=torch.int32),
            logits_at_R=zeros(num_sequences),
        )

    def first(self, num_tokens: int, num_sequences: int) -> StepTensors:
        """Views of the first so many tokens and sequences: a bucket in the same memory."""
        return StepTensors(
            token_ids_T=self.token_ids_T[:num_tokens],
            positions_T=self.positions_T[:num_tokens],
            slot_mappings_GT=self.slot_mappings_GT[:, :num_tokens],
            query_start_loc_R1=self.query_start_loc_R1[: num_sequences + 1],
            seq_lens_R=self.seq_lens_R[:num_sequences],
            block_tables_GRM=self.block_tables_GRM[:, :num_sequences],
            logits_at_R=self.logits_at_R[:num_sequences],
        )
