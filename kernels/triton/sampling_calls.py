"""Sampling as `Operations` asks for it: rows that are all alike, tensors made for the call.

Owns the joining of `sample` and `apply_penalties` with a host that drives them call by call, and
their memory between calls. A runner that keeps its rows on the device calls the kernels itself.
Must not know requests.
"""

from __future__ import annotations

import torch

from kernels.interface.operations import Penalties, SamplingLimits
from kernels.triton import penalties
from kernels.triton.sampling import SamplingMemory, sample
from kernels.triton.token_masks import pack_token_masks

_FEWEST_ROWS = 16


class SamplingCalls:
    """One thread uses an instance at a time, and its calls run on one stream."""

    def __init__(self) -> None:
        self._memory: SamplingMemory | None = None
        self._vocab_size = 0

    def sample(
        self,
        logits_RV: torch.Tensor,
        seeds_R: torch.Tensor,
        positions_R: torch.Tensor,
        limits: SamplingLimits | None = None,
    ) -> torch.Tensor:
        """See `Operations.sample`.

        Logits that are NaN or infinite give token 0.

        Raises:
            TypeError, ValueError: another dtype, shape or device than theirs.
        """
        rows, vocab_size = logits_RV.shape
        device = logits_RV.device

        def filled(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        out_R = filled(0, torch.int64)
        sample(
            logits_RV,
            seeds_R,
            positions_R,
            num_rows_1=torch.full((1,), rows, dtype=torch.int32, device=device),
            is_greedy_R=filled(False, torch.bool),
            temperature_R=filled(1.0, torch.float32),
            top_k_R=filled(0, torch.int64) if limits is None else limits.top_k_R,
            top_p_R=filled(1.0, torch.float32) if limits is None else limits.top_p_R,
            min_p_R=filled(0.0, torch.float32) if limits is None else limits.min_p_R,
            memory=self._memory_for(rows, vocab_size, device),
            out_R=out_R,
            best_logit_R=filled(0.0, torch.float32),
            any_truncated=limits is not None,
        )
        return out_R

    def apply_penalties(
        self,
        logits_V: torch.Tensor,
        prompt_mask_V: torch.Tensor,
        output_counts_V: torch.Tensor,
        wanted: Penalties,
    ) -> None:
        """See `Operations.apply_penalties`."""
        device = logits_V.device

        def one(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((1,), value, dtype=dtype, device=device)

        penalties.apply_penalties(
            logits_V[None],
            num_rows_1=one(1, torch.int32),
            state_row_R=one(0, torch.int64),
            prompt_bits_NW=pack_token_masks(prompt_mask_V[None]),
            output_counts_NV=output_counts_V[None].to(torch.int32),
            repetition_R=one(wanted.repetition_penalty, torch.float32),
            presence_R=one(wanted.presence_penalty, torch.float32),
            frequency_R=one(wanted.frequency_penalty, torch.float32),
        )

    def _memory_for(self, rows: int, vocab_size: int, device: torch.device) -> SamplingMemory:
        memory = self._memory
        known = 0 if memory is None else memory.best_RS.shape[0]
        fits = memory is not None and self._vocab_size == vocab_size and known >= rows
        if memory is None or not fits:
            # twice as many as before, so that a slowly growing batch allocates seldom
            number = max(rows, 2 * known, _FEWEST_ROWS)
            memory = self._memory = SamplingMemory.allocate(number, vocab_size, device)
            self._vocab_size = vocab_size
        return memory
