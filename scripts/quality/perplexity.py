"""How well a model predicts a text: exp of the mean negative log-probability of its tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_ROWS_AT_ONCE = 128
"""Logits of so many positions are in memory at one time: a vocabulary may have 262,144 entries."""

Forward = Callable[[list[int]], torch.Tensor]
"""Tokens of one sequence -> hidden_TE."""
Logits = Callable[[torch.Tensor], torch.Tensor]
"""hidden_RE -> float32 logits_RV."""


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of the text as a sequence of its own.

    tokens   p p t t t t        p: what the tokenizer begins a text with; t: the text's
    scored       _ x x x        without a p, the first token has nothing before it
    """

    tokens: list[int]
    num_prefix: int

    @property
    def first_scored(self) -> int:
        return max(self.num_prefix, 1)


def cut_windows(
    text_token_ids: Sequence[int], prefix: Sequence[int], *, context: int, num_windows: int
) -> list[Window]:
    """Windows spread evenly over the text, which do not overlap. Raises ValueError: the text is too
    short for so many, or a window too short to score a token."""
    length = context - len(prefix)
    if length < 2:
        raise ValueError(f"a context of {context} tokens leaves none to score; use 64 or more")
    if num_windows < 1 or num_windows * length > len(text_token_ids):
        raise ValueError(
            f"the text has {len(text_token_ids)} tokens, {num_windows} windows of {length} need "
            f"{num_windows * length} and at least one; use fewer or shorter windows, or a longer "
            "text"
        )
    stride = len(text_token_ids) // num_windows
    starts = range(0, stride * num_windows, stride)
    return [
        Window([*prefix, *text_token_ids[start : start + length]], len(prefix)) for start in starts
    ]


@torch.inference_mode()
def negative_log_likelihoods(
    windows: Sequence[Window], forward: Forward, logits_of: Logits
) -> torch.Tensor:
    """float64 [number of scored tokens], natural logarithms, in the windows' order. Raises
    ValueError: a value is not finite."""
    found = []
    for window in windows:
        hidden_TE = forward(window.tokens)
        # the row of token t predicts token t + 1
        for start in range(window.first_scored - 1, len(window.tokens) - 1, _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, len(window.tokens) - 1)
            logits_RV = logits_of(hidden_TE[start:stop].contiguous()).double()
            wanted_R1 = torch.tensor(window.tokens[start + 1 : stop + 1])[:, None]
            found.append(logits_RV.logsumexp(-1) - logits_RV.gather(-1, wanted_R1)[:, 0])
    together = torch.cat(found)
    if not bool(together.isfinite().all()):
        raise ValueError(f"{int((~together.isfinite()).sum())} log-probabilities are not finite")
    return together


def compare(nll_N: torch.Tensor, reference_N: torch.Tensor) -> tuple[float, float]:
    """The increase of the perplexity as a share of the reference's (0.01 is one in a hundred), and
    its standard error from the differences of single tokens. Both are negative log-likelihoods of
    the same windows."""
    difference_N = nll_N - reference_N
    ratio = math.exp(float(difference_N.mean()))
    error = float(difference_N.std()) / math.sqrt(len(difference_N))
    return ratio - 1, ratio * error
