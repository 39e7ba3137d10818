"""How the model runner of a device is made, and what its largest step takes there."""

import dataclasses
import logging

from engine_core.errors import StartupError
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.model_runner.gpu import CudaQueue, GPUModelRunner
from engine_core.model_runner.gpu.step import decode_buckets
from engine_core.scheduler import SchedulerConfig, SchedulerOutput
from engine_core.startup.memory import MemoryMeter, measure_extra_bytes
from engine_core.startup.model import LoadedModel
from engine_core.startup.profile_run import profile_steps
from kernels.backends import device_step_operations
from kernels.interface.device_steps import SamplingMode

logger = logging.getLogger(__name__)

Runner = CPUModelRunner | GPUModelRunner

_MOST_LOGPROBS_ON_DEVICE = 128
"""A row that asks for more is reported by the host, from a copy of its logits."""
_BYTES_A_GRAPH = 12 * 1024**2
"""Allowed for each CUDA graph: one of the largest is measured, the others share its memory for
tensors, and the driver keeps some MiB of each."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSpec:
    """What every runner of this engine is made of; only the number of blocks is still open.

    Attributes:
        config: with one block and the full max_model_len, as the largest step is measured.
        block_bytes: of one block over all cache tensors.
        scheduler: `max_model_len` is still the model's or the operator's.
        max_num_logprobs: the most that a request may ask for; -1: the whole vocabulary.
        on_device: rows and sampling are the device's, and a step is in flight while the next is
            planned; else one step at a time, with rows on the host.
        capture_at_start: capture every CUDA graph in `warm_up`.
        enforce_eager: capture none at all; without effect where nothing is captured anyway.
    """

    loaded: LoadedModel
    config: RunnerConfig
    block_bytes: int
    scheduler: SchedulerConfig
    max_num_logprobs: int
    on_device: bool
    capture_at_start: bool
    enforce_eager: bool

    def build(self, *, num_blocks: int, num_host_blocks: int, max_model_len: int) -> Runner:
        """A runner with its cache; `max_model_len` may be less than was measured for.

        Raises:
            StartupError: the device's kernels cannot serve the model's shape or the cache's dtype.
        """
        config = dataclasses.replace(
            self.config,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_model_len=max_model_len,
        )
        device = config.ops.device
        try:
            if not self.on_device:
                return CPUModelRunner(config)
            return GPUModelRunner(
                config,
                steps=device_step_operations(device),
                queue=CudaQueue(device),
                use_graphs=not self.enforce_eager,
            )
        except ValueError as error:
            if not self.on_device:
                raise StartupError(str(error)) from error
            raise StartupError(
                f"{self.loaded.architecture} of this shape cannot be served on a GPU: {error}; run "
                "with --device cpu"
            ) from error

    def warm_up(self, runner: Runner) -> None:
        """Launch everything that a plan may ask for, so that nothing is compiled while serving."""
        if isinstance(runner, GPUModelRunner):
            if self.enforce_eager:
                logger.info("no CUDA graphs: every step is launched kernel by kernel")
            runner.warm_up(capture_at_start=self.capture_at_start)

    def profile_steps(self) -> list[SchedulerOutput]:
        """See `profile_run`: the most that a step can be."""
        vocab_size = self.config.vocab_size
        asked = vocab_size if self.max_num_logprobs < 0 else self.max_num_logprobs
        num_logprobs = min(asked, vocab_size, _MOST_LOGPROBS_ON_DEVICE)
        return profile_steps(self.config, num_logprobs=num_logprobs)

    def measure_step_bytes(self, meter: MemoryMeter) -> int:
        """Everything that serving takes beside weights and cache: a runner's own tensors, its
        largest steps, graphs, loaded kernels. Runs them on a runner that is thrown away.

        Raises:
            Exception: whatever the model raises, torch.OutOfMemoryError among others.
        """

        def run() -> None:
            runner = self.build(
                num_blocks=1, num_host_blocks=0, max_model_len=self.config.max_model_len
            )
            for plan in self.profile_steps():
                runner.submit(plan)
                runner.collect()

        # the null block and the only one
        extra = measure_extra_bytes(run, meter, expected_bytes=2 * self.block_bytes)
        meter.release()
        num_buckets = 0 if self.enforce_eager else len(decode_buckets(self.config.max_num_seqs))
        num_graphs = num_buckets * len(SamplingMode)
        total = extra + num_graphs * _BYTES_A_GRAPH
        logger.info("steps take up to %.0f MiB beside weights and cache", total / 1024**2)
        return total
