"""Runs plans on a device that works by itself: one step is computed while the next is planned.

    host     plan n | submit n | plan n + 1 | submit n + 1 | collect n | plan n + 2 | ...
    device                |  n .......................... | n + 1 .................
    (n + 1 reads on the device the tokens that n chose; the host sees them in collect n)

Owns the steps in flight. Must not know a model's architecture, sockets, or why the scheduler chose
what it chose. A step in which no sequence is new, resumed or given a block does no Python work a
sequence.
"""

from __future__ import annotations

import collections
import dataclasses

import torch

from engine_core.model_runner.cache_layout import CacheLayout
from engine_core.model_runner.gpu.buckets import decode_buckets
from engine_core.model_runner.gpu.computation import StepComputation
from engine_core.model_runner.gpu.graphs import StepGraphs
from engine_core.model_runner.gpu.packed_step_buffer import PackedStep, PackedStepBuffer
from engine_core.model_runner.gpu.queue import DeviceQueue, Launched, Work
from engine_core.model_runner.gpu.results import HostResults, ResultBuffers, read_results
from engine_core.model_runner.gpu.rows import History, HostRows
from engine_core.model_runner.gpu.step import Step, shape_step
from engine_core.model_runner.gpu.warm_up import (
    changes_of_every_kind,
    copies_of_every_kind,
    largest_step,
    made_up_step,
    steps_of_every_kind,
    steps_of_every_size,
)
from engine_core.models import Model
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from kernels.interface.device_steps import DeviceStepOperations, SamplingMode
from kernels.interface.operations import Operations
from kernels.interface.step_inputs import PackedLayout

_MAX_STEPS_IN_FLIGHT = 2


@dataclasses.dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was submitted and not collected. `step` is None if the plan had no tokens; `slot`
    says which of the host's buffers are the device's until then."""

    slot: int
    plan: SchedulerOutput
    step: Step | None
    results: HostResults
    refusals: dict[int, str]
    launched: Launched


class GPUModelRunner:
    """
    Args:
        model: weights and forward pass.
        ops: the backend that the model was loaded with.
        steps: of the same device.
        queue: of the same device.
        layout: how layers share blocks.
        num_blocks: usable blocks on the device; one more is allocated for the null block, id 0.
        block_size: tokens a block.
        max_num_seqs: rows on the device.
        max_model_len: most tokens a row.
        max_num_batched_tokens: most tokens of a step.
        dtype: of the activations.
        kv_dtype: of the cache; None: as the activations.
        eos_token_ids: what min_tokens holds back beside a request's own stop tokens.
        num_host_blocks: blocks in host memory that a plan may copy from and to.
        use_graphs: record decode steps and replay them.
    """

    max_steps_in_flight = _MAX_STEPS_IN_FLIGHT

    def __init__(
        self,
        *,
        model: Model,
        ops: Operations,
        steps: DeviceStepOperations,
        queue: DeviceQueue,
        layout: CacheLayout,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        eos_token_ids: tuple[int, ...],
        num_host_blocks: int = 0,
        use_graphs: bool = True,
    ) -> None:
        self._queue = queue
        self._steps = steps
        self._vocab_size = vocab_size = model.kv_cache_spec.vocab_size
        self._limits = {
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max_num_batched_tokens,
        }
        self._buckets = decode_buckets(max_num_seqs) if use_graphs else ()
        self._warm_up_copies = copies_of_every_kind(
            num_blocks=num_blocks, num_host_blocks=num_host_blocks
        )
        self.batch = HostRows(
            max_num_rows=max_num_seqs,
            vocab_size=vocab_size,
            num_groups=len(layout.groups),
            eos_token_ids=eos_token_ids,
        )
        self._words = PackedStepBuffer(
            queue, PackedLayout(max_num_seqs), num_slots=_MAX_STEPS_IN_FLIGHT
        )
        self._results = ResultBuffers(
            queue,
            capacity=max_num_seqs,
            vocab_size=vocab_size,
            num_slots=_MAX_STEPS_IN_FLIGHT,
        )
        self._computation = StepComputation(
            model=model,
            ops=ops,
            steps=steps,
            layout=layout,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            packed=self._words.device_words,
            packed_layout=self._words.layout,
            block_size=block_size,
            **self._limits,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
        )
        self.storage = self._computation.storage
        self.graphs = StepGraphs(
            queue, compute=self._compute_bucket, send_empty=self._words.send_empty
        )
        self._in_flight: collections.deque[_InFlight] = collections.deque()
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
        changes = self.batch.take_in(plan)
        step = None
        if plan.total_num_scheduled_tokens:
            step = shape_step(
                plan.batch, self.batch, buckets=self._buckets, vocab_size=self._vocab_size
            )
            self._check_size(step)
            self.batch.append(step.due_rows_N)
        slot, refusals = self._free_slots[0], dict(self.batch.refusals)
        packed = self._words.pack(slot, step, changes)
        results = self._results.take(slot, step)

        @torch.inference_mode()
        def work() -> None:
            graph = self._graph_for(step)
            self.storage.carry_out(plan.copies)
            self._send(packed, changes.histories)
            if step is None:
                self._computation.update_rows()
                return
            if graph is None:
                self._compute(step, results)
            else:
                graph()
            if len(step.due_N):
                results.fetch(self._computation.sampler.results, step)

        try:
            launched = self._queue.launch(work)
        except Exception:
            self._queue.synchronize()  # what was launched of it may still read the buffers
            raise
        self._free_slots.popleft()
        self._in_flight.append(_InFlight(slot, plan, step, results, refusals, launched))

    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest step in flight: the next token of every sequence that was due.

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
            capture_at_start: record every graph now, not when it is first used.
        """
        for counts in steps_of_every_kind(**self._limits):
            for mode in SamplingMode:
                self._run(made_up_step(counts, mode))
        for counts in steps_of_every_size(**self._limits):
            self._run(made_up_step(counts, SamplingMode.PLAIN))
        self._run(made_up_step(largest_step(**self._limits), SamplingMode.FULL))

        @torch.inference_mode()
        def capture() -> None:
            for bucket in reversed(self._buckets):  # the others fit into the largest one's memory
                for mode in SamplingMode:
                    self.graphs.get(bucket, mode)

        if capture_at_start:
            self._queue.launch(capture).wait()

    def _run(self, step: Step) -> None:
        slot, changes = self._free_slots[0], changes_of_every_kind()
        packed = self._words.pack(slot, step, changes)
        results = self._results.take(slot, step)

        @torch.inference_mode()
        def work() -> None:
            self.storage.carry_out(self._warm_up_copies)
            self._send(packed, changes.histories)
            self._compute(step, results)
            results.fetch(self._computation.sampler.results, step)

        self._queue.launch(work).wait()

    # ------------------------------------------------------------------ on the device

    def _send(self, packed: PackedStep, histories: list[History]) -> None:
        computation = self._computation
        self._words.send(
            packed, self._steps, rows=computation.rows, sampling=computation.sampling_tables
        )
        if histories:  # read from the rows, so that those come first; once more does no harm
            computation.update_rows()
            for history in histories:
                computation.write_history(history)

    def _graph_for(self, step: Step | None) -> Work | None:
        if step is None or step.bucket is None:
            return None
        return self.graphs.get(step.bucket, step.mode)

    def _compute_bucket(self, bucket: int, mode: SamplingMode) -> None:
        self._computation.run(
            num_tokens=bucket,
            num_sequences=bucket,
            num_decodes=bucket,
            num_due=bucket,
            mode=mode,
        )

    def _compute(self, step: Step, results: HostResults) -> None:
        self._computation.run(
            num_tokens=step.num_tokens,
            num_sequences=len(step.rows_R),
            num_decodes=step.num_decodes,
            num_due=len(step.due_N),
            mode=step.mode,
            before_sampling=lambda logits_NV: results.fetch_logits(logits_NV, step),
        )

    def _check_size(self, step: Step) -> None:
        limit = self._limits["max_num_batched_tokens"]
        if step.num_tokens > limit:
            raise ValueError(
                f"a step of {step.num_tokens} tokens, the runner was made for {limit}; plan fewer "
                "or raise --max-num-batched-tokens"
            )
