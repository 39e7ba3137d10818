"""Step inputs and sampling on the GPU: the order in which the kernels of a step are launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels.interface.device_steps import LogitMasks, RowFunction, SamplingMode
from kernels.interface.sampling_rows import MAX_DEVICE_LOGPROBS, SamplingRows, StepResults
from kernels.interface.step_inputs import PackedLayout
from kernels.triton.sampling.columns import SamplingColumns, gather_sampling_columns
from kernels.triton.sampling.logits_processors import (
    adjust_tokens,
    apply_penalties,
    apply_token_masks,
    count_tokens,
)
from kernels.triton.sampling.logprobs import LogprobsMemory, report_logprobs
from kernels.triton.sampling.sample import SamplingMemory, sample
from kernels.triton.step_inputs import append_sampled, apply_row_updates, prepare_step


class TritonDeviceSteps:
    """See `DeviceStepOperations`."""

    apply_row_updates = staticmethod(apply_row_updates)
    prepare_step = staticmethod(prepare_step)
    append_sampled = staticmethod(append_sampled)

    def make_sampler(
        self,
        *,
        num_rows: int,
        num_logits: int,
        vocab_size: int,
        device: torch.device,
        reports_processed: bool = False,
        reports_logits: bool = False,
    ) -> TritonStepSampler:
        """See `DeviceStepOperations.make_sampler`."""
        words = torch.zeros(
            StepResults.num_words(num_logits, vocab_size), dtype=torch.int32, device=device
        )
        return TritonStepSampler(
            rows=SamplingRows.allocate(num_rows=num_rows, vocab_size=vocab_size, device=device),
            results=StepResults.over(words, capacity=num_logits, vocab_size=vocab_size),
            columns=SamplingColumns.allocate(num_logits, device),
            memory=SamplingMemory.allocate(num_logits, vocab_size, device),
            logprobs=LogprobsMemory.allocate(
                num_logits, vocab_size, min(MAX_DEVICE_LOGPROBS, vocab_size), device
            ),
            reports_processed=reports_processed,
            reports_logits=reports_logits,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonStepSampler:
    """See `kernels.interface.device_steps.StepSampler`."""

    rows: SamplingRows
    results: StepResults
    columns: SamplingColumns
    memory: SamplingMemory
    logprobs: LogprobsMemory
    reports_processed: bool
    reports_logits: bool

    def sample(
        self,
        logits_NV: torch.Tensor,
        packed: torch.Tensor,
        layout: PackedLayout,
        *,
        num_sequences: int,
        mode: SamplingMode,
        masks: LogitMasks | None = None,
        chains: Mapping[int, RowFunction] | None = None,
    ) -> torch.Tensor:
        """See `StepSampler.sample`."""
        num_rows, is_full = logits_NV.shape[0], mode is SamplingMode.FULL
        columns, results, rows = self.columns.first(num_rows), self.results, self.rows
        gather_sampling_columns(packed, layout, rows, columns, num_sequences=num_sequences)
        raw_NV = logits_NV
        if is_full:
            results.raw_best_logits_C[:num_rows].copy_(raw_NV.amax(dim=1))
            logits_NV = raw_NV.to(torch.float32, copy=True)
            if masks is not None:
                apply_token_masks(logits_NV, masks.bits_RW, columns.num_rows_1, masks.is_masked_R)
            state_NX = rows.state_NX.index_select(0, columns.state_row_N)
            apply_token_masks(
                logits_NV, state_NX[:, rows.mask_words], columns.num_rows_1, columns.is_masked_N
            )
            adjust_tokens(logits_NV, columns, rows.lists_3NM)
            apply_penalties(
                logits_NV,
                columns,
                prompt_bits_NW=rows.prompt_bits_NW,
                output_counts_NV=rows.output_counts_NV,
            )
            for index, chain in (chains or {}).items():
                logits_NV[index] = chain(logits_NV[index])
        sample(
            logits_NV,
            columns,
            memory=self.memory,
            out_R=results.token_ids_C[:num_rows],
            best_logit_R=results.best_logits_C[:num_rows],
            any_truncated=mode is not SamplingMode.PLAIN,
        )
        told_NV = raw_NV
        if is_full:
            if self.reports_processed:
                told_NV = self._drawn_from(logits_NV, columns)
            token_ids_N = results.token_ids_C[:num_rows]
            count_tokens(token_ids_N, columns, rows.output_counts_NV)
            report_logprobs(
                told_NV,
                token_ids_N,
                columns,
                memory=self.logprobs,
                out_ids_RN=results.logprob_ids_CN[:num_rows],
                out_logprobs_RN=results.logprobs_CN[:num_rows],
                out_ranks_R=results.ranks_C[:num_rows],
            )
            if self.reports_logits:  # columns that a row does not report may hold any ids
                ids_NK = results.logprob_ids_CN[:num_rows].long().clamp(0, rows.vocab_size - 1)
                results.logprobs_CN[:num_rows] = told_NV.gather(1, ids_NK)
        return told_NV

    def _drawn_from(self, logits_NV: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
        """Float32 logits, changed in place, as `sample` has cut them."""
        number, vocab_size = logits_NV.shape
        is_greedy_N1 = columns.is_greedy_N[:, None]
        threshold_N1, last_tie_N1 = (
            each[:number, None]
            for each in (self.memory.truncation.threshold_R, self.memory.truncation.last_tie_R)
        )
        logits_NV /= torch.where(is_greedy_N1, 1.0, columns.temperature_N[:, None])
        is_tie_NV = torch.arange(vocab_size, device=logits_NV.device) <= last_tie_N1
        is_kept_NV = (logits_NV > threshold_N1) | ((logits_NV == threshold_N1) & is_tie_NV)
        return logits_NV.masked_fill_(~(is_kept_NV | is_greedy_N1), -torch.inf)
