"""All that the device does in a step between the copy to it and the copy back: the same calls for a
step that is launched piece by piece and for one that is captured in a graph."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine_core.model_runner.cache import PagedKVCache
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.gpu.input_batch import PenaltyRow
from kernels.interface.device_steps import DeviceStepOperations, SamplingMode
from kernels.interface.step_inputs import DeviceRows, PackedLayout, StepTensors


class StepComputation:
    """Has the tensors that live as long as the engine: rows, step inputs, cache, sampler.

    Args:
        steps: operations of the device.
        packed: on the device, the buffer of every step.
        packed_layout: of `packed`.
    """

    def __init__(
        self,
        config: RunnerConfig,
        *,
        steps: DeviceStepOperations,
        packed: torch.Tensor,
        packed_layout: PackedLayout,
    ) -> None:
        self._model = config.model
        self._steps = steps
        self._packed = packed
        self._layout = packed_layout
        self._block_size = config.block_size
        self._cache = PagedKVCache(config)
        self.storage = self._cache.storage
        self.rows = DeviceRows.allocate(
            num_rows=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_groups=config.num_groups,
            device=packed.device,
        )
        self._tensors = StepTensors.allocate(
            num_tokens=config.max_num_batched_tokens,
            num_sequences=config.max_num_seqs,
            num_groups=config.num_groups,
            width=self.rows.block_tables.shape[2],
            device=packed.device,
        )
        self.sampler = steps.make_sampler(
            num_rows=config.max_num_seqs, vocab_size=config.vocab_size, device=packed.device
        )
        sampling = self.sampler.rows
        self.sampling_tables = DeviceRows(
            token_ids=sampling.state_NX, block_tables=sampling.lists_3NM
        )
        """The sampling state as rows that updates are written to."""

    def update_rows(self) -> None:
        """Carry out the updates in the step's buffer."""
        self._steps.apply_row_updates(self._packed, self.rows)

    def count_for_penalties(self, penalty: PenaltyRow) -> None:
        """Count the tokens that a row has now."""
        tokens = self.rows.token_ids[penalty.row]
        self.sampler.rows.write_history(
            penalty.row,
            tokens[: penalty.num_prompt_tokens],
            tokens[penalty.num_prompt_tokens : penalty.num_tokens],
        )

    def run(
        self,
        *,
        num_tokens: int,
        num_sequences: int,
        num_decodes: int,
        num_sampled: int,
        mode: SamplingMode,
        before_sampling: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """From the step's buffer to `sampler.results`; chosen tokens are appended to their rows.

        Args:
            num_tokens, num_sequences, num_sampled: of the step, or more: the rest is padding.
            before_sampling: is given the raw logits.
        """
        self.update_rows()
        tensors = self._tensors.first(num_tokens, num_sequences)
        self._steps.prepare_step(
            self._packed, self._layout, self.rows, tensors, block_size=self._block_size
        )
        context = self._cache.forward_context(
            query_start_loc_R1=tensors.query_start_loc_R1,
            seq_lens_R=tensors.seq_lens_R,
            block_tables_GRM=tensors.block_tables_GRM,
            slot_mappings_GT=tensors.slot_mappings_GT,
            num_decodes=num_decodes,
        )
        hidden_TE = self._model.forward(tensors.token_ids_T, tensors.positions_T, context)
        if not num_sampled:
            return
        last_NE = hidden_TE.index_select(0, tensors.logits_at_R[:num_sampled])
        logits_NV = self._model.compute_logits(last_NE)
        if before_sampling is not None:
            before_sampling(logits_NV)
        self.sampler.sample(
            logits_NV, self._packed, self._layout, num_sequences=num_sequences, mode=mode
        )
        self._steps.append_sampled(
            self._packed,
            self._layout,
            self.sampler.results.token_ids_C[:num_sampled],
            self.rows,
            num_sequences=num_sequences,
        )
