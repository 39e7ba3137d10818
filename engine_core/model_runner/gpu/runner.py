"""Runs plans on an asynchronous device: one step is computed while the next is planned.

host     plan n | submit n | plan n + 1 | submit n + 1 | collect n | plan n + 2 | ...
device                |  n .......................... | n + 1 .................
(n + 1 reads on the device the tokens that n chose; the host sees them in collect n)
"""

from __future__ import annotations

import collections
import dataclasses

import torch

from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.gpu.computation import StepComputation
from engine_core.model_runner.gpu.graphs import StepGraphs, decode_buckets
from engine_core.model_runner.gpu.input_batch import GPUInputBatch, PenaltyRow
from engine_core.model_runner.gpu.packing import PackedStep, PackedStepBuffer
from engine_core.model_runner.gpu.queue import DeviceQueue, LaunchedWork, Work
from engine_core.model_runner.gpu.results import HostResults, ResultBuffers, read_results
from engine_core.model_runner.gpu.step import GPUStep, arrange_step
from engine_core.model_runner.gpu.warm_up import (
    changes_of_every_kind,
    copies_of_every_kind,
    dummy_step,
    largest_step,
    steps_of_every_kind,
    steps_of_every_size,
)
from engine_core.model_runner.rows import RunnerRows
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from kernels.interface.device_steps import DeviceStepOperations, SamplingMode
from kernels.interface.step_inputs import PackedLayout

_MAX_STEPS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True, slots=True)
class _InFlightStep:
    """A step that was submitted and not collected. `step` is None if the plan had no tokens; `slot`
    says which of the host's buffers are the device's until then."""

    slot: int
    plan: SchedulerOutput
    step: GPUStep | None
    results: HostResults
    refusals: dict[int, str]
    launched: LaunchedWork


class GPUModelRunner:
    """A step in which no sequence is new, resumed or given a block does no Python work a sequence.

    Args:
        steps, queue: of the device of the config's `ops`.
        use_graphs: capture decode steps and replay them.
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
        self._queue = queue
        self._steps = steps
        self._buckets = decode_buckets(config.max_num_seqs) if use_graphs else ()
        self.rows = RunnerRows(
            max_num_rows=config.max_num_seqs,
            eos_token_ids=config.eos_token_ids,
            vocab_size=config.vocab_size,
        )
        self.batch = GPUInputBatch(
            self.rows, max_num_rows=config.max_num_seqs, vocab_size=config.vocab_size
        )
        self._buffer = PackedStepBuffer(
            queue, PackedLayout(config.max_num_seqs), num_slots=_MAX_STEPS_IN_FLIGHT
        )
        self._results = ResultBuffers(
            queue,
            capacity=config.max_num_seqs,
            vocab_size=config.vocab_size,
            num_slots=_MAX_STEPS_IN_FLIGHT,
        )
        self._computation = StepComputation(
            config,
            steps=steps,
            packed=self._buffer.device_words,
            packed_layout=self._buffer.layout,
        )
        self.storage = self._computation.storage
        self.graphs = StepGraphs(
            queue, compute=self._compute_bucket, send_empty=self._buffer.send_empty
        )
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
                plan.batch, self.batch, buckets=self._buckets, vocab_size=self.config.vocab_size
            )
            self._check_size(step)
            self.batch.append_tokens(step.sampled_rows_N)
        slot, refusals = self._free_slots[0], dict(self.batch.refusals)
        packed = self._buffer.pack(slot, step, changes)
        results = self._results.take(slot, step)

        @torch.inference_mode()
        def work() -> None:
            graph = self._graph_for(step)
            self.storage.carry_out(plan.copies)
            self._send(packed, changes.penalties)
            if step is None:
                self._computation.update_rows()
                return
            if graph is None:
                self._compute(step, results)
            else:
                graph()
            if len(step.sampled_N):
                results.fetch(self._computation.sampler.results, step)

        try:
            launched = self._queue.launch(work)
        except Exception:
            self._queue.synchronize()  # what was launched of it may still read the buffers
            raise
        self._free_slots.popleft()
        self._in_flight.append(_InFlightStep(slot, plan, step, results, refusals, launched))

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
            oldest.launched.wait()
            if oldest.step is None:
                return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
            return read_results(oldest.plan, oldest.step, oldest.results, oldest.refusals)
        finally:
            self._free_slots.append(oldest.slot)

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """`submit`, then `collect`; nothing else may be in flight."""
        assert not self._in_flight, "collect the step in flight first"
        self.submit(plan)
        return self.collect()

    # ------------------------------------------------------------------ before the first request

    def warm_up(self, *, capture_at_start: bool = False) -> None:
        """Launch everything once that a plan may ask for, so that nothing is compiled later.

        Called before the first plan.

        Args:
            capture_at_start: capture every graph now, not when it is first used.
        """
        limits = {
            "max_num_seqs": self.config.max_num_seqs,
            "max_model_len": self.config.max_model_len,
            "max_num_batched_tokens": self.config.max_num_batched_tokens,
        }
        for counts in steps_of_every_kind(**limits):
            for mode in SamplingMode:
                self._run_dummy(dummy_step(counts, mode))
        for counts in steps_of_every_size(**limits):
            self._run_dummy(dummy_step(counts, SamplingMode.PLAIN))
        self._run_dummy(dummy_step(largest_step(**limits), SamplingMode.FULL))

        @torch.inference_mode()
        def capture() -> None:
            for bucket in reversed(self._buckets):  # the others fit into the largest one's memory
                for mode in SamplingMode:
                    self.graphs.get(bucket, mode)

        if capture_at_start:
            self._queue.launch(capture).wait()

    def _run_dummy(self, step: GPUStep) -> None:
        slot, changes = self._free_slots[0], changes_of_every_kind()
        copies = copies_of_every_kind(
            num_blocks=self.config.num_blocks, num_host_blocks=self.config.num_host_blocks
        )
        packed = self._buffer.pack(slot, step, changes)
        results = self._results.take(slot, step)

        @torch.inference_mode()
        def work() -> None:
            self.storage.carry_out(copies)
            self._send(packed, changes.penalties)
            self._compute(step, results)
            results.fetch(self._computation.sampler.results, step)

        self._queue.launch(work).wait()

    # ------------------------------------------------------------------ on the device

    def _send(self, packed: PackedStep, penalties: list[PenaltyRow]) -> None:
        computation = self._computation
        self._buffer.send(
            packed, self._steps, rows=computation.rows, sampling=computation.sampling_tables
        )
        if penalties:  # read from the rows, so that those come first; once more does no harm
            computation.update_rows()
            for penalty in penalties:
                computation.count_for_penalties(penalty)

    def _graph_for(self, step: GPUStep | None) -> Work | None:
        if step is None or step.bucket is None:
            return None
        return self.graphs.get(step.bucket, step.mode)

    def _compute_bucket(self, bucket: int, mode: SamplingMode) -> None:
        self._computation.run(
            num_tokens=bucket,
            num_sequences=bucket,
            num_decodes=bucket,
            num_sampled=bucket,
            mode=mode,
        )

    def _compute(self, step: GPUStep, results: HostResults) -> None:
        self._computation.run(
            num_tokens=step.num_tokens,
            num_sequences=len(step.rows_R),
            num_decodes=step.num_decodes,
            num_sampled=len(step.sampled_N),
            mode=step.mode,
            before_sampling=lambda logits_NV: results.fetch_logits(logits_NV, step),
        )

    def _check_size(self, step: GPUStep) -> None:
        limit = self.config.max_num_batched_tokens
        if step.num_tokens > limit:
            raise ValueError(
                f"a step of {step.num_tokens} tokens, the runner was made for {limit}; plan fewer "
                "or raise --max-num-batched-tokens"
            )
