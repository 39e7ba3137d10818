"""Runs plans of an encoder on a CPU: every prompt whole in one step, one behind the other without
padding. Nothing of it is kept for another step; keys and values live for one layer."""

import itertools
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.pooling import named_answers, pool_prompt
from engine_core.model_runner.rows import PlacedRow, RunnerRows
from engine_core.models.encoder import Encoder
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from kernels.interface.operations import AttentionSpec, ForwardContext

_BLOCK_SIZE = 8
"""Of the keys and values of a step: a prompt begins with a block. No whole panel of keys, which are
read once: to write them in rows takes less."""
_MOST_LAYOUTS = 512
"""That are kept, of lengths of a prompt alone in its step."""


class EncoderRunner:
    """One step at a time: it is computed when it is collected."""

    max_steps_in_flight = 1

    def __init__(self, config: RunnerConfig) -> None:
        model, ops = config.model, config.ops
        assert isinstance(model, Encoder)
        spec = model.kv_cache_spec
        self.config = config
        self._model = model
        self.rows = RunnerRows(config)
        self._num_blocks = -(-config.max_num_batched_tokens // _BLOCK_SIZE) + config.max_num_seqs
        keys_and_values = ops.allocate_kv_cache(
            self._num_blocks, _BLOCK_SIZE, spec.num_kv_heads, spec.head_size, config.dtype
        )
        self._kv_caches = [keys_and_values] * spec.num_layers
        self._slots = np.arange(self._num_blocks * _BLOCK_SIZE)
        self._layout_of_one = lru_cache(_MOST_LAYOUTS)(self._layout)
        self._planners = {
            window: ops.make_attention_planner(
                AttentionSpec(
                    num_query_heads=spec.num_query_heads,
                    num_kv_heads=spec.num_kv_heads,
                    head_size=spec.head_size,
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
            for window in set(spec.sliding_windows)
        }
        self._in_flight: SchedulerOutput | None = None

    def submit(self, plan: SchedulerOutput) -> None:
        """Take the step that the next `collect` runs."""
        assert self._in_flight is None, "collect the step in flight first"
        self._in_flight = plan

    def collect(self) -> ModelRunnerOutput:
        """See `execute`."""
        plan, self._in_flight = self._in_flight, None
        assert plan is not None, "no step is in flight"
        return self.execute(plan)

    def check_device(self) -> None:
        """A CPU takes work as long as the process lives."""

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
        states_TE = (hidden_TE if hidden_TE.dtype is torch.float32 else hidden_TE.float()).numpy()
        for place, prompt in enumerate(prompts):
            stop = start + len(prompt.token_ids)
            if prompt.pooling is not None:
                assert self.config.pooler is not None, "a pooling request, and there is no pooler"
                answers[place] = pool_prompt(
                    self.config.pooler, prompt.pooling, prompt.token_ids, states_TE[start:stop]
                )
            start = stop
        pooled, failures = named_answers(batch.req_ids, answers)
        # what is not pooled asks whether the device still works
        tokens = [[0]] * len(batch.req_ids)
        return ModelRunnerOutput(
            req_ids=batch.req_ids, sampled_token_ids=tokens, pooled=pooled, failures=failures
        )

    def _compute(self, prompts: list[PlacedRow]) -> torch.Tensor:
        """Hidden states of their tokens."""
        counts = [len(prompt.token_ids) for prompt in prompts]
        layout = self._layout_of_one if len(counts) == 1 else self._layout
        positions_T, arrays = layout(*counts)
        every_token = itertools.chain.from_iterable(prompt.token_ids for prompt in prompts)
        token_ids_T = np.array([*every_token], np.int64)
        plans = {
            window: planner.plan(**arrays, num_decodes=0, num_decode_tokens=0)
            for window, planner in self._planners.items()
        }
        spec = self._model.kv_cache_spec
        second_of = {
            place: each.pooling.second_segment_start
            for place, each in enumerate(prompts)
            if each.pooling is not None and each.pooling.second_segment_start is not None
        }
        if spec.num_token_types > 1 and second_of:
            positions_T = positions_T.clone()
            stops = list(itertools.accumulate(counts))
            for place, second in second_of.items():
                num_second = max(0, counts[place] - second)
                stop = stops[place]
                positions_T[stop - num_second : stop] += self._model.num_positions
        self.config.ops.wake_threads()  # they spin for less time than all of this takes
        return self._model.forward(
            torch.from_numpy(token_ids_T),
            positions_T,
            ForwardContext(
                kv_caches=self._kv_caches,
                metadata=[plans[window] for window in spec.sliding_windows],
                ops=self.config.ops,
            ),
        )

    def _layout(self, *counts: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Of prompts of so many tokens: positions, and what planners take.

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
        return torch.from_numpy(positions_T), {
            "query_start_loc_R1": torch.from_numpy(starts_R1),
            "seq_lens_R": torch.from_numpy(lens_R),
            "block_table_RM": torch.from_numpy(table_RM.astype(np.int32)),
            "slot_mapping_T": torch.from_numpy(slots_T),
        }
