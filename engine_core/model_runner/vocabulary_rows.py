"""Rows of logits, of all tokens or of those that this rank has: what is reported of them, and what
is sampled. Of several ranks each calls the same and has the same answers.

Shapes: R rows, V this rank's tokens, C candidates, N tokens of a row, T ranks."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from engine_core.distributed.collectives import Collectives
from engine_core.layers.vocabulary import gather_logits, token_ranges
from kernels.interface.sampling import Penalties, SamplingLimits, SamplingOperations, TokenLogprobs
from kernels.torch.sampling import (
    FIRST_CANDIDATES,
    gumbel_noise,
    sample_candidates,
    token_logprobs,
)


class VocabularyRows(Protocol):
    """What rows of numbers, one a token, say of the whole vocabulary."""

    @property
    def size(self) -> int:
        """Tokens of the vocabulary."""

    @property
    def tokens(self) -> range:
        """Those that the columns are of."""

    def token_logprobs(
        self, logits_RV: torch.Tensor, token_ids_RN: torch.Tensor, num_top: int
    ) -> TokenLogprobs:
        """See `SamplingOperations.token_logprobs`; ids are of the whole vocabulary."""

    def whole(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """The logits of all tokens, whichever rank has them."""


class WholeVocabulary:
    """`VocabularyRows` of all tokens. `token_logprobs`: of the backend that made the logits."""

    def __init__(
        self,
        size: int,
        token_logprobs: Callable[[torch.Tensor, torch.Tensor, int], TokenLogprobs] = token_logprobs,
    ) -> None:
        self.size = size
        self.tokens = range(size)
        self.token_logprobs = token_logprobs

    def whole(self, logits_RV: torch.Tensor) -> torch.Tensor:
        return logits_RV


def token_logits(
    logits_RV: torch.Tensor, token_ids_RN: torch.Tensor, num_top: int
) -> TokenLogprobs:
    """`token_logprobs` with the logits themselves in place of log-probabilities."""
    best_RK, top_ids_RK = logits_RV.topk(num_top, dim=1)
    own_RN = logits_RV.gather(1, token_ids_RN)
    ranks_R = (logits_RV > own_RN[:, :1]).sum(dim=1) + 1
    return TokenLogprobs(own_RN=own_RN, ranks_R=ranks_R, top_ids_RK=top_ids_RK, top_RK=best_RK)


class VocabularyShard:
    """`VocabularyRows` and `SamplingOperations` of the tokens that one rank has, of `size`.

    What ranks exchange of a row: its best token; or the best of its sums with noise; or, where
    min_p, top_k or top_p cut it, its `FIRST_CANDIDATES` likeliest and the logarithm of its sum.
    Where that cut leaves more tokens than those, all the row's logits. Noise is of (seed, position,
    token), so tokens do not depend on the number of ranks."""

    def __init__(self, ops: SamplingOperations, collectives: Collectives, size: int) -> None:
        self._ops = ops
        self._collectives = collectives
        self.size = size
        self.tokens = token_ranges(size, collectives.parallel.tp_size)[collectives.parallel.tp_rank]
        self._most = max(map(len, token_ranges(size, collectives.parallel.tp_size)))

    # ------------------------------------------------------------------ VocabularyRows

    def token_logprobs(
        self, logits_RV: torch.Tensor, token_ids_RN: torch.Tensor, num_top: int
    ) -> TokenLogprobs:
        logprobs_RV = logits_RV - self._log_total(logits_RV)[:, None]
        own_RN = self.of_tokens(logprobs_RV, token_ids_RN)
        ranks_R = self._collectives.all_reduce_((logprobs_RV > own_RN[:, :1]).sum(dim=1)) + 1
        top_RK, top_ids_RK = self.topk(logprobs_RV, num_top)
        return TokenLogprobs(own_RN=own_RN, ranks_R=ranks_R, top_ids_RK=top_ids_RK, top_RK=top_RK)

    def whole(self, logits_RV: torch.Tensor) -> torch.Tensor:
        return gather_logits(logits_RV, self.size, self._collectives)

    def _log_total(self, logits_RV: torch.Tensor) -> torch.Tensor:
        return self._collectives.all_gather(logits_RV.logsumexp(dim=1)).logsumexp(dim=0)

    def of_tokens(self, values_RV: torch.Tensor, token_ids_RN: torch.Tensor) -> torch.Tensor:
        """The values of these tokens -> [R, N]."""
        columns_RN = token_ids_RN - self.tokens.start
        is_elsewhere_RN = (columns_RN < 0) | (columns_RN >= len(self.tokens))
        values_RN = values_RV.gather(1, columns_RN.clamp(0, len(self.tokens) - 1))
        return self._collectives.all_reduce_(values_RN.masked_fill_(is_elsewhere_RN, 0.0))

    def topk(self, values_RV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest values, falling, and their tokens -> [R, k] each."""
        mine = min(k, len(self.tokens))
        values_RK, columns_RK = values_RV.topk(mine, dim=1)
        found_2RK = torch.stack([values_RK.double(), (columns_RK + self.tokens.start).double()])
        missing = min(k, self._most) - mine
        padded = F.pad(found_2RK, (0, missing), value=-torch.inf)
        padded[1, :, mine:] = self.size  # behind tokens that are impossible
        values_RC, token_ids_RC = (
            self._collectives.all_gather(padded).permute(1, 2, 0, 3).flatten(2)
        )
        order_RC = token_ids_RC.argsort(dim=1)  # equals: the lowest first
        values_RC = values_RC.gather(1, order_RC)
        values_RC, best_RC = values_RC.sort(dim=1, descending=True, stable=True)
        token_ids_RC = token_ids_RC.gather(1, order_RC).gather(1, best_RC)
        return values_RC[:, :k].float(), token_ids_RC[:, :k].long()

    # ------------------------------------------------------------------ SamplingOperations

    def best_of_rows(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        columns_R, best_R = self._ops.best_of_rows(logits_RV)
        return self._best(columns_R, best_R.double())

    def best_of_masked_rows(
        self, logits_RV: torch.Tensor, index_M: torch.Tensor, bits_MW: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        columns_R, best_R, before_R = self._ops.best_of_masked_rows(
            logits_RV, index_M, self._mask(bits_MW)
        )
        before_R = self._collectives.all_gather(before_R).amax(dim=0)
        return *self._best(columns_R, best_R.double()), before_R

    def sample(
        self,
        logits_RV: torch.Tensor,
        seeds_R: torch.Tensor,
        positions_R: torch.Tensor,
        limits: SamplingLimits | None = None,
        first_token: int = 0,
    ) -> torch.Tensor:
        assert not first_token, "the columns' tokens are known"
        if limits is not None:
            return self._sample_truncated(logits_RV, seeds_R, positions_R, limits)
        start = self.tokens.start
        columns_R = self._ops.sample(logits_RV, seeds_R, positions_R, first_token=start)
        noise_R = gumbel_noise(seeds_R, positions_R, columns_R[:, None] + start)[:, 0]
        logits_R = logits_RV.gather(1, columns_R[:, None])[:, 0]
        return self._best(columns_R, logits_R.double() + noise_R)[0]

    def apply_penalties(
        self,
        logits_V: torch.Tensor,
        prompt_mask_V: torch.Tensor,
        output_counts_V: torch.Tensor,
        penalties: Penalties,
    ) -> None:
        """`prompt_mask_V`, `output_counts_V`: of the whole vocabulary."""
        mine = slice(self.tokens.start, self.tokens.stop)
        self._ops.apply_penalties(logits_V, prompt_mask_V[mine], output_counts_V[mine], penalties)

    def _best(
        self, columns_R: torch.Tensor, scores_R: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(token of the largest score of all ranks', the lowest of equals; that score); NaN if one
        is. `scores_R`: float64, which holds every token id."""
        ids_R = (columns_R + self.tokens.start).double()
        scores_TR, ids_TR = self._collectives.all_gather(torch.stack([scores_R, ids_R])).unbind(1)
        best_R = scores_TR.amax(dim=0)
        ids_R = ids_TR.masked_fill(scores_TR != best_R, self.size - 1).amin(dim=0)
        return ids_R.long(), best_R.float()

    def _mask(self, bits_MW: torch.Tensor) -> torch.Tensor:
        """The bits of this rank's tokens."""
        start, stop = self.tokens.start, self.tokens.stop
        if not start % 32:
            return bits_MW[:, start // 32 : -(-stop // 32)].contiguous()
        bits = np.unpackbits(bits_MW.numpy().view(np.uint8), axis=1, bitorder="little")
        padded = np.pad(bits[:, start:stop], ((0, 0), (0, (start - stop) % 32)))
        return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))

    def _sample_truncated(
        self,
        logits_RV: torch.Tensor,
        seeds_R: torch.Tensor,
        positions_R: torch.Tensor,
        limits: SamplingLimits,
    ) -> torch.Tensor:
        values_RC, token_ids_RC = self.topk(logits_RV, min(self.size, FIRST_CANDIDATES))
        chosen_R, is_done_R = sample_candidates(
            values_RC, token_ids_RC, self._log_total(logits_RV), seeds_R, positions_R, limits
        )
        if not is_done_R.all():
            rest = ~is_done_R
            chosen_R[rest] = self._ops.sample(
                self.whole(logits_RV[rest]),
                seeds_R[rest],
                positions_R[rest],
                SamplingLimits(
                    top_k_R=limits.top_k_R[rest],
                    top_p_R=limits.top_p_R[rest],
                    min_p_R=limits.min_p_R[rest],
                ),
            )
        return chosen_R


def vocabulary_rows(
    ops: SamplingOperations, collectives: Collectives, size: int, *, reports_logits: bool = False
) -> tuple[VocabularyRows, SamplingOperations]:
    """The vocabulary of a runner whose host samples, and the operations to sample with."""
    if collectives.parallel.tp_size == 1:
        return WholeVocabulary(size, token_logits if reports_logits else ops.token_logprobs), ops
    shard = VocabularyShard(ops, collectives, size)
    return shard, shard
