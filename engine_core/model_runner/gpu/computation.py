"""All that the device does in a step between the copy to it and the copy back.

Owns the tensors that live as long as the engine: rows, step inputs, cache, sampler. The same calls
serve a step that is launched piece by piece and one that is recorded. Must not know plans, names,
or what is in flight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine_core.model_runner.block_storage import BlockStorage
from engine_core.model_runner.cache_layout import CacheLayout
from engine_core.model_runner.gpu.rows import History
from engine_core.models import Model
from kernels.interface.device_steps import DeviceStepOperations, SamplingMode
from kernels.interface.operations import AttentionPlanner, AttentionSpec, ForwardContext, Operations
from kernels.interface.step_inputs import DeviceRows, PackedLayout, StepTensors


class StepComputation:
    """
    Args:
        packed: the device's words, where every step's lie.
        max_num_batched_tokens: most tokens of a step.
        dtype, kv_dtype: of the activations, and of the cache.
    """

    def __init__(
        self,
        *,
        model: Model,
        ops: Operations,
        steps: DeviceStepOperations,
        layout: CacheLayout,
        num_blocks: int,
        num_host_blocks: int,
        packed: torch.Tensor,
        packed_layout: PackedLayout,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
    ) -> None:
        self.model = model
        self._ops = ops
        self._steps = steps
        self._packed = packed
        self._layout = packed_layout
        self._block_size = block_size
        spec, device = model.kv_cache_spec, packed.device
        self.storage = BlockStorage(
            ops=ops,
            num_tensors=layout.num_tensors,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=kv_dtype,
        )
        self._planners: list[AttentionPlanner] = [
            ops.make_attention_planner(
                AttentionSpec(
                    num_query_heads=spec.num_query_heads,
                    num_kv_heads=spec.num_kv_heads,
                    head_size=spec.head_size,
                    block_size=block_size,
                    sliding_window=group.sliding_window,
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens,
                    max_model_len=max_model_len,
                    dtype=dtype,
                    kv_dtype=kv_dtype,
                )
            )
            for group in layout.groups
        ]
        places = [layout.place_of(layer) for layer in range(spec.num_layers)]
        self._group_of_layer = [group for group, _ in places]
        self._kv_caches = [self.storage.device_tensors[tensor] for _, tensor in places]
        self.rows = DeviceRows.allocate(
            num_rows=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            num_groups=len(layout.groups),
            device=device,
        )
        self._tensors = StepTensors.allocate(
            num_tokens=max_num_batched_tokens,
            num_sequences=max_num_seqs,
            num_groups=len(layout.groups),
            width=self.rows.block_tables.shape[2],
            device=device,
        )
        self.sampler = steps.make_sampler(
            num_rows=max_num_seqs, vocab_size=spec.vocab_size, device=device
        )
        sampling = self.sampler.rows
        self.sampling_tables = DeviceRows(
            token_ids=sampling.state_NX, block_tables=sampling.lists_3NM
        )
        """The sampling state as rows that updates are written to."""

    def update_rows(self) -> None:
        """Carry out the updates in the step's words."""
        self._steps.apply_row_updates(self._packed, self.rows)

    def write_history(self, history: History) -> None:
        """Tell penalties of the tokens that a row has now."""
        tokens = self.rows.token_ids[history.row]
        self.sampler.rows.write_history(
            history.row,
            tokens[: history.num_prompt_tokens],
            tokens[history.num_prompt_tokens : history.num_tokens],
        )

    def run(
        self,
        *,
        num_tokens: int,
        num_sequences: int,
        num_decodes: int,
        num_due: int,
        mode: SamplingMode,
        before_sampling: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        """From the step's words to `sampler.results`; chosen tokens are appended to their rows.

        Args:
            num_tokens, num_sequences, num_due: of the step, or more: the rest is padding.
            before_sampling: is given the raw logits.
        """
        self.update_rows()
        tensors = self._tensors.first(num_tokens, num_sequences)
        self._steps.prepare_step(
            self._packed, self._layout, self.rows, tensors, block_size=self._block_size
        )
        hidden_TE = self.model.forward(
            tensors.token_ids_T, tensors.positions_T, self._context(tensors, num_decodes)
        )
        if not num_due:
            return
        last_NE = hidden_TE.index_select(0, tensors.logits_at_R[:num_due])
        logits_NV = self.model.compute_logits(last_NE)
        if before_sampling is not None:
            before_sampling(logits_NV)
        self.sampler.sample(
            logits_NV, self._packed, self._layout, num_sequences=num_sequences, mode=mode
        )
        self._steps.append_sampled(
            self._packed,
            self._layout,
            self.sampler.results.token_ids_C[:num_due],
            self.rows,
            num_sequences=num_sequences,
        )

    def _context(self, tensors: StepTensors, num_decodes: int) -> ForwardContext:
        by_group = [
            planner.plan(
                query_start_loc_R1=tensors.query_start_loc_R1,
                seq_lens_R=tensors.seq_lens_R,
                block_table_RM=tensors.block_tables_GRM[group],
                slot_mapping_T=tensors.slot_mappings_GT[group],
                num_decodes=num_decodes,
                num_decode_tokens=num_decodes,
            )
            for group, planner in enumerate(self._planners)
        ]
        return ForwardContext(
            kv_caches=self._kv_caches,
            metadata=[by_group[group] for group in self._group_of_layer],
            ops=self._ops,
        )
