"""Where each row of an encoder-decoder model finds what the encoder made of its request's input."""

import numpy as np
import numpy.typing as npt
import torch

from engine_core.model_runner.cache import PagedKVCache
from engine_core.model_runner.config import RunnerConfig
from engine_core.models.interface import EncoderDecoder
from kernels.interface.operations import AttentionMetadata, AttentionSpec


class EncodedRows:
    """The encoder's block table of each row. Raises ValueError: see `make_attention_planner`."""

    def __init__(self, config: RunnerConfig, model: EncoderDecoder, cache: PagedKVCache) -> None:
        spec, encoder = model.kv_cache_spec, model.encoder_spec
        self._model, self._ops, self._kv_caches = model, config.ops, cache.kv_caches
        self._block_size = config.block_size
        width = -(-encoder.max_tokens // config.block_size)
        self._tables: npt.NDArray[np.int32] = np.zeros((config.max_num_seqs, width), np.int32)
        self._lengths: npt.NDArray[np.int32] = np.zeros(config.max_num_seqs, np.int32)
        self._planner = config.ops.make_attention_planner(
            AttentionSpec(
                num_query_heads=spec.num_query_heads,
                num_kv_heads=spec.num_kv_heads,
                head_size=spec.head_size,
                block_size=config.block_size,
                sliding_window=None,
                max_num_seqs=config.max_num_batched_tokens,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=encoder.max_tokens,
                dtype=config.dtype,
                kv_dtype=config.kv_dtype,
            )
        )

    def write_row(self, row: int, block_ids: list[int], num_encoder_tokens: int) -> None:
        """A sequence takes a row; `block_ids` are its request's."""
        self._tables[row, : len(block_ids)] = block_ids
        self._lengths[row] = num_encoder_tokens

    def fill(self, row: int, hidden_SE: torch.Tensor) -> None:
        """Write keys and values of the encoder's output to the blocks of a row, which the rows
        that fork from it share."""
        at_S = np.arange(len(hidden_SE))
        assert len(at_S) == self._lengths[row], "another length than the plan's"
        slots_S = self._tables[row, at_S // self._block_size].astype(np.int64) * self._block_size
        slots_S += at_S % self._block_size
        self._model.write_encoded(hidden_SE, torch.from_numpy(slots_S), self._kv_caches, self._ops)

    def plan(self, rows_T: npt.NDArray[np.int64]) -> AttentionMetadata:
        """For the tokens of a step, which are of these rows. Each attends to all that its row's
        encoder gave, so each is planned as a decode of its own."""
        num_tokens = len(rows_T)
        return self._planner.plan(
            query_start_loc_R1=torch.arange(num_tokens + 1, dtype=torch.int32),
            seq_lens_R=torch.from_numpy(self._lengths[rows_T]),
            block_table_RM=torch.from_numpy(self._tables[rows_T]),
            slot_mapping_T=torch.zeros(num_tokens, dtype=torch.int64),
            num_decodes=num_tokens,
            num_decode_tokens=num_tokens,
        )
