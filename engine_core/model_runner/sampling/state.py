"""What each row's request asked for, kept from step to step. Chooses nothing itself."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from protocol.sampling import SamplingParams


@dataclasses.dataclass(slots=True)
class TokenHistory:
    """What penalties need to know of the tokens so far."""

    prompt_mask_V: torch.Tensor
    """bool."""
    output_counts_V: torch.Tensor
    """float32."""

    @classmethod
    def of(
        cls, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], vocab_size: int
    ) -> "TokenHistory":
        prompt_mask_V = torch.zeros(vocab_size, dtype=torch.bool)
        prompt_mask_V[torch.tensor(prompt_token_ids, dtype=torch.int64)] = True
        output_ids = torch.tensor(output_token_ids, dtype=torch.int64)
        counts_V = torch.bincount(output_ids, minlength=vocab_size).to(torch.float32)
        return cls(prompt_mask_V, counts_V)


@dataclasses.dataclass(slots=True)
class RowRules:
    """What changes single logits of a row before the distribution is formed."""

    params: SamplingParams
    num_output_tokens: int
    held_back_ids: torch.Tensor
    """int64: impossible until min_tokens are there."""
    bias_ids: torch.Tensor
    bias_values: torch.Tensor
    allowed_ids: torch.Tensor | None
    history: TokenHistory | None

    @property
    def holds_back(self) -> bool:
        return self.num_output_tokens < self.params.min_tokens and self.held_back_ids.numel() > 0


class SamplingState:
    """
    Args:
        max_num_rows: rows of the persistent batch.
        vocab_size: length of a row of logits.
    """

    def __init__(self, *, max_num_rows: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature: npt.NDArray[np.float32] = np.ones(max_num_rows, np.float32)
        self.top_k: npt.NDArray[np.int64] = np.zeros(max_num_rows, np.int64)
        self.top_p: npt.NDArray[np.float32] = np.ones(max_num_rows, np.float32)
        self.min_p: npt.NDArray[np.float32] = np.zeros(max_num_rows, np.float32)
        self.seed: npt.NDArray[np.int64] = np.zeros(max_num_rows, np.int64)
        """The 64 bits of the seed, as a signed number."""
        self.is_greedy: npt.NDArray[np.bool_] = np.ones(max_num_rows, np.bool_)
        self.is_plain: npt.NDArray[np.bool_] = np.ones(max_num_rows, np.bool_)
        """Greedy, without rules or log-probabilities: the best logit is all that is wanted."""
        self.is_truncated: npt.NDArray[np.bool_] = np.zeros(max_num_rows, np.bool_)
        self.rules: dict[int, RowRules] = {}
        """Only rows that have any; `has_rules` says the same as a column."""
        self.has_rules: npt.NDArray[np.bool_] = np.zeros(max_num_rows, np.bool_)
        self.wants_logprobs: npt.NDArray[np.bool_] = np.zeros(max_num_rows, np.bool_)
        self.num_logprobs: npt.NDArray[np.int64] = np.zeros(max_num_rows, np.int64)
        """How many, of the rows that want any; at most the whole vocabulary."""

    def add(
        self,
        row: int,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
    ) -> None:
        """A request takes the row. `params.seed` is given unless the request is greedy."""
        self.remove(row)
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k if params.top_k < self.vocab_size else 0
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.is_greedy[row] = params.is_greedy
        self.is_plain[row] = params.is_greedy and params.logprobs is None and not _has_rules(params)
        self.is_truncated[row] = self.top_k[row] > 0 or params.top_p < 1 or params.min_p > 0
        assert params.is_greedy or params.seed is not None
        self.seed[row] = np.uint64(params.seed or 0).astype(np.int64)
        if params.logprobs is not None:
            self.wants_logprobs[row] = True
            everything = params.logprobs < 0 or params.logprobs > self.vocab_size
            self.num_logprobs[row] = self.vocab_size if everything else params.logprobs
        if _has_rules(params):
            self.has_rules[row] = True
            self.rules[row] = RowRules(
                params=params,
                num_output_tokens=len(output_token_ids),
                held_back_ids=_ids({*eos_token_ids, *params.stop_token_ids}),
                bias_ids=_ids(params.logit_bias),
                bias_values=torch.tensor(list(params.logit_bias.values()), dtype=torch.float32),
                allowed_ids=(
                    None if params.allowed_token_ids is None else _ids(params.allowed_token_ids)
                ),
                history=(
                    TokenHistory.of(prompt_token_ids, output_token_ids, self.vocab_size)
                    if params.has_penalties
                    else None
                ),
            )

    def append(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """A token that was chosen for each of these rows."""
        if not self.rules:
            return
        for index in np.flatnonzero(self.has_rules[rows]).tolist():
            rules = self.rules[int(rows[index])]
            rules.num_output_tokens += 1
            if rules.history is not None:
                rules.history.output_counts_V[int(token_ids[index])] += 1

    def remove(self, row: int) -> None:
        """The row is free."""
        self.rules.pop(row, None)
        self.has_rules[row] = False
        self.wants_logprobs[row] = False
        self.is_greedy[row] = self.is_plain[row] = True


def _has_rules(params: SamplingParams) -> bool:
    return bool(
        params.has_penalties
        or params.logit_bias
        or params.allowed_token_ids is not None
        or params.min_tokens
    )


def _ids(token_ids: Sequence[int] | set[int] | dict[int, float]) -> torch.Tensor:
    return torch.tensor(list(token_ids), dtype=torch.int64)
