"""Runs plans on an asynchronous device: one step is computed while the next is planned.

host     plan n | submit n | plan n + 1 | submit n + 1 | collect n | plan n + 2 | ...
device                |  n .......................... | n + 1 .................
(n + 1 reads on the device the tokens that n chose; the host sees them in collect n)"""

import collections
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch

from engine_core.kv_cache import CacheCopies
from engine_core.model_runner.cache import PagedKVCache
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.drafts import num_drafts_of
from engine_core.model_runner.encoder import EncoderRows
from engine_core.model_runner.gpu.grammar_masks import GrammarMasks
from engine_core.model_runner.gpu.graphs import GraphKey, StepGraphs
from engine_core.model_runner.gpu.input_batch import GPUInputBatch, PenaltyRow, RowChanges
from engine_core.model_runner.gpu.packing import PackedStepBuffer
from engine_core.model_runner.gpu.queue import DeviceQueue, Work
from engine_core.model_runner.gpu.results import HostResults, read_results
from engine_core.model_runner.gpu.step import GPUStep, arrange_step
from engine_core.model_runner.gpu.step_buckets import StepBuckets
from engine_core.model_runner.gpu.step_forward import StepForward
from engine_core.model_runner.gpu.warm_up import (
    changes_of_every_kind,
    copies_of_every_kind,
    dummy_step,
    largest_step,
    padded_step,
    steps_of_every_kind,
    steps_of_every_size,
)
from engine_core.model_runner.row_features import row_features
from engine_core.model_runner.row_parts import Int64Array, RowParts
from engine_core.model_runner.rows import RunnerRows
from engine_core.model_runner.vocabulary_rows import WholeVocabulary, token_logits
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.plan import TokenMasks
from kernels.interface.device_steps import DeviceStepOperations, LogitMasks, SamplingMode
from kernels.interface.sampling_rows import StepResults
from kernels.interface.step_inputs import DeviceRows, PackedLayout
from kernels.torch.sampling import token_logprobs

_MAX_STEPS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A step that was submitted and not collected. `step` is None if the plan had no tokens; `slot`
    says which of the host's buffers are the device's until `wait` has returned."""

    slot: int
    plan: SchedulerOutput
    step: GPUStep | None
    results: HostResults
    refusals: dict[int, str]
    drafted: tuple[Int64Array, Int64Array] | None
    """Places in the plan of sequences with drafts, and generations of their rows."""
    wait: Work


class GPUModelRunner:
    """A step in which no sequence is new, resumed or given a block does no Python work a sequence.

    Args:
        steps, queue: of the device of the config's `ops`.
        use_graphs: capture decode steps, and mixed steps of few tokens, and replay them.
    """

    max_steps_in_flight = _MAX_STEPS_IN_FLIGHT

    def __init__(
        self,
        config: RunnerConfig,
        *,
        steps: DeviceStepOperations,
        queue: DeviceQueue,
        use_graphs: bool = True,
    ) -> None:
        self.config = config
        self.model = config.model
        self._queue = queue
        self._steps = steps
        most_tokens = config.max_num_batched_tokens
        most = min(config.max_num_logits, most_tokens)
        self._buckets = StepBuckets.up_to(most, most_tokens) if use_graphs else StepBuckets()
        self._buffer = PackedStepBuffer(
            queue, PackedLayout(config.max_num_logits), num_slots=_MAX_STEPS_IN_FLIGHT
        )
        result_shape = (StepResults.num_words(config.max_num_logits, config.vocab_size),)
        self._results = [
            StepResults.over(
                queue.host_tensor(result_shape, torch.int32),
                capacity=config.max_num_logits,
                vocab_size=config.vocab_size,
            )
            for _ in range(_MAX_STEPS_IN_FLIGHT)
        ]
        self._cache = PagedKVCache(config)
        self.storage = self._cache.storage
        self._device_rows = DeviceRows.allocate(
            num_rows=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=config.block_size,
            num_groups=config.num_groups,
            device=queue.device,
        )
        self._step_forward = StepForward(
            config, self._cache, steps=steps, words=self._buffer, rows=self._device_rows
        )
        self.rows = RunnerRows(config)
        report = token_logits if config.reports_logits else token_logprobs
        self._vocabulary = WholeVocabulary(config.vocab_size, report)
        parts = row_features(
            config,
            token_ids=self._device_rows.token_ids,
            vocabulary=self._vocabulary,
            host_tensor=queue.host_tensor,
        )
        if config.encoder is not None:
            parts.append(EncoderRows(config, config.encoder, self.rows, in_order=queue.in_order))
        self.parts = RowParts(parts)
        self.batch = GPUInputBatch(self.rows, self.parts, config)
        self._sampler = steps.make_sampler(
            num_rows=config.max_num_seqs,
            num_logits=config.max_num_logits,
            vocab_size=config.vocab_size,
            device=queue.device,
            reports_processed=config.reports_processed,
            reports_logits=config.reports_logits,
        )
        self._sampling_tables = DeviceRows(
            token_ids=self._sampler.rows.state_NX, block_tables=self._sampler.rows.lists_3NM
        )
        """The sampling state as rows that updates are written to."""
        has_parts = any(part.fits_graphs for part in self.parts.of_dummy(1))
        self.graphs = StepGraphs(self._buckets, has_parts=has_parts, capture=self._capture)
        self._graph_logits_NV: torch.Tensor | None = None
        """Logits of the graph without sampling that was replayed last: room for the largest."""
        self._grammar_masks: GrammarMasks | None = None
        self._in_flight: collections.deque[_InFlightStep] = collections.deque()
        self._free_slots = collections.deque(range(_MAX_STEPS_IN_FLIGHT))
        queue.synchronize()  # what was allocated was also filled, perhaps on another stream

    # ------------------------------------------------------------------ steps

    def submit(self, plan: SchedulerOutput) -> None:
        """Launch a step. Its tokens may depend on those of the step before, collected or not.

        Raises:
            RuntimeError: too many steps are in flight.
            ValueError: more tokens than a step can have.
            Exception: whatever the model raises; the plan's requests cannot go on.
        """
        if len(self._in_flight) == _MAX_STEPS_IN_FLIGHT:
            raise RuntimeError(
                f"{_MAX_STEPS_IN_FLIGHT} steps are in flight, which is the limit; collect one first"
            )
        changes = self.batch.update(plan)
        step = None
        if plan.total_num_scheduled_tokens:
            step = arrange_step(
                plan,
                self.batch,
                buckets=self._buckets,
                vocab_size=self.config.vocab_size,
                num_query_heads=self.model.spec.num_query_heads,
            )
            self._check_size(step)
            self.batch.append_tokens(step.sampled_rows_N)
        slot, refusals = self._free_slots[0], dict(self.batch.refusals)
        try:
            results, wait = self._launch(slot, step, changes, plan.copies, plan.token_masks)
        except Exception:
            self._queue.synchronize()  # what was launched of it may still read the buffers
            raise
        self._free_slots.popleft()
        drafted = None
        if plan.scheduled_spec_decode_tokens:
            places = np.flatnonzero(num_drafts_of(plan))
            drafted = (places, self.batch.generation[plan.batch.rows[places]])
        self._in_flight.append(_InFlightStep(slot, plan, step, results, refusals, drafted, wait))

    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest step in flight: the next token of every sequence that was sampled.

        Raises:
            RuntimeError: none is in flight.
            Exception: whatever the device found wrong; the plan's requests cannot go on.
        """
        if not self._in_flight:
            raise RuntimeError("no step is in flight; submit one first")
        oldest = self._in_flight.popleft()
        try:
            oldest.wait()
            if oldest.step is None:
                return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
            output = read_results(oldest.plan, oldest.step, oldest.results, oldest.refusals)
            if oldest.drafted is not None:
                places, generations = oldest.drafted
                names, verified = oldest.plan.batch.req_ids, output.verified_token_ids
                num_more = [len(verified.get(names[at], ())) - 1 for at in places]
                rows = oldest.plan.batch.rows[places]
                self.batch.append_drafts(rows, generations, np.array(num_more, np.int64))
            return output
        finally:
            self._free_slots.append(oldest.slot)

    def check_device(self) -> None:
        """Raises Exception: the device's context is lost, as after an illegal access: CUDA then
        reports the same error to every call, until the process ends."""
        self._queue.synchronize()

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """`submit`, then `collect`; nothing else may be in flight."""
        assert not self._in_flight, "collect the step in flight first"
        self.submit(plan)
        return self.collect()

    # ------------------------------------------------------------------ before the first request

    def warm_up(self, *, capture_at_start: bool = False) -> None:
        """Launch everything once that a plan may ask for, so that nothing is compiled later, and
        capture the graphs of plain and truncated sampling. Called before the first plan.
        `capture_at_start`: all graphs now, none while the engine is idle."""
        for counts in steps_of_every_kind(self.config):
            for mode in SamplingMode:
                self._run_dummy(self._dummy(counts, mode))
            if counts[-1] > 1:
                step = self._dummy(counts, SamplingMode.PLAIN)
                self._run_dummy(dataclasses.replace(step, reads_last_rows=True))
        for counts in steps_of_every_size(self.config):
            self._run_dummy(self._dummy(counts, SamplingMode.PLAIN))
        self._run_dummy(self._dummy(largest_step(self.config), SamplingMode.FULL))
        self.capture_graphs(self.graphs.all if capture_at_start else self.graphs.at_start)

    @torch.inference_mode()
    def capture_graphs(self, keys: Sequence[GraphKey]) -> None:
        """Those of them that are missing; nothing may be in flight."""
        self._queue.launch(lambda: self.graphs.capture(keys))()

    def capture_next_graph(self) -> bool:
        """Capture one that is missing. Returns whether there was one, and nothing in flight."""
        key = self.graphs.next_missing()
        if key is None or self._in_flight:
            return False
        try:
            self.capture_graphs([key])
        except Exception as error:
            self.graphs.give_up(key, error)
        return True

    def _dummy(self, counts: list[int], mode: SamplingMode) -> GPUStep:
        return dummy_step(counts, mode, num_rows=self.config.max_num_seqs)

    def _run_dummy(self, step: GPUStep) -> None:
        copies = copies_of_every_kind(self.config)
        parts = self.parts.of_dummy(0 if step.reads_last_rows else step.num_tokens)
        step = dataclasses.replace(step, parts=parts)
        _, wait = self._launch(self._free_slots[0], step, changes_of_every_kind(), copies)
        wait()

    # ------------------------------------------------------------------ on the device

    def _launch(
        self,
        slot: int,
        step: GPUStep | None,
        changes: RowChanges,
        copies: CacheCopies,
        masks: TokenMasks | None = None,
    ) -> tuple[HostResults, Work]:
        """Returns where the results will be, and what waits for them."""
        packed = self._buffer.pack(slot, step, changes)
        logits_WV = None
        if step is not None and step.from_host_N.size:
            shape = (len(step.from_host_N), self.config.vocab_size)
            logits_WV = self._queue.host_tensor(shape, torch.float32)
        results = HostResults(self._results[slot], logits_WV, self._vocabulary)

        @torch.inference_mode()
        def work() -> None:
            graph = None
            if step is not None and step.bucket is not None:
                mode = step.mode if masks is None and not step.chains else None
                has_parts = any(part.reads_all_rows for part in step.parts)
                graph = self.graphs.replay_of(GraphKey(step.bucket, mode, has_parts))
            self.storage.carry_out(copies)
            self._buffer.send(
                packed, self._steps, rows=self._device_rows, sampling=self._sampling_tables
            )
            if changes.rows:
                self._steps.apply_row_updates(self._buffer.device_words, self._device_rows)
            for penalty in changes.penalties:
                self._count_for_penalties(penalty)
            if step is None:
                return
            for part in step.parts:
                part.begin()
            if masks is not None or step.chains:
                logits_NV = None
                if graph is not None:
                    graph()
                    logits_NV = self._graph_logits_NV
                self._choose_apart(slot, step, results, logits_NV, masks)
            elif graph is None:
                self._compute(step, results)
            else:
                graph()
            if len(step.sampled_N):
                results.fetch(self._sampler.results, step)

        return results, self._queue.launch(work)

    def _choose_apart(
        self,
        slot: int,
        step: GPUStep,
        results: HostResults,
        logits_NV: torch.Tensor | None,
        masks: TokenMasks | None,
    ) -> None:
        """The device computes logits while masks are made; then they are sent, and it samples.
        `logits_NV`: of a graph that was replayed."""
        if logits_NV is None:
            logits_NV = self._forward(step)
            assert logits_NV is not None, "masks and chains are of sampled sequences"
        masks_sent = None if masks is None else self._sent(slot, step, masks)
        self._choose(step, logits_NV[: len(step.sampled_N)], results, masks_sent)

    def _sent(self, slot: int, step: GPUStep, masks: TokenMasks) -> LogitMasks:
        if self._grammar_masks is None:
            self._grammar_masks = GrammarMasks(
                self._queue,
                num_logits=self.config.max_num_logits,
                vocab_size=self.config.vocab_size,
                num_slots=_MAX_STEPS_IN_FLIGHT,
            )
        return self._grammar_masks.send(slot, step, masks)

    def _capture(self, key: GraphKey) -> Work:
        """What replays a decode step; called inside launched work, before the step's own words are
        sent."""
        mode, num_rows = key.mode or SamplingMode.PLAIN, self.config.max_num_seqs
        padded = padded_step(key.bucket, mode, num_rows=num_rows)
        for part in self.parts.of_dummy(key.bucket.num_tokens if key.has_parts else 0):
            part.begin()

        def compute() -> None:
            if key.mode is not None:
                self._compute(padded)
            elif (logits_NV := self._forward(padded)) is not None:
                if self._graph_logits_NV is None:  # outside of the graphs' memory, as it stays
                    shape = (self.config.max_num_logits, logits_NV.shape[1])
                    self._graph_logits_NV = logits_NV.new_empty(shape)
                self._graph_logits_NV[: len(logits_NV)].copy_(logits_NV)

        self._buffer.send_empty()
        compute()  # once, so that nothing is compiled or set up during capture
        return self._queue.capture(compute)

    def _count_for_penalties(self, penalty: PenaltyRow) -> None:
        """Count the tokens that a row has now."""
        tokens = self._device_rows.token_ids[penalty.row]
        self._sampler.rows.write_history(
            penalty.row,
            torch.cat([tokens[part] for part in penalty.prompt_ranges]),
            tokens[penalty.num_prompt_tokens : penalty.num_tokens],
        )

    def _compute(self, step: GPUStep, results: HostResults | None = None) -> None:
        """All between the copy to the device and the copy back: the same calls for a step that is
        launched piece by piece and, without `results`, for one that is captured in a graph. Chosen
        tokens are appended to their rows. Of `step` only counts and mode are read."""
        logits_NV = self._forward(step)
        if logits_NV is not None:
            self._choose(step, logits_NV, results)

    def _forward(self, step: GPUStep) -> torch.Tensor | None:
        """The logits of what is sampled; None if nothing is."""
        return self._step_forward(self.model, step)

    def _choose(
        self,
        step: GPUStep,
        logits_NV: torch.Tensor,
        results: HostResults | None,
        masks: LogitMasks | None = None,
    ) -> None:
        packed, layout = self._buffer.device_words, self._buffer.layout
        num_sequences, num_sampled = len(step.rows_R), len(step.sampled_N)
        tokens = self._device_rows.token_ids
        told_NV = self._sampler.sample(
            logits_NV,
            packed,
            layout,
            num_sequences=num_sequences,
            mode=step.mode,
            masks=masks,
            chains={
                index: functools.partial(chain.apply, token_ids_L=tokens[row], position=position)
                for index, (row, position, chain) in step.chains.items()
            },
        )
        if results is not None:
            results.fetch_logits(told_NV, step)
        self._steps.append_sampled(
            packed,
            layout,
            self._sampler.results.token_ids_C[:num_sampled],
            self._device_rows,
            num_sequences=num_sequences,
        )

    def _check_size(self, step: GPUStep) -> None:
        limit = self.config.max_num_batched_tokens
        if step.num_tokens > limit:
            raise ValueError(
                f"a step of {step.num_tokens} tokens, the runner was made for {limit}; plan fewer "
                "or raise --max-num-batched-tokens"
            )
