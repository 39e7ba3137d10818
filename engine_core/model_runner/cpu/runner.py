"""Runs plans on a CPU: only code common to every model. A step in which no sequence is new, resumed
or given a block does no Python work a sequence."""

import dataclasses

import numpy as np
import torch

from engine_core.model_runner.cache import BlockStorage, PagedKVCache
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.cpu.input_batch import (
    CPUInputBatch,
    StepInputs,
    gather_planned_inputs,
)
from engine_core.model_runner.cpu.row_features import cpu_row_parts, make_sampler, update_rows
from engine_core.model_runner.cpu.synchronous_runner import SynchronousRunner
from engine_core.model_runner.decode_steps import run_decode_steps
from engine_core.model_runner.drafts import VerifiedRows
from engine_core.model_runner.logit_masks import logit_masks
from engine_core.model_runner.output import runner_output
from engine_core.model_runner.row_parts import StepPart
from engine_core.model_runner.rows import RunnerRows
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from kernels.interface.operations import ForwardContext


class CPUModelRunner(SynchronousRunner):
    """`storage`: of a runner with an equal config but for the model, which is used no more; None: a
    new one."""

    def __init__(self, config: RunnerConfig, storage: BlockStorage | None = None) -> None:
        self.config = config
        self.model = config.model
        self._ops = config.ops
        self._samples = config.stage is None or config.stage.is_last
        self._cache = PagedKVCache(config, storage)
        self.storage = self._cache.storage
        self.rows = RunnerRows(config)
        self.batch = CPUInputBatch(config)
        self.sampler = make_sampler(config, self.batch)
        self.parts = cpu_row_parts(
            config, rows=self.rows, batch=self.batch, cache=self._cache, sampler=self.sampler
        )

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and choose the next token of every sequence that is up to date.
        Raises Exception: whatever the model raises; the plan's requests cannot go on."""
        update_rows(plan, self.rows, self.batch, self.sampler, self.parts)
        self.storage.carry_out(plan.copies)
        if not plan.total_num_scheduled_tokens:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        if plan.num_decode_steps > 1:
            return run_decode_steps(plan, self._run)
        return self._run(plan)

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """One step, whose rows are in place."""
        self._ops.wake_threads()
        inputs = gather_planned_inputs(
            plan,
            self.batch,
            decodes_first=self._ops.needs_decodes_first,
            order=self.parts.order(plan.batch.rows),
        )
        parts = self.parts.of_step(plan, inputs)
        for part in parts:
            part.begin()
        hidden_TE = self.model.forward(
            torch.from_numpy(inputs.token_ids_T),
            torch.from_numpy(inputs.positions_T),
            self._context(inputs, parts),
        )
        if not self._samples:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        for part in parts:
            part.read(hidden_TE)
        output = self._sample(plan, inputs, hidden_TE)
        for part in parts:
            part.answer(output)
        return output

    def _context(self, inputs: StepInputs, parts: tuple[StepPart, ...]) -> ForwardContext:
        ends_T = next((part.ends_T for part in parts if part.ends_T is not None), None)
        context = inputs.context_in(self._cache, ends_T)
        if not any(part.reads_all_rows for part in parts):
            context = dataclasses.replace(context, output=inputs.output_rows(self._cache, ends_T))
        for part in parts:
            context = part.in_context(context)
        return context

    def _sample(
        self, plan: SchedulerOutput, inputs: StepInputs, hidden_TE: torch.Tensor
    ) -> ModelRunnerOutput:
        sampled_R = inputs.sampled_R
        if not sampled_R.size:
            return runner_output(plan, sampled_R, sampled_R, {}, {})
        place_S = inputs.place_R[sampled_R]
        rows, verified = inputs.rows_R[sampled_R], None
        positions, drafts_before = self.batch.num_tokens[rows], {}
        if plan.scheduled_spec_decode_tokens:
            verified = VerifiedRows.of(plan, place_S)
            rows = verified.of_sequences(rows)
            positions = verified.of_sequences(positions) + verified.offset_N
            drafts_before = verified.drafts_before()
        if rows.size != len(hidden_TE):  # else each token of the step has a row of logits
            last_R = inputs.query_start_R1[1:][sampled_R].astype(np.int64) - 1
            if verified is not None:
                first_R = last_R + 1 - verified.counts_S
                last_R = verified.of_sequences(first_R) + verified.offset_N
            hidden_TE = hidden_TE[torch.from_numpy(last_R)]
        logits = self.model.compute_logits(hidden_TE)
        masks = None
        if plan.token_masks is not None:
            first_S = np.arange(len(place_S)) if verified is None else verified.start_S
            masks = logit_masks(plan.token_masks, place_S, first_S)
        result = self.sampler.sample(logits, rows, positions, drafts_before, masks)
        chosen, taken = result.token_ids, None
        if verified is not None:
            taken = verified.taken(chosen, result.failures)
        elif result.failures:
            taken = ~np.isin(np.arange(len(rows)), list(result.failures))
        if taken is not None:
            rows, positions, chosen = rows[taken], positions[taken], chosen[taken]
        self.batch.append_tokens(rows, positions, chosen)
        self.sampler.append_tokens(rows, chosen)
        return runner_output(
            plan, place_S, result.token_ids, result.logprobs, result.failures, verified
        )
