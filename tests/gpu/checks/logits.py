"""What changes logits before sampling: token masks and penalties. Both are exact."""

import torch

from kernels.interface.sampling import Penalties
from kernels.interface.sampling_rows import num_mask_words
from kernels.torch import sampling as torch_sampling
from kernels.triton.sampling.logits_processors import (
    apply_penalties,
    apply_token_masks,
    apply_token_masks_reference,
)
from tests.gpu.checks.errors import num_different
from tests.kernels.triton.columns import columns_of

MOST_WORD = 2**31
SPARE_ROWS = 2
"""Rows at the end of the bucket that are not real and must stay as they are."""


class Inputs:
    """Random logits with masks, and a history for each row."""

    def __init__(self, num_rows: int, vocab_size: int, device: str) -> None:
        rows = num_rows + SPARE_ROWS
        shape = (rows, num_mask_words(vocab_size))
        self.num_rows = num_rows
        self.logits_RV = torch.randn(rows, vocab_size, device=device)
        self.masks_RW = torch.randint(
            -MOST_WORD, MOST_WORD, shape, dtype=torch.int32, device=device
        )
        self.is_masked_R = torch.arange(rows, device=device) % 3 != 2
        self.state_row_R = torch.randperm(rows, device=device)
        self.counts_NV = torch.randint(
            0, 50, (rows, vocab_size), dtype=torch.int32, device=device
        ).sub_(46)
        self.counts_NV.clamp_(min=0)
        # every fourth row is switched off
        active_R = (torch.arange(rows, device=device) % 4 != 3).float()
        self.repetition_R = 1 + active_R * torch.rand(rows, device=device)
        self.presence_R = active_R * torch.randn(rows, device=device)
        self.frequency_R = active_R * torch.randn(rows, device=device)
        self.columns = columns_of(
            rows,
            num_rows=num_rows,
            device=device,
            state_row_N=self.state_row_R,
            is_masked_N=self.is_masked_R,
            repetition_N=self.repetition_R,
            presence_N=self.presence_R,
            frequency_N=self.frequency_R,
        )

    def mask(self, logits_RV: torch.Tensor) -> torch.Tensor:
        apply_token_masks(
            logits_RV, self.masks_RW, self.columns.num_rows_1, self.columns.is_masked_N
        )
        return logits_RV

    def penalise(self, logits_RV: torch.Tensor) -> torch.Tensor:
        apply_penalties(
            logits_RV,
            self.columns,
            prompt_bits_NW=self.masks_RW,
            output_counts_NV=self.counts_NV,
        )
        return logits_RV


def check_masks(num_rows: int, vocab_size: int, *, device: str) -> float:
    inputs = Inputs(num_rows, vocab_size, device)
    expected = apply_token_masks_reference(
        inputs.logits_RV.cpu(), inputs.masks_RW.cpu(), inputs.is_masked_R.cpu()
    )
    expected[num_rows:] = inputs.logits_RV[num_rows:].cpu()
    return num_different(inputs.mask(inputs.logits_RV).cpu(), expected)


def check_penalties(num_rows: int, vocab_size: int, *, device: str) -> float:
    inputs = Inputs(num_rows, vocab_size, device)
    expected_RV = inputs.logits_RV.cpu().clone()  # a copy also where the device is the CPU
    words_NW, token_V = inputs.masks_RW.cpu(), torch.arange(vocab_size)
    for row in range(num_rows):
        state = int(inputs.state_row_R[row])
        torch_sampling.apply_penalties(
            expected_RV[row],
            (words_NW[state, token_V // 32] >> (token_V % 32)) & 1 == 1,
            inputs.counts_NV[state].cpu().float(),
            Penalties(
                repetition_penalty=float(inputs.repetition_R[row]),
                presence_penalty=float(inputs.presence_R[row]),
                frequency_penalty=float(inputs.frequency_R[row]),
            ),
        )
    return num_different(inputs.penalise(inputs.logits_RV).cpu(), expected_RV)
