"""Runs plans on a model: only code common to every model. Be paranoid about adding a line.

Owns the persistent batch, the cache tensors and the sampling state. Must not know a model's
architecture, sockets, or why the scheduler chose what it chose.
"""

import dataclasses
import secrets

import msgspec
import torch

from engine_core.model_runner.cache_layout import CacheLayout
from engine_core.model_runner.persistent_batch import PersistentBatch
from engine_core.model_runner.sampling import Sampler, SamplingState
from engine_core.model_runner.step_inputs import StepInputs, gather_step_inputs
from engine_core.models import Model
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from kernels.interface import AttentionMetadata, ForwardContext, KVCache, Operations
from protocol.outputs import Logprobs
from protocol.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """What the runner keeps of a request while it holds no row."""

    sampling_params: SamplingParams
    num_prompt_tokens: int


class ModelRunner:
    """
    Args:
        model: weights and forward pass.
        ops: the backend that the model was loaded with.
        layout: how layers share blocks.
        num_blocks: usable blocks; one more is allocated for the null block, id 0.
        block_size: tokens a block.
        max_num_seqs: rows of the persistent batch.
        max_model_len: most tokens a row.
        dtype: of the cache.
        eos_token_ids: what min_tokens masks beside a request's own stop tokens.
    """

    def __init__(
        self,
        *,
        model: Model,
        ops: Operations,
        layout: CacheLayout,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._model = model
        self._ops = ops
        self._layout = layout
        self._dtype = dtype
        self._eos_token_ids = eos_token_ids
        spec = model.kv_cache_spec
        tensors: list[KVCache] = [
            ops.allocate_kv_cache(
                num_blocks + 1, block_size, spec.num_kv_heads, spec.head_size, dtype
            )
            for _ in range(layout.num_tensors)
        ]
        places = [layout.place_of(layer) for layer in range(spec.num_layers)]
        self._group_of_layer = [group for group, _ in places]
        self._kv_caches = [tensors[tensor] for _, tensor in places]
        self.batch = PersistentBatch(
            max_num_rows=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            num_groups=len(layout.groups),
        )
        self._state = SamplingState(max_num_rows=max_num_seqs, vocab_size=spec.vocab_size)
        self._sampler = Sampler(self._state, ops)
        self._known: dict[str, _Known] = {}

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and choose the next token of every request that is up to date.

        Raises:
            Exception: whatever the model raises; the plan's requests cannot go on.
        """
        self._update_batch(plan)
        if not plan.total_num_scheduled_tokens:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        inputs = gather_step_inputs(self.batch, plan.num_scheduled_tokens)
        hidden_TE = self._model.forward(
            torch.from_numpy(inputs.token_ids_T),
            torch.from_numpy(inputs.positions_T),
            self._forward_context(inputs),
        )
        return self._sample(list(plan.num_scheduled_tokens), inputs, hidden_TE)

    # ------------------------------------------------------------------ rows

    def _update_batch(self, plan: SchedulerOutput) -> None:
        for request_id in plan.finished_req_ids:
            self._drop_row(request_id)
            self._known.pop(request_id, None)
        for request_id in plan.preempted_req_ids:
            self._drop_row(request_id)
        for new in plan.scheduled_new_reqs:
            known = _Known(_seeded(new.sampling_params), len(new.prompt_token_ids))
            self._known[new.req_id] = known
            tokens = [*new.prompt_token_ids, *new.output_token_ids]
            self._take_row(new.req_id, tokens, new.block_ids, new.num_computed_tokens)
        cached = plan.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            block_ids = cached.new_block_ids[index]
            if cached.resumed_from_preemption[index]:
                resumed = cached.resumed_token_ids[index]
                assert resumed is not None and block_ids is not None
                self._take_row(request_id, resumed, block_ids, cached.num_computed_tokens[index])
                continue
            row = self.batch.row_of[request_id]
            self.batch.num_computed[row] = cached.num_computed_tokens[index]
            if block_ids is not None:
                self.batch.append_blocks(row, block_ids)

    def _take_row(
        self,
        request_id: str,
        token_ids: list[int],
        block_ids: tuple[list[int], ...],
        num_computed: int,
    ) -> None:
        row = self.batch.add(request_id, token_ids, block_ids, num_computed)
        known = self._known[request_id]
        self._state.add(
            row,
            known.sampling_params,
            prompt_token_ids=token_ids[: known.num_prompt_tokens],
            output_token_ids=token_ids[known.num_prompt_tokens :],
            eos_token_ids=self._eos_token_ids,
        )

    def _drop_row(self, request_id: str) -> None:
        row = self.batch.remove(request_id)
        if row is not None:
            self._state.remove(row)

    # ------------------------------------------------------------------ one step

    def _forward_context(self, inputs: StepInputs) -> ForwardContext:
        query_start_R1 = torch.from_numpy(inputs.query_start_R1)
        seq_lens_R = torch.from_numpy(inputs.seq_lens_R)
        spec = self._model.kv_cache_spec
        by_group: list[AttentionMetadata] = [
            self._ops.plan_attention(
                query_start_loc_R1=query_start_R1,
                seq_lens_R=seq_lens_R,
                block_table_RM=torch.from_numpy(block_table_RM),
                slot_mapping_T=torch.from_numpy(slot_mapping_T),
                block_size=self.batch.block_size,
                num_query_heads=spec.num_query_heads,
                num_kv_heads=spec.num_kv_heads,
                dtype=self._dtype,
                sliding_window=group.sliding_window,
            )
            for group, block_table_RM, slot_mapping_T in zip(
                self._layout.groups, inputs.block_tables_GRM, inputs.slot_mappings_GT, strict=True
            )
        ]
        return ForwardContext(
            kv_caches=self._kv_caches,
            metadata=[by_group[group] for group in self._group_of_layer],
            ops=self._ops,
        )

    def _sample(
        self, request_ids: list[str], inputs: StepInputs, hidden_TE: torch.Tensor
    ) -> ModelRunnerOutput:
        token_lists: list[list[int]] = [[] for _ in request_ids]
        logprobs: dict[str, Logprobs] = {}
        failures: dict[str, str] = {}
        if inputs.sampled_R.size:
            last_R = torch.from_numpy(inputs.query_start_R1[1:][inputs.sampled_R].astype("int64"))
            logits_RV = self._model.compute_logits(hidden_TE[last_R - 1])
            rows = inputs.rows_R[inputs.sampled_R]
            sampled = self._sampler.sample(logits_RV, rows, self.batch.num_tokens[rows])
            for index, request in enumerate(inputs.sampled_R.tolist()):
                request_id = request_ids[request]
                if index in sampled.failures:
                    failures[request_id] = sampled.failures[index]
                    continue
                row, token_id = int(rows[index]), int(sampled.token_ids[index])
                token_lists[request] = [token_id]
                self.batch.append_token(row, token_id)
                self._state.append(row, [token_id])
                columns = sampled.logprobs[index]
                if columns is not None:
                    logprobs[request_id] = columns
        return ModelRunnerOutput(
            req_ids=request_ids,
            sampled_token_ids=token_lists,
            logprobs=logprobs or None,
            failures=failures,
        )


def _seeded(params: SamplingParams) -> SamplingParams:
    """Draw the seed of a request that brought none: once, so that a preemption changes nothing."""
    if params.is_greedy or params.seed is not None:
        return params
    return msgspec.structs.replace(params, seed=secrets.randbits(64))
