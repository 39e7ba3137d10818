"""Where each row of an encoder-decoder model finds what the encoder made of its request's input."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from engine_core.kv_cache import BlockIds
from engine_core.model_runner.cache import PagedKVCache
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.rows import PlacedRow
from engine_core.models.interface import EncoderDecoder
from kernels.interface.operations import AttentionMetadata, AttentionSpec


class EncodedRows:
    """The encoder's block table of each row. Raises ValueError: see `make_attention_planner`."""

    def __init__(self, config: RunnerConfig, model: EncoderDecoder, cache: PagedKVCache) -> None:
        spec, most = model.kv_cache_spec, model.max_encoder_tokens
        self._model, self._ops, self._kv_caches = model, config.ops, cache.kv_caches
        self._block_size = config.block_size
        width = -(-most // config.block_size)
        self._tables: npt.NDArray[np.int32] = np.zeros((config.max_num_seqs, width), np.int32)
        self._lengths: npt.NDArray[np.int32] = np.zeros(config.max_num_seqs, np.int32)
        self._identifiers: dict[int, bytes] = {}
        self._planner = config.ops.make_attention_planner(
            AttentionSpec(
                num_query_heads=spec.num_query_heads,
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                block_size=config.block_size,
                sliding_window=None,
                max_num_seqs=config.max_num_batched_tokens,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=most,
                dtype=config.dtype,
                kv_dtype=config.kv_dtype,
            )
        )

    def write_row(self, placed: PlacedRow) -> BlockIds:
        """A sequence takes a row. Returns its other tables."""
        *tables, encoder_table = placed.block_ids
        (feature,) = placed.mm_features
        self._tables[placed.row, : len(encoder_table)] = encoder_table
        self._lengths[placed.row] = feature.num_rows
        self._identifiers[placed.row] = feature.identifier
        return tuple(tables)

    def of_step(
        self,
        rows_R: npt.NDArray[np.int64],
        num_computed_R: npt.NDArray[np.integer],
        counts_R: npt.NDArray[np.integer],
        outputs: Mapping[bytes, torch.Tensor | str],
    ) -> tuple[AttentionMetadata, dict[int, str]]:
        """The blocks of sequences that begin are filled; those that fork from them share these.
        Returns what each token attends to, planned as a decode of its own, and the sequences
        (places in the step) that lack an output, and why."""
        failures = {}
        for place in np.flatnonzero(num_computed_R == 0).tolist():
            row = int(rows_R[place])
            output = outputs.get(self._identifiers[row], "it is missing: please report")
            if isinstance(output, str):
                failures[place] = output
            else:
                self._fill(row, output)
        rows_T = np.repeat(rows_R, counts_R)
        num_tokens = len(rows_T)
        plan = self._planner.plan(
            query_start_loc_R1=torch.arange(num_tokens + 1, dtype=torch.int32),
            seq_lens_R=torch.from_numpy(self._lengths[rows_T]),
            block_table_RM=torch.from_numpy(self._tables[rows_T]),
            slot_mapping_T=torch.zeros(num_tokens, dtype=torch.int64),
            num_decodes=num_tokens,
            num_decode_tokens=num_tokens,
        )
        return plan, failures

    def _fill(self, row: int, hidden_SE: torch.Tensor) -> None:
        at_S = np.arange(len(hidden_SE))
        slots_S = self._tables[row, at_S // self._block_size].astype(np.int64) * self._block_size
        slots_S += at_S % self._block_size
        self._model.write_encoded(hidden_SE, torch.from_numpy(slots_S), self._kv_caches, self._ops)
