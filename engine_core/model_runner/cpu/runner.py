"""Runs plans on a CPU: only code common to every model. A step in which no sequence is new, resumed
or given a block does no Python work a sequence."""

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from engine_core.model_runner.adapter_rows import AdapterRows
from engine_core.model_runner.cache import BlockStorage, PagedKVCache
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.cpu.draft_model import DraftModel
from engine_core.model_runner.cpu.drafter import Drafter, DraftSampling
from engine_core.model_runner.cpu.eagle import EagleDrafter
from engine_core.model_runner.cpu.input_batch import CPUInputBatch, StepInputs, gather_step_inputs
from engine_core.model_runner.cpu.row_processors import RowProcessors
from engine_core.model_runner.cpu.sampler import CPUSampler
from engine_core.model_runner.decode_steps import run_decode_steps
from engine_core.model_runner.drafts import VerifiedRows, num_drafts_of
from engine_core.model_runner.encoded_rows import EncodedRows
from engine_core.model_runner.encoder import EncoderRows
from engine_core.model_runner.given_states import GivenStates, StepStates
from engine_core.model_runner.logit_masks import logit_masks
from engine_core.model_runner.output import runner_output
from engine_core.model_runner.pooling import PoolingRows, named_answers, pool
from engine_core.model_runner.prompt_logprobs import PromptColumns, PromptRange, PromptReports
from engine_core.model_runner.rows import RunnerRows
from engine_core.model_runner.sampled_tokens import SampledTokens
from engine_core.model_runner.vocabulary_rows import vocabulary_rows
from engine_core.models.heads.eagle import EagleHead
from engine_core.models.interface import EncoderDecoder
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from kernels.interface.sampling import SamplingOperations
from protocol.outputs import Logprobs


class CPUModelRunner:
    """One step at a time: it is computed when it is collected. `storage`: of a runner with an equal
    config but for the model, which is used no more; None: a new one."""

    max_steps_in_flight = 1

    def __init__(self, config: RunnerConfig, storage: BlockStorage | None = None) -> None:
        self.config = config
        self._model = config.model
        self._ops = config.ops
        self._cache = PagedKVCache(config, storage)
        self.storage = self._cache.storage
        self.rows = RunnerRows(config)
        self.batch = CPUInputBatch(config)
        self._adapters = AdapterRows(config.adapters, num_rows=config.max_num_seqs)
        assert isinstance(config.ops, SamplingOperations), f"{config.ops.name} samples on its own"
        processors = None
        if config.logits_processors:
            processors = RowProcessors(config.logits_processors, self.batch.token_ids)
        self._vocabulary, sampling = vocabulary_rows(
            config.ops, config.collectives, config.vocab_size
        )
        self._sampler = CPUSampler(
            sampling,
            max_num_rows=config.max_num_seqs,
            vocab_size=config.vocab_size,
            processors=processors,
            vocabulary=self._vocabulary,
        )
        self._prompts = PromptReports(config.max_num_seqs)
        self._pooling = PoolingRows(config.pooler)
        self.given = GivenStates(config.max_num_seqs)
        self._encoder = EncoderRows(config.encoder, self.rows, config.max_num_seqs)
        self._encoded: EncodedRows | None = None
        if isinstance(config.model, EncoderDecoder):
            self._encoded = EncodedRows(config, config.model, self._cache)
        self._drafter = self._make_drafter(config)
        self._in_flight: SchedulerOutput | None = None
        self._placed_in = np.zeros(config.max_num_seqs, np.int64)
        """By row, the step in which it was written anew."""

    def _make_drafter(self, config: RunnerConfig) -> Drafter | None:
        if config.draft is None:
            return None
        batch, sampling = self.batch, DraftSampling(config, self.batch, self._sampler)
        if isinstance(config.draft.model, EagleHead):
            return EagleDrafter(config, self.storage, batch=batch, sampling=sampling)
        return DraftModel(
            config, self.storage, batch=batch, sampling=sampling, adapters=self._adapters
        )

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

    def take_sampled(self, sampled: SampledTokens) -> None:
        """Tokens that the last stage of the pipeline sampled in an earlier step. A row that another
        sequence has had since, or that was resumed, takes none."""
        rows, positions = sampled.rows, sampled.positions
        is_next = (positions >= self.batch.num_tokens[rows]) & (
            self._placed_in[rows] <= sampled.step_id
        )
        self.batch.append_tokens(rows[is_next], positions[is_next], sampled.token_ids[is_next])

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and choose the next token of every sequence that is up to date.
        Raises Exception: whatever the model raises; the plan's requests cannot go on."""
        self._update_rows(plan)
        self.storage.carry_out(plan.copies)
        if not plan.total_num_scheduled_tokens:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        if plan.num_decode_steps > 1:
            return run_decode_steps(plan, self._run)
        return self._run(plan)

    def _run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """One step, whose rows are in place."""
        self._ops.wake_threads()
        num_drafts = self._write_drafts(plan) if plan.scheduled_spec_decode_tokens else None
        inputs = gather_step_inputs(
            self.batch,
            rows=plan.batch.rows,
            num_computed=plan.batch.num_computed_tokens,
            num_scheduled=plan.batch.num_scheduled_tokens,
            num_drafts=num_drafts,
            decodes_first=self._ops.needs_decodes_first,
            order=self._adapters.order(plan.batch.rows),
        )
        num_tokens_R = np.diff(inputs.query_start_R1)
        slots_T = self._adapters.of_tokens(inputs.rows_R, num_tokens_R)
        self._adapters.begin_step(slots_T)
        first_R = inputs.seq_lens_R - num_tokens_R
        encoded = self._encoder.of_step(inputs.rows_R, first_R, num_tokens_R)
        given = StepStates.joined(
            (self.given.of_step(inputs.rows_R, first_R, num_tokens_R), encoded.states)
        )
        if self._drafter is not None:
            self._drafter.begin(plan, inputs)
        context = inputs.context_in(
            self._cache,
            given=None if given is None else given.on_device(self.config.dtype, self._ops.device),
            positions_AT=encoded.positions_AT,
            ends_T=encoded.ends_T,
        )
        reported = self._prompts.ranges(inputs.rows_R, first_R, num_tokens_R)
        if not reported and self._pooling.is_empty and slots_T is None:
            rows = inputs.output_rows(self._cache, num_drafts, encoded.ends_T)
            context = dataclasses.replace(context, output=rows)
        failed = encoded.failures
        if self._encoded is not None:
            attended, failed = self._encoded.of_step(
                inputs.rows_R, first_R, num_tokens_R, self._encoder.outputs
            )
            context = dataclasses.replace(context, encoded=attended)
        hidden_TE = self._model.forward(
            torch.from_numpy(inputs.token_ids_T), torch.from_numpy(inputs.positions_T), context
        )
        if self.config.stage is not None and not self.config.stage.is_last:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        reports = self._report_prompts(plan, inputs, reported, hidden_TE)
        num_tokens = self.batch.num_tokens[plan.batch.rows]
        output = self._sample(plan, inputs, hidden_TE)
        if failed:
            failures = {
                plan.batch.req_ids[inputs.batch_index_R[place]]: why
                for place, why in failed.items()
            }
            output = dataclasses.replace(output, failures=output.failures | failures)
        drafts = None
        if self._drafter is not None:
            is_sampled = self.batch.num_tokens[plan.batch.rows] > num_tokens
            drafts = self._drafter.propose(plan, inputs, is_sampled)
        pooled, failures = self._pool(plan, inputs, hidden_TE)
        if not reports and drafts is None and not pooled and not failures:
            return output
        return dataclasses.replace(
            output,
            prompt_logprobs=reports,
            draft_token_ids=drafts,
            pooled=pooled,
            failures=output.failures | failures,
        )

    def _update_rows(self, plan: SchedulerOutput) -> None:
        for row in self.rows.free(plan):
            self._sampler.free_row(row)
            self._adapters.free_row(row)
            self._pooling.free_row(row)
            self.given.free_row(row)
            self._encoder.free_row(row)
        for placed in self.rows.place(plan):
            block_ids = placed.block_ids
            if self._encoded is not None:
                block_ids = self._encoded.write_row(placed)
            self.batch.write_row(placed.row, placed.token_ids, block_ids)
            self.batch.num_tokens[placed.row] = placed.num_known
            self._placed_in[placed.row] = plan.step_id
            self._pooling.write_row(placed.row, placed.pooling, placed.token_ids)
            self._adapters.write_row(placed.row, placed.adapter)
            self.given.place(placed)
            self._sampler.write_row(
                placed.row, placed.sampling, placed.token_ids, placed.prompt_embeds
            )
            self._prompts.write_row(placed.row, placed.sampling)
            self._encoder.write_row(placed.row, placed.mm_features)
            if self._drafter is not None:
                self._drafter.place(placed)
        for update in plan.block_updates:
            self.batch.write_blocks(update.row, update.start, update.block_ids)
        self._encoder.encode(plan)

    def _report_prompts(
        self,
        plan: SchedulerOutput,
        inputs: StepInputs,
        parts: list[PromptRange],
        hidden_TE: torch.Tensor,
    ) -> dict[str, tuple[int, Logprobs]]:
        reports = {}
        for part in parts:
            columns = PromptColumns.allocate(
                part, lambda shape, dtype: torch.empty(shape, dtype=dtype)
            )
            tokens = self.batch.token_ids[part.row, part.first : part.first + part.count]
            columns.fill(
                hidden_TE,
                torch.from_numpy(tokens),
                part,
                self._model.compute_logits,
                self._vocabulary,
            )
            name = plan.batch.req_ids[inputs.batch_index_R[part.index]]
            reports[name] = part.first, columns.on_the_wire()
        return reports

    def _pool(
        self, plan: SchedulerOutput, inputs: StepInputs, hidden_TE: torch.Tensor
    ) -> tuple[dict[str, npt.NDArray[np.float32]], dict[str, str]]:
        if self._pooling.is_empty:
            return {}, {}
        counts_R = np.diff(inputs.query_start_R1)
        ranges = self._pooling.ranges(inputs.rows_R, inputs.seq_lens_R - counts_R, counts_R)
        answers = pool(
            (part, hidden_TE[part.offset : part.offset + part.count].float().numpy())
            for part in ranges
        )
        places = {int(inputs.batch_index_R[index]): each for index, each in answers.items()}
        return named_answers(plan.batch.req_ids, places)

    def _write_drafts(self, plan: SchedulerOutput) -> npt.NDArray[np.int64]:
        """Returns how many drafts each sequence has."""
        num_drafts = num_drafts_of(plan)
        for place in np.flatnonzero(num_drafts).tolist():
            drafts = plan.scheduled_spec_decode_tokens[plan.batch.req_ids[place]]
            self.batch.write_drafts(int(plan.batch.rows[place]), drafts)
        return num_drafts

    def _sample(
        self, plan: SchedulerOutput, inputs: StepInputs, hidden_TE: torch.Tensor
    ) -> ModelRunnerOutput:
        sampled_R = inputs.sampled_R
        if not sampled_R.size:
            return runner_output(plan, sampled_R, sampled_R, {}, {})
        place_S = inputs.batch_index_R[sampled_R]
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
        logits = self._model.compute_logits(hidden_TE)
        masks = None
        if plan.token_masks is not None:
            first_S = np.arange(len(place_S)) if verified is None else verified.start_S
            masks = logit_masks(plan.token_masks, place_S, first_S)
        result = self._sampler.sample(logits, rows, positions, drafts_before, masks)
        chosen, taken = result.token_ids, None
        if verified is not None:
            taken = verified.taken(chosen, result.failures)
        elif result.failures:
            taken = ~np.isin(np.arange(len(rows)), list(result.failures))
        if taken is not None:
            rows, positions, chosen = rows[taken], positions[taken], chosen[taken]
        self.batch.append_tokens(rows, positions, chosen)
        self._sampler.append_tokens(rows, chosen)
        return runner_output(
            plan, place_S, result.token_ids, result.logprobs, result.failures, verified
        )
