"""What a CPU's sampler asks of a backend; a GPU's asks `kernels.interface.device_steps`.

Shape suffixes: R rows of logits, V vocabulary, M rows with a mask, W its words, N and K tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLimits:
    """Which tokens of each row may be sampled; applied in the order min_p, top_k, top_p.

    Attributes:
        top_k_R: int64, 0 for no limit; tokens that tie with the k-th stay.
        top_p_R: float32; the token that crosses p stays.
        min_p_R: float32, 0 for no limit.
    """

    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_R: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of rows of logits, float32, beside int64 ids.

    Attributes:
        own_RN: of the tokens that were named.
        ranks_R: how many tokens are likelier than the first of those, plus 1.
        top_ids_RK, top_RK: the likeliest, falling.
    """

    own_RN: torch.Tensor
    ranks_R: torch.Tensor
    top_ids_RK: torch.Tensor
    top_RK: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Penalties of one row, see `SamplingOperations.apply_penalties`."""

    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float


@runtime_checkable
class SamplingOperations(Protocol):
    """Sampling that the host orders, row by row; a GPU's is `kernels.interface.device_steps`."""

    def best_of_rows(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(int64 [R], the lowest id of each row's largest logit; float32 [R], that logit).

        A row that holds NaN has NaN for its largest logit, and any id."""

    def best_of_masked_rows(
        self, logits_RV: torch.Tensor, index_M: torch.Tensor, bits_MW: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Masks in place, see `kernels.torch.sampling.best_of_masked_rows`; of a row that held NaN
        only the last of the three is meant."""

    def sample(
        self,
        logits_RV: torch.Tensor,
        seeds_R: torch.Tensor,
        positions_R: torch.Tensor,
        limits: SamplingLimits | None = None,
        first_token: int = 0,
    ) -> torch.Tensor:
        """One token a row, int64 [R], each with its softmax probability, renormalised over the
        tokens that `limits` leaves.

        `argmax((logits - max) + noise)`, with standard Gumbel noise that is a function of (seed,
        position, token) alone; every backend computes the same (see `kernels.torch.sampling`).

        Args:
            logits_RV: float32.
            seeds_R: the 64 bits of each row's seed, as int64.
            positions_R: int64, index in the sequence of the token being chosen.
            first_token: of column 0, where the columns are a part of the vocabulary and `limits`
                is None; the result are columns.
        """

    def token_logprobs(
        self, logits_RV: torch.Tensor, token_ids_RN: torch.Tensor, num_top: int
    ) -> TokenLogprobs:
        """Of these tokens, at least one a row, and of the `num_top` likeliest."""

    def apply_penalties(
        self,
        logits_V: torch.Tensor,
        prompt_mask_V: torch.Tensor,
        output_counts_V: torch.Tensor,
        penalties: Penalties,
    ) -> None:
        """In place on one row of logits, see `kernels.torch.sampling.apply_penalties`."""
