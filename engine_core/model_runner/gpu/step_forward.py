"""The pass of a step through the model: from the step's words on the device to logits."""

import dataclasses

import torch

from engine_core.model_runner.cache import PagedKVCache
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.gpu.packing import PackedStepBuffer
from engine_core.model_runner.gpu.step import GPUStep
from engine_core.models.interface import Model
from kernels.interface.device_steps import DeviceStepOperations
from kernels.interface.operations import AttentionPlanner, OutputRows
from kernels.interface.step_inputs import DeviceRows, StepTensors


class StepForward:
    """The same calls for a step that is launched piece by piece and for one that is captured in a
    graph. Allocates what passes need, before memory is measured.

    Args:
        words: of the step that was sent last.
        rows: tokens and block tables of running sequences.
    """

    def __init__(
        self,
        config: RunnerConfig,
        cache: PagedKVCache,
        *,
        steps: DeviceStepOperations,
        words: PackedStepBuffer,
        rows: DeviceRows,
    ) -> None:
        self._block_size = config.block_size
        self._cache, self._steps, self._words, self._rows = cache, steps, words, rows
        device = rows.block_tables.device
        self._output_planner = cache.output_planner
        self._output_starts_R1 = torch.arange(
            config.max_num_logits + 1, dtype=torch.int32, device=device
        )
        self._tensors = StepTensors.allocate(
            num_tokens=config.max_num_batched_tokens,
            num_sequences=config.max_num_logits,
            num_groups=config.num_groups,
            width=rows.block_tables.shape[2],
            device=device,
        )

    def __call__(self, model: Model, step: GPUStep) -> torch.Tensor | None:
        """The logits of what is sampled; None if nothing is."""
        packed, layout = self._words.device_words, self._words.layout
        num_sequences, num_sampled = len(step.rows_R), len(step.sampled_N)
        tensors = self._tensors.first(step.num_tokens, num_sequences)
        self._steps.prepare_step(packed, layout, self._rows, tensors, block_size=self._block_size)
        ends_T = next((part.ends_T for part in step.parts if part.ends_T is not None), None)
        context = self._cache.forward_context(
            query_start_loc_R1=tensors.query_start_loc_R1,
            seq_lens_R=tensors.seq_lens_R,
            block_tables_GRM=tensors.block_tables_GRM,
            slot_mappings_GT=tensors.slot_mappings_GT,
            num_decodes=step.num_decodes,
            num_decode_tokens=0 if step.is_padded and step.num_tokens > num_sequences else None,
            num_long_prefills=step.num_long_prefills,
            ends_T=None if ends_T is None else self._cache.sent(ends_T),
        )
        output = None
        if step.reads_last_rows and self._output_planner is not None:
            output = self._last_rows(self._output_planner, tensors)
            context = dataclasses.replace(context, output=output)
        for part in step.parts:
            context = part.in_context(context)
        hidden_TE = model.forward(tensors.token_ids_T, tensors.positions_T, context)
        for part in step.parts:
            part.read(hidden_TE)
        if not num_sampled:
            return None
        at_N = tensors.logits_at_R[:num_sampled]
        if output is not None and len(hidden_TE) < step.num_tokens:
            at_N = torch.searchsorted(output.rows_N, at_N)
        last_NE = hidden_TE.index_select(0, at_N)
        return model.compute_logits(last_NE)

    def _last_rows(self, planner: AttentionPlanner, tensors: StepTensors) -> OutputRows:
        """Of each entry, sampled or not; to the last layer all of them are decodes."""
        number, group = len(tensors.seq_lens_R), self._cache.last_group
        metadata = planner.plan(
            query_start_loc_R1=self._output_starts_R1[: number + 1],
            seq_lens_R=tensors.seq_lens_R,
            block_table_RM=tensors.block_tables_GRM[group],
            # nothing is written; all that is read of a slot is that it is not padding
            slot_mapping_T=tensors.slot_mappings_GT[group, :number],
            num_decodes=number,
            num_decode_tokens=number,
        )
        return OutputRows(tensors.query_start_loc_R1[1:].long() - 1, metadata)
