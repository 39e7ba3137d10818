"""Log-probabilities of prompts, a chunk at a time, for both runners: logits of a prompt's positions
are computed for this alone, a slice at a time, so that memory depends on no prompt's length."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from engine_core.model_runner.sampling_params import ResolvedSampling
from engine_core.model_runner.vocabulary_rows import VocabularyRows
from protocol.outputs import Logprobs

_SLICE_ENTRIES = 2**22
"""Logits of a slice: 16 MiB, a few times of which are in use at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRange:
    """Prompt tokens [first, first + count) of a sequence of a step, each known by what the position
    before it computes; those begin at `offset` of the step's tokens.

        tokens of the step   | ... | c  c+1 .. c+s-1 | ...     first = c + 1
                                   offset
    """

    index: int
    """Which of the step's sequences."""
    row: int
    offset: int
    first: int
    count: int
    num_logprobs: int
    """Of the likeliest tokens, beside each token's own."""


class PromptReports:
    """By row of the batch, what is reported of its prompt."""

    def __init__(self, max_num_rows: int) -> None:
        self._num_logprobs: dict[int, int] = {}
        self._last: npt.NDArray[np.int64] = np.zeros(max_num_rows, np.int64)
        """The prompt's last position; 0 for rows that report nothing."""

    def write_row(self, row: int, sampling: ResolvedSampling) -> None:
        """What the row's earlier sequence asked for is forgotten."""
        wanted = sampling.params.prompt_logprobs
        self._num_logprobs.pop(row, None)
        self._last[row] = 0
        if wanted is not None:
            self._num_logprobs[row] = wanted
            self._last[row] = sampling.num_prompt_tokens - 1

    def ranges(
        self,
        rows_R: npt.NDArray[np.int64],
        num_computed_R: npt.NDArray[np.integer],
        num_scheduled_R: npt.NDArray[np.integer],
    ) -> list[PromptRange]:
        """What a step has to report. Tokens of the step lie in the order of its sequences."""
        if not self._num_logprobs:
            return []
        count_R = np.minimum(num_computed_R + num_scheduled_R, self._last[rows_R]) - num_computed_R
        offset_R = np.cumsum(num_scheduled_R) - num_scheduled_R
        return [
            PromptRange(
                index=index,
                row=int(rows_R[index]),
                offset=int(offset_R[index]),
                first=int(num_computed_R[index]) + 1,
                count=int(count_R[index]),
                num_logprobs=self._num_logprobs[int(rows_R[index])],
            )
            for index in np.flatnonzero(count_R > 0).tolist()
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class PromptColumns:
    """Of one range, on the host: P positions, K log-probabilities each, the token's own first."""

    token_ids_PK: torch.Tensor
    logprobs_PK: torch.Tensor
    ranks_P: torch.Tensor

    @classmethod
    def allocate(
        cls, part: PromptRange, new: Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
    ) -> "PromptColumns":
        """`new`: makes a tensor on the host."""
        shape = (part.count, 1 + part.num_logprobs)
        return cls(new(shape, torch.int32), new(shape, torch.float32), new(shape[:1], torch.int32))

    def fill(
        self,
        hidden_TE: torch.Tensor,
        token_ids_P: torch.Tensor,
        part: PromptRange,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        vocabulary: VocabularyRows,
    ) -> None:
        """
        Args:
            hidden_TE: of the step.
            token_ids_P: of the range, on the model's device.
            vocabulary: that the logits' columns are of.
        """
        for start, stop in _slices(part.count, vocabulary.size):
            logits_SV = compute_logits(hidden_TE[part.offset + start : part.offset + stop]).float()
            own_S1 = token_ids_P[start:stop, None].long()
            found_S = vocabulary.token_logprobs(logits_SV, own_S1, part.num_logprobs)
            for host, found in (
                (self.token_ids_PK, torch.cat([own_S1, found_S.top_ids_RK], dim=1)),
                (self.logprobs_PK, torch.cat([found_S.own_RN, found_S.top_RK], dim=1)),
                (self.ranks_P, found_S.ranks_R),
            ):
                host[start:stop].copy_(found.to(host.dtype), non_blocking=True)

    def on_the_wire(self) -> Logprobs:
        return Logprobs(
            num_positions=len(self.ranks_P),
            width=self.token_ids_PK.shape[1],
            token_ids=self.token_ids_PK.numpy().astype("<i4", copy=False).tobytes(),
            logprobs=self.logprobs_PK.numpy().astype("<f4", copy=False).tobytes(),
            ranks=self.ranks_P.tolist(),
        )


def _slices(count: int, vocab_size: int) -> Iterator[tuple[int, int]]:
    size = max(1, _SLICE_ENTRIES // vocab_size)
    for start in range(0, count, size):
        yield start, min(start + size, count)
