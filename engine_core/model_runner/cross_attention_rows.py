"""Where each row of an encoder-decoder model finds what the encoder made of its request's input."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch

from engine_core.model_runner.cache import PagedKVCache
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.row_parts import Int32Array, RowPart, StepPart, StepRows
from engine_core.model_runner.rows import PlacedRow
from engine_core.models.interface import EncoderDecoder
from engine_core.scheduler import SchedulerOutput
from kernels.interface.operations import AttentionMetadata, AttentionSpec, ForwardContext


@dataclasses.dataclass(frozen=True)
class CrossAttentionStep(StepPart):
    """`attended`: by each token, planned as a decode of its own. `failures`: requests that lack an
    output, and why."""

    attended: AttentionMetadata
    failures: dict[str, str]

    def in_context(self, context: ForwardContext) -> ForwardContext:
        return dataclasses.replace(context, encoded=self.attended)


class CrossAttentionRows(RowPart):
    """The encoder's block table of each row. Raises ValueError: see `make_attention_planner`.
    `outputs`: of the encoder, by identifier; a text says why there is none."""

    def __init__(
        self,
        config: RunnerConfig,
        model: EncoderDecoder,
        cache: PagedKVCache,
        outputs: Mapping[bytes, torch.Tensor | str],
    ) -> None:
        self._outputs = outputs
        keys, most = model.spec.keys_of(0), model.max_encoder_tokens
        self._model, self._ops, self._kv_caches = model, config.ops, cache.kv_caches
        self._block_size = config.block_size
        width = -(-most // config.block_size)
        self._tables: Int32Array = np.zeros((config.max_num_seqs, width), np.int32)
        self._lengths: Int32Array = np.zeros(config.max_num_seqs, np.int32)
        self._identifiers: dict[int, bytes] = {}
        self._planner = config.ops.make_attention_planner(
            AttentionSpec(
                num_query_heads=model.spec.num_query_heads,
                num_kv_heads=keys.num_kv_heads,
                head_size=keys.key_size,
                block_size=config.block_size,
                sliding_window=None,
                max_num_seqs=config.max_num_batched_tokens,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=most,
                dtype=config.dtype,
                kv_dtype=config.kv_dtype,
            )
        )

    def place(self, placed: PlacedRow) -> None:
        encoder_table = placed.block_ids[-1]
        (feature,) = placed.request.mm_features
        self._tables[placed.row, : len(encoder_table)] = encoder_table
        self._lengths[placed.row] = feature.num_rows
        self._identifiers[placed.row] = feature.identifier

    def of_step(self, plan: SchedulerOutput, rows: StepRows) -> CrossAttentionStep:
        """The blocks of sequences that begin are filled; those that fork from them share these."""
        failures = {}
        for index in np.flatnonzero(rows.num_computed_R == 0).tolist():
            row = int(rows.rows_R[index])
            output = self._outputs.get(self._identifiers[row], "it is missing: please report")
            if isinstance(output, str):
                failures[plan.batch.req_ids[rows.place_R[index]]] = output
            else:
                self._fill(row, output)
        rows_T = np.repeat(rows.rows_R, rows.num_scheduled_R)
        num_tokens = len(rows_T)
        attended = self._planner.plan(
            query_start_loc_R1=torch.arange(num_tokens + 1, dtype=torch.int32),
            seq_lens_R=torch.from_numpy(self._lengths[rows_T]),
            block_table_RM=torch.from_numpy(self._tables[rows_T]),
            slot_mapping_T=torch.zeros(num_tokens, dtype=torch.int64),
            num_decodes=num_tokens,
            num_decode_tokens=num_tokens,
        )
        return CrossAttentionStep(attended, failures)

    def _fill(self, row: int, hidden_SE: torch.Tensor) -> None:
        at_S = np.arange(len(hidden_SE))
        slots_S = self._tables[row, at_S // self._block_size].astype(np.int64) * self._block_size
        slots_S += at_S % self._block_size
        self._model.write_encoded(hidden_SE, torch.from_numpy(slots_S), self._kv_caches, self._ops)
