"""The device's runner with a small model or a head that makes drafts: rows are kept on the host,
too, as the drafts' passes are planned there, and one step is in flight at a time."""

import collections
import dataclasses

import numpy as np
import torch

from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.cpu.drafter import DraftSampling
from engine_core.model_runner.cpu.input_batch import (
    CPUInputBatch,
    StepInputs,
    gather_step_inputs,
)
from engine_core.model_runner.cpu.row_features import make_drafter, update_rows
from engine_core.model_runner.cpu.sampler import CPUSampler
from engine_core.model_runner.gpu.queue import DeviceQueue
from engine_core.model_runner.gpu.runner import GPUModelRunner
from engine_core.model_runner.gpu.step import GPUStep
from engine_core.model_runner.gpu.warm_up import steps_of_every_kind, steps_of_every_size
from engine_core.model_runner.row_parts import RowParts, StepPart
from engine_core.model_runner.rows import RunnerRows
from engine_core.scheduler import ModelRunnerOutput, SchedulerOutput
from kernels.interface.device_steps import DeviceStepOperations
from kernels.torch.operations import TorchOperations


class DraftingGPURunner(GPUModelRunner):
    """Drafts are computed on the device, kernel by kernel, behind each step, and sampled on the
    host from their logits. Arguments: see `GPUModelRunner`; the config has a draft model."""

    max_steps_in_flight = 1

    def __init__(
        self,
        config: RunnerConfig,
        *,
        steps: DeviceStepOperations,
        queue: DeviceQueue,
        use_graphs: bool = True,
    ) -> None:
        super().__init__(config, steps=steps, queue=queue, use_graphs=use_graphs)
        self._host_rows = RunnerRows(config)
        self.host_batch = CPUInputBatch(config)
        self._host_sampler = CPUSampler(
            TorchOperations(),
            max_num_rows=config.max_num_seqs,
            vocab_size=config.vocab_size,
            token_ids=self.host_batch.token_ids,
        )
        sampling = DraftSampling(config, self.host_batch, self._host_sampler)
        buckets = (*self._buckets.decodes, *self._buckets.mixed)
        self._drafter = make_drafter(
            config,
            self.storage,
            sampling,
            self.parts,
            num_captured_tokens=max((bucket.num_tokens for bucket in buckets), default=0),
        )
        self._drafters = RowParts([self._drafter])
        self._planned = collections.deque[
            tuple[SchedulerOutput, StepInputs | None, tuple[StepPart, ...]]
        ]()

    def submit(self, plan: SchedulerOutput) -> None:
        """See `GPUModelRunner.submit`."""
        update_rows(plan, self._host_rows, self.host_batch, self._host_sampler, self._drafters)
        super().submit(plan)
        inputs: StepInputs | None = None
        parts: tuple[StepPart, ...] = ()
        step = self._in_flight[-1].step
        if step is not None:  # in whose order hidden states are
            inputs = gather_step_inputs(
                self.host_batch,
                rows=step.rows_R,
                num_computed=step.num_computed_R.astype(np.int32),
                num_scheduled=step.num_scheduled_R.astype(np.int32),
            )
            inputs = dataclasses.replace(inputs, place_R=step.place_R)
            parts = self._drafters.of_step(plan, inputs)
        for part in parts:
            part.begin()
        self._planned.append((plan, inputs, parts))

    def collect(self) -> ModelRunnerOutput:
        """See `GPUModelRunner.collect`; with drafts behind the step's tokens."""
        plan, inputs, parts = self._planned.popleft()
        output = super().collect()
        if inputs is not None:
            self._append(plan, inputs, output)

        @torch.inference_mode()
        def propose() -> None:
            for part in parts:
                part.answer(output)

        if parts:
            self._queue.launch(propose)()
        return output

    def _append(self, plan: SchedulerOutput, inputs: StepInputs, output: ModelRunnerOutput) -> None:
        """The step's tokens to the host's rows."""
        sampled = np.asarray(output.sampled_token_ids)
        for place in inputs.place_R[inputs.sampled_R].tolist():
            name, row = plan.batch.req_ids[place], int(plan.batch.rows[place])
            if name in output.failures:
                continue
            chosen = output.verified_token_ids.get(name, [sampled[place]])
            room = self.config.max_model_len - self.host_batch.num_tokens[row]
            token_ids = np.array(chosen, np.int64)[:room]  # the largest dummy steps go beyond
            rows = np.full(len(token_ids), row, np.int64)
            positions = self.host_batch.num_tokens[row] + np.arange(len(token_ids))
            self.host_batch.append_tokens(rows, positions, token_ids)
            self._host_sampler.append_tokens(rows, token_ids)

    def _forward(self, step: GPUStep) -> torch.Tensor | None:
        logits_NV = super()._forward(step)
        self._drafter.keep_states()
        return logits_NV

    def warm_up(self, *, capture_at_start: bool = False) -> None:
        """See `GPUModelRunner.warm_up`."""
        super().warm_up(capture_at_start=capture_at_start)

        @torch.inference_mode()
        def compute() -> None:
            for counts in steps_of_every_kind(self.config) + steps_of_every_size(self.config):
                self._drafter.compute_nothing(counts)

        self._queue.launch(compute)()
