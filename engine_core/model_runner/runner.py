"""Runs plans on a model: only code common to every model. Be paranoid about adding a line.

Owns the persistent batch, the block storage and the sampling state. Must not know a model's
architecture, sockets, or why the scheduler chose what it chose. A step in which no sequence is
new, resumed or given a block does no Python work a sequence.
"""

import dataclasses
import secrets

import msgspec
import numpy as np
import torch

from engine_core.kv_cache import BlockIds
from engine_core.model_runner.block_storage import BlockStorage
from engine_core.model_runner.cache_layout import CacheLayout
from engine_core.model_runner.persistent_batch import Int32Array, Int64Array, PersistentBatch
from engine_core.model_runner.sampling import Sampler, SamplingState
from engine_core.model_runner.step_inputs import StepInputs, gather_step_inputs
from engine_core.models import Model
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from kernels.interface.operations import (
    AttentionMetadata,
    AttentionSpec,
    ForwardContext,
    Operations,
)
from protocol.outputs import Logprobs
from protocol.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """What the runner keeps of a sequence while it holds no row."""

    sampling_params: SamplingParams
    num_prompt_tokens: int


class ModelRunner:
    """
    Args:
        model: weights and forward pass.
        ops: the backend that the model was loaded with.
        layout: how layers share blocks.
        num_blocks: usable blocks on the device; one more is allocated for the null block, id 0.
        block_size: tokens a block.
        max_num_seqs: rows of the persistent batch.
        max_model_len: most tokens a row.
        dtype: of the activations.
        kv_dtype: of the cache; None: as the activations.
        eos_token_ids: what min_tokens masks beside a request's own stop tokens.
        num_host_blocks: blocks in host memory that a plan may copy from and to.
        max_num_batched_tokens: most tokens of a step; None: as many as the rows can hold.
    """

    max_steps_in_flight = 1

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
        num_host_blocks: int = 0,
        max_num_batched_tokens: int | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self._model = model
        self._ops = ops
        self._eos_token_ids = eos_token_ids
        spec = model.kv_cache_spec
        self.storage = BlockStorage(
            ops=ops,
            num_tensors=layout.num_tensors,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            block_size=block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            dtype=kv_dtype or dtype,
        )
        places = [layout.place_of(layer) for layer in range(spec.num_layers)]
        self._group_of_layer = [group for group, _ in places]
        self._planners = [
            ops.make_attention_planner(
                AttentionSpec(
                    num_query_heads=spec.num_query_heads,
                    num_kv_heads=spec.num_kv_heads,
                    head_size=spec.head_size,
                    block_size=block_size,
                    sliding_window=group.sliding_window,
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens or max_num_seqs * max_model_len,
                    max_model_len=max_model_len,
                    dtype=dtype,
                    kv_dtype=kv_dtype or dtype,
                )
            )
            for group in layout.groups
        ]
        self._kv_caches = [self.storage.device_tensors[tensor] for _, tensor in places]
        self.batch = PersistentBatch(
            max_num_rows=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            num_groups=len(layout.groups),
        )
        self._state = SamplingState(max_num_rows=max_num_seqs, vocab_size=spec.vocab_size)
        self._sampler = Sampler(self._state, ops)
        self._known: dict[str, _Known] = {}
        self._submitted: SchedulerOutput | None = None

    def submit(self, plan: SchedulerOutput) -> None:
        """Keep a plan for `collect`, which runs it: there is no other device to run it on."""
        assert self._submitted is None, "the step before it has not been collected"
        self._submitted = plan

    def collect(self) -> ModelRunnerOutput:
        """Run the submitted plan, see `execute`."""
        plan, self._submitted = self._submitted, None
        assert plan is not None, "no step has been submitted"
        return self.execute(plan)

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and choose the next token of every sequence that is up to date.

        Raises:
            Exception: whatever the model raises; the plan's requests cannot go on.
        """
        self._drop_rows(plan)
        self.storage.carry_out(plan.copies)
        self._update_rows(plan)
        if not plan.total_num_scheduled_tokens:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        inputs = gather_step_inputs(
            self.batch,
            rows=plan.batch.rows,
            num_computed=plan.batch.num_computed_tokens,
            num_scheduled=plan.batch.num_scheduled_tokens,
            decodes_first=self._ops.needs_decodes_first,
        )
        hidden_TE = self._model.forward(
            torch.from_numpy(inputs.token_ids_T),
            torch.from_numpy(inputs.positions_T),
            self._forward_context(inputs),
        )
        return self._sample(plan, inputs, hidden_TE)

    # ------------------------------------------------------------------ rows

    def _drop_rows(self, plan: SchedulerOutput) -> None:
        for request_id in plan.finished_req_ids:
            self._drop_row(request_id)
            self._known.pop(request_id, None)
        for request_id in plan.preempted_req_ids:
            self._drop_row(request_id)

    def _drop_row(self, request_id: str) -> None:
        row = self.batch.remove(request_id)
        if row is not None:
            self._state.remove(row)

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for new in plan.scheduled_new_reqs:
            known = _Known(_seeded(new.sampling_params), len(new.prompt_token_ids))
            self._known[new.req_id] = known
            tokens = [*new.prompt_token_ids, *new.output_token_ids]
            self._fill_row(new.req_id, new.row, tokens, new.block_ids)
        for again in plan.resumed_reqs:
            self._fill_row(again.req_id, again.row, again.token_ids, again.block_ids)
        for update in plan.block_updates:
            self.batch.write_blocks(update.row, update.start, update.block_ids)

    def _fill_row(
        self, request_id: str, row: int, token_ids: list[int], block_ids: BlockIds
    ) -> None:
        self.batch.place(request_id, row, token_ids, block_ids)
        known = self._known[request_id]
        self._state.add(
            row,
            known.sampling_params,
            prompt_token_ids=token_ids[: known.num_prompt_tokens],
            output_token_ids=token_ids[known.num_prompt_tokens :],
            eos_token_ids=self._eos_token_ids,
        )

    # ------------------------------------------------------------------ one step

    def _forward_context(self, inputs: StepInputs) -> ForwardContext:
        query_start_R1 = torch.from_numpy(inputs.query_start_R1)
        seq_lens_R = torch.from_numpy(inputs.seq_lens_R)
        by_group: list[AttentionMetadata] = [
            planner.plan(
                query_start_loc_R1=query_start_R1,
                seq_lens_R=seq_lens_R,
                block_table_RM=torch.from_numpy(block_table_RM),
                slot_mapping_T=torch.from_numpy(slot_mapping_T),
                num_decodes=inputs.num_decodes,
                num_decode_tokens=inputs.num_decodes,
            )
            for planner, block_table_RM, slot_mapping_T in zip(
                self._planners, inputs.block_tables_GRM, inputs.slot_mappings_GT, strict=True
            )
        ]
        return ForwardContext(
            kv_caches=self._kv_caches,
            metadata=[by_group[group] for group in self._group_of_layer],
            ops=self._ops,
        )

    def _sample(
        self, plan: SchedulerOutput, inputs: StepInputs, hidden_TE: torch.Tensor
    ) -> ModelRunnerOutput:
        request_ids = plan.batch.req_ids
        token_ids_R = np.zeros(len(request_ids), np.int32)
        logprobs: dict[str, Logprobs] = {}
        failures: dict[str, str] = {}
        due_R = inputs.sampled_R
        if due_R.size:
            rows = inputs.rows_R[due_R]
            if due_R.size != len(hidden_TE):  # else each token is its sequence's last
                last_R = torch.from_numpy(inputs.query_start_R1[1:][due_R].astype("int64"))
                hidden_TE = hidden_TE[last_R - 1]
            logits_RV = self._model.compute_logits(hidden_TE)
            sampled = self._sampler.sample(logits_RV, rows, self.batch.num_tokens[rows])
            due_R = inputs.batch_index_R[due_R]  # from here on as the plan has them
            logprobs = {request_ids[due_R[at]]: columns for at, columns in sampled.logprobs.items()}
            failures = {request_ids[due_R[at]]: why for at, why in sampled.failures.items()}
            chosen = sampled.token_ids
            if failures:
                good = np.delete(np.arange(len(rows)), list(sampled.failures))
                due_R, rows, chosen = due_R[good], rows[good], chosen[good]
            token_ids_R[due_R] = chosen
            self.batch.append_tokens(rows, chosen)
            self._state.append(rows, chosen)
        return ModelRunnerOutput(
            req_ids=request_ids,
            sampled_token_ids=(
                _as_lists(token_ids_R, due_R) if plan.scheduled_spec_decode_tokens else token_ids_R
            ),
            logprobs=logprobs or None,
            failures=failures,
        )


def _as_lists(token_ids_R: Int32Array, due_R: Int64Array) -> list[list[int]]:
    """What a step with drafts answers: sequences that are not due have no token."""
    lists: list[list[int]] = [[] for _ in token_ids_R]
    for index in due_R.tolist():
        lists[index] = [int(token_ids_R[index])]
    return lists


def _seeded(params: SamplingParams) -> SamplingParams:
    """Draw the seed of a sequence that brought none: once, so that a preemption changes nothing."""
    if params.is_greedy or params.seed is not None:
        return params
    return msgspec.structs.replace(params, seed=secrets.randbits(64))
