"""Log-probabilities of prompts, a chunk at a time, for both runners: logits of a prompt's positions
are computed for this alone, a slice at a time, so that memory depends on no prompt's length."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch

from engine_core.model_runner.row_parts import HostTensor, Int64Array, RowPart, StepPart, StepRows
from engine_core.model_runner.rows import PlacedRow
from engine_core.model_runner.vocabulary_rows import VocabularyRows
from engine_core.models.interface import Model
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from protocol.outputs import Logprobs

_SLICE_ENTRIES = 2**22
"""Logits of a slice: 16 MiB, a few times of which are in use at once."""


class PromptReports(RowPart):
    """What is reported of each row's prompt.

    Args:
        token_ids: [row, position] on the model's device.
        vocabulary: that the model's logits are of.
        host_tensor: makes memory that reports are copied to.
    """

    def __init__(
        self,
        max_num_rows: int,
        *,
        token_ids: torch.Tensor,
        model: Model,
        vocabulary: VocabularyRows,
        host_tensor: HostTensor,
    ) -> None:
        self.token_ids = token_ids
        self.model = model
        self.vocabulary = vocabulary
        self.host_tensor = host_tensor
        self._num_logprobs: dict[int, int] = {}
        self._last: Int64Array = np.zeros(max_num_rows, np.int64)
        """The prompt's last position; 0 for rows that report nothing."""

    @property
    def is_used(self) -> bool:
        return bool(self._num_logprobs)

    def place(self, placed: PlacedRow) -> None:
        self.free(placed.row)
        sampling = placed.request.sampling
        if sampling.params.prompt_logprobs is not None:
            self._num_logprobs[placed.row] = sampling.params.prompt_logprobs
            self._last[placed.row] = sampling.num_prompt_tokens - 1

    def free(self, row: int) -> None:
        self._num_logprobs.pop(row, None)
        self._last[row] = 0

    def of_step(self, plan: SchedulerOutput, rows: StepRows) -> "PromptStep | None":
        stop_R = rows.num_computed_R + rows.num_scheduled_R
        count_R = np.minimum(stop_R, self._last[rows.rows_R]) - rows.num_computed_R
        indexes = np.flatnonzero(count_R > 0).tolist()
        if not indexes:
            return None
        offset_R = rows.offsets()
        return PromptStep(
            self,
            [
                PromptRange(
                    request_id=plan.batch.req_ids[rows.place_R[index]],
                    row=int(rows.rows_R[index]),
                    offset=int(offset_R[index]),
                    first=int(rows.num_computed_R[index]) + 1,
                    count=int(count_R[index]),
                    num_logprobs=self._num_logprobs[int(rows.rows_R[index])],
                )
                for index in indexes
            ],
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PromptRange:
    """Prompt tokens [first, first + count) of a sequence of a step, each known by what the position
    before it computes; those begin at `offset` of the step's tokens.

        tokens of the step   | ... | c  c+1 .. c+s-1 | ...     first = c + 1
                                   offset
    """

    request_id: str
    row: int
    offset: int
    first: int
    count: int
    num_logprobs: int
    """How many of the likeliest tokens are reported, beside each token's own."""


class PromptStep(StepPart):
    """The ranges that a step reports. The prompts' tokens are in their rows."""

    reads_all_rows = True

    def __init__(self, reports: PromptReports, ranges: list[PromptRange]) -> None:
        self._reports = reports
        self._columns = [(part, PromptColumns(part, reports.host_tensor)) for part in ranges]

    def read(self, hidden_TE: torch.Tensor) -> None:
        for part, columns in self._columns:
            columns.fill(hidden_TE, part, self._reports)

    def answer(self, output: ModelRunnerOutput) -> None:
        output.prompt_logprobs = {
            part.request_id: (part.first, columns.on_the_wire()) for part, columns in self._columns
        }


class PromptColumns:
    """One range on the host: P positions, K log-probabilities each, the token's own first."""

    def __init__(self, part: PromptRange, host_tensor: HostTensor) -> None:
        shape = (part.count, 1 + part.num_logprobs)
        self.token_ids_PK = host_tensor(shape, torch.int32)
        self.logprobs_PK = host_tensor(shape, torch.float32)
        self.ranks_P = host_tensor(shape[:1], torch.int32)

    def fill(self, hidden_TE: torch.Tensor, part: PromptRange, reports: PromptReports) -> None:
        """Compute the columns from the hidden states of the step."""
        token_ids_P = reports.token_ids[part.row, part.first : part.first + part.count]
        vocabulary, compute_logits = reports.vocabulary, reports.model.compute_logits
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
