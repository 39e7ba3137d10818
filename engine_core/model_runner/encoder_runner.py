"""Runs plans of an encoder: every prompt whole in one step, one behind the other without padding.
Nothing of it is kept for another step; keys and values live for one layer."""

import dataclasses
import itertools
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine_core.devices import traits_of
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.cpu.synchronous_runner import SynchronousRunner
from engine_core.model_runner.pooling import named_answers, pool_prompt
from engine_core.model_runner.rows import PlacedRow, RunnerRows
from engine_core.models.encoders.bidirectional import AnyEncoder
from engine_core.models.encoders.encoder import Encoder
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from kernels.interface.operations import (
    AttentionMetadata,
    AttentionSpec,
    ForwardContext,
    allocate_kv_cache,
)
from protocol.pooling import PoolingParams

_BLOCK_SIZE = 8
"""Tokens of a block of a step's keys and values: a prompt begins with a block. No whole panel of
keys, which are read once: to write them in rows takes less."""
_MOST_LAYOUTS = 512
"""Layouts that are kept, one for each length of a prompt alone in its step."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """What a pass needs beside its token ids, which are written to `token_ids`; on a CPU
    `token_ids_T` is the same memory. `plans`: by window."""

    token_ids: npt.NDArray[np.int64]
    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    plans: dict[int | None, AttentionMetadata]
    context: ForwardContext


class EncoderRunner(SynchronousRunner):
    """See the module's docstring."""

    def __init__(self, config: RunnerConfig) -> None:
        model, ops = config.model, config.ops
        assert isinstance(model, AnyEncoder)
        spec, keys = model.spec, model.spec.keys_of(0)
        self.config = config
        self.model = model
        self.rows = RunnerRows(config)
        self._device, self._is_host = ops.device, traits_of(ops.device).is_host
        self._num_blocks = -(-config.max_num_batched_tokens // _BLOCK_SIZE) + config.max_num_seqs
        keys_and_values = allocate_kv_cache(
            ops, self._num_blocks, keys.kv_shape(_BLOCK_SIZE, config.dtype)
        )
        self._kv_caches = [keys_and_values] * spec.num_layers
        self._slots = np.arange(self._num_blocks * _BLOCK_SIZE)
        self._layout_of_one = lru_cache(_MOST_LAYOUTS)(self._layout)
        self._windows = [layer.reach for layer in spec.layers]
        self._planners = {
            window: ops.make_attention_planner(
                AttentionSpec(
                    num_query_heads=spec.num_query_heads,
                    num_kv_heads=keys.num_kv_heads,
                    head_size=keys.key_size,
                    block_size=_BLOCK_SIZE,
                    sliding_window=window,
                    max_num_seqs=config.max_num_seqs,
                    max_num_batched_tokens=config.max_num_batched_tokens,
                    max_model_len=config.max_model_len,
                    dtype=config.dtype,
                    kv_dtype=config.dtype,
                    bidirectional=True,
                )
            )
            for window in set(self._windows)
        }

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and pool every prompt of it. No weight asks for gradients, so torch records
        none without `inference_mode` too, which takes as long as a norm of a short prompt.
        Raises Exception: whatever the model raises; the plan's requests cannot go on."""
        self.rows.free(plan)
        placed = {each.row: each for each in self.rows.place(plan)}
        if not plan.total_num_scheduled_tokens:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        batch, start, answers = plan.batch, 0, {}
        prompts = [placed[row] for row in batch.rows.tolist()]
        hidden_TE = self._compute(prompts)
        for place, prompt in enumerate(prompts):
            stop = start + len(prompt.token_ids)
            if (pooling := prompt.request.pooling) is not None:
                states_NE = hidden_TE if len(prompts) == 1 else hidden_TE[start:stop]
                answers[place] = self._pool(pooling, prompt.token_ids, states_NE)
            start = stop
        pooled, failures = named_answers(batch.req_ids, answers)
        # what is not pooled asks whether the device still works
        tokens = [[0]] * len(batch.req_ids)
        return ModelRunnerOutput(
            req_ids=batch.req_ids, sampled_token_ids=tokens, pooled=pooled, failures=failures
        )

    def _pool(
        self, params: PoolingParams, token_ids: list[int], states_NE: torch.Tensor
    ) -> npt.NDArray[np.float32]:
        pooler = self.config.pooler
        assert pooler is not None, "a pooling request, and there is no pooler"
        is_exact = states_NE.dtype is torch.float32 or not self._is_host
        if is_exact and pooler.is_mean_direction(params):
            size = params.dimensions or pooler.config.vector_size
            return self.config.ops.mean_direction(states_NE, size)
        return pool_prompt(pooler, params, token_ids, states_NE.float().cpu().numpy())

    def _compute(self, prompts: list[PlacedRow]) -> torch.Tensor:
        """Hidden states of their tokens."""
        counts = [len(prompt.token_ids) for prompt in prompts]
        is_alone = len(counts) == 1
        layout = self._layout_of_one(counts[0]) if is_alone else self._layout(*counts)
        layout.token_ids[:] = [*itertools.chain.from_iterable(each.token_ids for each in prompts)]
        if not self._is_host:
            layout.token_ids_T.copy_(torch.from_numpy(layout.token_ids))
        positions_T = layout.positions_T
        second_of = {
            place: pooling.second_segment_start
            for place, each in enumerate(prompts)
            if (pooling := each.request.pooling) is not None
            and pooling.second_segment_start is not None
        }
        model = self.model
        if second_of and isinstance(model, Encoder) and model.config.num_token_types > 1:
            positions_T = positions_T.clone()
            stops = list(itertools.accumulate(counts))
            for place, second in second_of.items():
                num_second = max(0, counts[place] - second)
                stop = stops[place]
                positions_T[stop - num_second : stop] += model.num_positions
        if is_alone:  # a layout that is kept: others have been planned since
            for window, planner in self._planners.items():
                planner.plan_again(layout.plans[window])
        self.config.ops.wake_threads()  # they spin for less time than all of this takes
        return model.forward(layout.token_ids_T, positions_T, layout.context)

    def check_device(self) -> None:
        """Raises Exception: the device's context is lost."""
        torch.empty((), device=self._device).item()

    def warm_up(self) -> None:
        """Compute prompts of one token, of some and of all that a step has, so that nothing is
        compiled later and the memory is known to do."""
        most = min(self.config.max_num_batched_tokens, self.config.max_model_len)
        for counts in ((1,), (1, 2), (min(16, most),), (most,)):
            layout = self._layout(*counts)
            layout.token_ids_T.zero_()
            self.model.forward(layout.token_ids_T, layout.positions_T, layout.context)

    def _sent(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """The array on the device; on a CPU the same memory."""
        return torch.from_numpy(array).to(self._device)

    def _layout(self, *counts: int) -> _Layout:
        """The layout of a step of prompts of so many tokens.

        |    request 0    |    request 1 |   each from a block of its own
        """
        lens_R = np.array(counts, np.int32)
        starts_R1 = np.fromiter(itertools.accumulate(counts, initial=0), np.int32)
        num_blocks = -(-lens_R // _BLOCK_SIZE)
        firsts = np.cumsum(num_blocks) - num_blocks
        table_RM = np.add.outer(firsts, self._slots[: num_blocks.max()])
        np.minimum(table_RM, self._num_blocks - 1, out=table_RM)
        positions_T = np.concatenate([self._slots[:count] for count in counts])
        slots_T = positions_T + np.repeat(firsts * _BLOCK_SIZE, lens_R)
        query_start_loc_R1, seq_lens_R = self._sent(starts_R1), self._sent(lens_R)
        block_table_RM = self._sent(table_RM.astype(np.int32))
        slot_mapping_T = self._sent(slots_T)
        plans = {
            window: planner.plan(
                query_start_loc_R1=query_start_loc_R1,
                seq_lens_R=seq_lens_R,
                block_table_RM=block_table_RM,
                slot_mapping_T=slot_mapping_T,
                num_decodes=0,
                num_decode_tokens=0,
            )
            for window, planner in self._planners.items()
        }
        token_ids = np.empty_like(positions_T)
        return _Layout(
            token_ids=token_ids,
            token_ids_T=self._sent(token_ids),
            positions_T=self._sent(positions_T),
            plans=plans,
            context=ForwardContext(
                kv_caches=self._kv_caches,
                metadata=[plans[window] for window in self._windows],
                ops=self.config.ops,
            ),
        )
