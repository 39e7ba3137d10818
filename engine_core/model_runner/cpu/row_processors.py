"""Runs the operator's logits processors over the rows that they change. What they raise ends the
request of that row."""

import logging
from collections.abc import Container, Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine_core.logits_processors import NamedProcessor, read_extra_args, what_failed
from engine_core.model_runner.row_parts import RowPart
from engine_core.model_runner.rows import PlacedRow

logger = logging.getLogger(__name__)


class RowProcessors(RowPart):
    """
    Args:
        token_ids: [row, position], the batch's. What stands before the position to be sampled are
            the sequence's tokens, then drafts.
    """

    def __init__(
        self, processors: Sequence[NamedProcessor], token_ids: npt.NDArray[np.int32]
    ) -> None:
        self._processors = processors
        self._token_ids = token_ids
        self._rows_of: list[set[int]] = [set() for _ in processors]
        """Rows that a processor changes, for each processor."""
        self.is_changed: npt.NDArray[np.bool_] = np.zeros(len(token_ids), np.bool_)
        """[row], whether any processor changes its logits."""
        self._num_prompt_tokens: dict[int, int] = {}
        """Prompt tokens of each row that a processor changes."""
        self._broken: dict[int, str] = {}
        """Why a processor could not take a row's request, by row."""
        self._logged: set[str] = set()

    def place(self, placed: PlacedRow) -> None:
        row, sampling = placed.row, placed.request.sampling
        self._forget(row)
        start, params = sampling.num_prompt_tokens, sampling.chained or sampling.params
        for each, rows in zip(self._processors, self._rows_of, strict=True):
            try:
                extra_args = read_extra_args(params)
                prompt, output = placed.token_ids[:start], placed.token_ids[start:]
                if each.processor.add_row(row, params, extra_args, prompt, output):
                    rows.add(row)
            except Exception as error:
                self._broken[row] = self._failure(each, error)
        if row in self._broken or any(row in rows for rows in self._rows_of):
            self.is_changed[row] = True
            self._num_prompt_tokens[row] = start

    def free(self, row: int) -> None:
        self._forget(row)
        for each in self._processors:
            try:
                each.processor.remove_row(row)
            except Exception as error:  # its request is over
                self._failure(each, error)

    def apply(
        self,
        logits_RV: torch.Tensor,
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        skipped: Container[int],
    ) -> tuple[list[int], dict[int, str]]:
        """See `CPUSampler.sample`. Changes logits in place.

        Returns:
            indices of the rows of logits that may have changed, and by index why one failed.
        """
        failures: dict[int, str] = {}
        changed: list[int] = []
        for index, row in enumerate(rows.tolist()):
            if row in self._broken:
                failures[index] = self._broken[row]
            elif row in self._num_prompt_tokens and index not in skipped:
                changed.append(index)
        for each, own in zip(self._processors, self._rows_of, strict=True):
            mine = [at for at in changed if int(rows[at]) in own and at not in failures]
            if mine:
                failures |= self._apply_one(each, logits_RV, mine, rows, positions)
        return changed, failures

    def _apply_one(
        self,
        each: NamedProcessor,
        logits_RV: torch.Tensor,
        indices: list[int],
        rows: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
    ) -> dict[int, str]:
        """Returns by index why one failed, whose logits are as they were."""
        part_RV, own = logits_RV[indices], rows[indices].tolist()  # a copy
        outputs = [
            self._token_ids[row, self._num_prompt_tokens[row] : position]
            for row, position in zip(own, positions[indices].tolist(), strict=True)
        ]
        for output in outputs:
            output.flags.writeable = False
        try:
            changed_RV = each.processor.apply(part_RV, own, outputs)
            if getattr(changed_RV, "shape", None) != logits_RV[indices].shape:
                raise TypeError("apply must return logits of the shape that it was given")
            logits_RV[indices] = changed_RV.to(logits_RV.dtype)
        except Exception as error:
            if len(indices) == 1:
                return {indices[0]: self._failure(each, error)}
            failures: dict[int, str] = {}
            for index in indices:  # which of them is it?
                failures |= self._apply_one(each, logits_RV, [index], rows, positions)
            return failures
        return {}

    def _forget(self, row: int) -> None:
        self.is_changed[row] = False
        self._num_prompt_tokens.pop(row, None)
        self._broken.pop(row, None)
        for rows in self._rows_of:
            rows.discard(row)

    def _failure(self, each: NamedProcessor, error: Exception) -> str:
        if each.name not in self._logged:  # later ones reach the request alone
            self._logged.add(each.name)
            logger.error("logits processor %s failed", each.name, exc_info=error)
        return what_failed(each.name, error)
