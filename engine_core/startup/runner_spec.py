"""How the model runner of a device is made, and what its largest step takes there."""

import dataclasses
import logging

import numpy as np

from engine_core.errors import StartupError
from engine_core.executor import StepRunner
from engine_core.kv_cache import CacheCopies, PoolSizes
from engine_core.model_runner.cache import BlockStorage
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.model_runner.encoder_runner import EncoderRunner
from engine_core.model_runner.gpu import CudaQueue, DraftingGPURunner, GPUModelRunner
from engine_core.models.encoders.bidirectional import AnyEncoder
from engine_core.options.engine import EngineOptions
from engine_core.scheduler import NewRequestData, ScheduledBatch, SchedulerConfig, SchedulerOutput
from engine_core.startup.memory import CudaMeter, measure_extra_bytes
from engine_core.startup.model import LoadedModel
from kernels.backends import device_step_operations
from kernels.interface.sampling_rows import MAX_DEVICE_LOGPROBS
from protocol.sampling import SamplingParams

logger = logging.getLogger(__name__)

Runner = CPUModelRunner | GPUModelRunner | EncoderRunner

_BYTES_A_GRAPH = 12 * 1024**2
"""Allowed for each CUDA graph: the largest are measured, the others share their memory for tensors,
and the driver keeps some MiB of each."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSpec:
    """What every runner of this engine is made of; only the number of blocks is still open.

    Attributes:
        config: with one block and the full max_model_len, as the largest step is measured.
        scheduler: `max_model_len` is still the model's or the operator's.
        on_device: rows and sampling are the device's, and a step is in flight while the next is
            planned; else one step at a time, with rows on the host.
    """

    loaded: LoadedModel
    options: EngineOptions
    config: RunnerConfig
    scheduler: SchedulerConfig
    on_device: bool

    @property
    def uses_graphs(self) -> bool:
        """Whether a GPU captures and replays CUDA graphs of steps."""
        return self.loaded.captures_steps and not self.options.enforce_eager

    def build(
        self,
        *,
        num_blocks: PoolSizes,
        num_host_blocks: PoolSizes,
        max_model_len: int,
        storage: BlockStorage | None = None,
    ) -> Runner:
        """A runner with its cache, on a CPU with this one of as many blocks if it is given;
        `max_model_len` may be less than was measured for. Raises StartupError: the device's kernels
        cannot serve the model's shape or the cache's dtype."""
        config = dataclasses.replace(
            self.config,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            max_model_len=max_model_len,
        )
        device = config.ops.device
        try:
            if isinstance(config.model, AnyEncoder):
                return EncoderRunner(config)
            if not self.on_device:
                return CPUModelRunner(config, storage)
            runner_class = GPUModelRunner if config.draft is None else DraftingGPURunner
            return runner_class(
                config,
                steps=device_step_operations(device),
                queue=CudaQueue(device),
                use_graphs=self.uses_graphs,
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
        if isinstance(runner, EncoderRunner) and not self.loaded.traits.is_host:
            runner.warm_up()
        if isinstance(runner, GPUModelRunner):
            if not self.uses_graphs:
                logger.info("no CUDA graphs: every step is launched kernel by kernel")
            runner.warm_up(capture_at_start=self.options.capture_at_start)

    def profile_steps(self) -> list[SchedulerOutput]:
        """See `profile_steps`; with the most log-probabilities that the device reports."""
        most, vocab_size = self.options.max_logprobs, self.config.vocab_size
        num_logprobs = min(vocab_size if most < 0 else most, vocab_size, MAX_DEVICE_LOGPROBS)
        return profile_steps(self.config, num_logprobs=num_logprobs)

    def measure_step_bytes(self, meter: CudaMeter) -> int:
        """Everything that serving takes beside weights and cache: a runner's own tensors, its
        largest steps, graphs, loaded kernels. Runs them on a runner that is thrown away.
        Raises Exception: whatever the model raises, torch.OutOfMemoryError among others."""

        num_graphs = 0

        def run() -> None:
            nonlocal num_graphs
            runner = self.build(
                num_blocks=1,
                num_host_blocks=int(self.options.host_cache_memory > 0),  # copies are staged
                max_model_len=self.config.max_model_len,
            )
            assert isinstance(runner, GPUModelRunner)
            num_graphs = len(runner.graphs.all)
            # While serving, steps keep their memory beside the graphs': prompts behind them, too.
            for _ in range(2):
                for plan in self.profile_steps():
                    runner.submit(plan)
                    runner.collect()
                runner.capture_graphs(runner.graphs.largest)

        # of each pool the null block and the only one
        expected_bytes = 2 * sum(self.config.layout.pool_bytes)
        extra = measure_extra_bytes(run, meter, expected_bytes=expected_bytes)
        meter.release()
        total = extra + num_graphs * _BYTES_A_GRAPH
        logger.info("steps take up to %.0f MiB beside weights and cache", total / 1024**2)
        return total


def prepare_ahead(runner: StepRunner | None) -> None:
    """While no request has come: a short piece of what a later step would otherwise wait for."""
    if isinstance(runner, GPUModelRunner):
        runner.capture_next_graph()


# ------------------------------------------------------------------ the largest step


def prompt_lengths(config: RunnerConfig) -> list[int]:
    """Tokens of each row: together as many as the step may have, the first rows longest.

    A prompt leaves room for one more token in max_model_len."""
    num_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
    left = config.max_num_batched_tokens - num_rows
    lengths = []
    for _ in range(num_rows):
        more = max(0, min(left, config.max_model_len - 2))
        lengths.append(1 + more)
        left -= more
    return lengths


def profile_steps(config: RunnerConfig, *, num_logprobs: int) -> list[SchedulerOutput]:
    """Plans to be run in order on a runner with this config, all of whose rows have each pool's
    first block in every place: memory is measured, not answers. The largest step that computes
    prompts, the largest that decodes and verifies drafts, and one without tokens, which frees all
    rows. Each has as many tokens and rows as a step may have, every row samples with all that
    sampling offers, and of every prompt log-probabilities are reported.
    `num_logprobs`: the most that are reported for a token."""
    lengths = prompt_lengths(config)
    names = [f"profile-{row}" for row in range(len(lengths))]
    counts = np.array(lengths, np.int32)
    drafts = _num_drafts(lengths, config)
    nothing = np.zeros(len(lengths), np.int32)
    new = [
        _new_request(name, row, length, length + 1 + drafts[row], config, num_logprobs)
        for row, (name, length) in enumerate(zip(names, lengths, strict=True))
    ]
    return [
        _plan(0, names, nothing, counts, new=new),
        _plan(1, names, counts, 1 + np.array(drafts, np.int32)),
        _plan(2, [], nothing[:0], nothing[:0], finished=names),
    ]


def _num_drafts(lengths: list[int], config: RunnerConfig) -> list[int]:
    """Drafts of each row: together as many as a step may have, none beyond max_model_len."""
    left = min(config.max_num_drafts, config.max_num_batched_tokens - len(lengths))
    drafts = []
    for length in reversed(lengths):
        drafts.append(min(left, config.max_model_len - 1 - length))
        left -= drafts[-1]
    return drafts[::-1]


def _new_request(
    name: str, row: int, length: int, num_slots: int, config: RunnerConfig, num_logprobs: int
) -> NewRequestData:
    num_blocks, first_ids = -(-num_slots // config.block_size), config.block_ids.first_ids
    return NewRequestData(
        req_id=name,
        prompt_token_ids=[0] * length,
        output_token_ids=[],
        mm_features=(),
        sampling_params=SamplingParams(
            max_tokens=2,
            temperature=1.0,
            top_k=50,
            top_p=0.9,
            min_p=0.01,
            repetition_penalty=1.1,
            presence_penalty=0.1,
            frequency_penalty=0.1,
            seed=row,
            logprobs=num_logprobs,
            prompt_logprobs=num_logprobs,
        ),
        block_ids=tuple([first_ids[spec.pool]] * num_blocks for spec in config.layout.group_specs),
        num_computed_tokens=0,
        lora_request=None,
        row=row,
    )


def _plan(
    step_id: int,
    names: list[str],
    computed: np.ndarray,
    scheduled: np.ndarray,
    *,
    new: list[NewRequestData] | None = None,
    finished: list[str] | None = None,
) -> SchedulerOutput:
    return SchedulerOutput(
        step_id=step_id,
        batch=ScheduledBatch(
            req_ids=names,
            rows=np.arange(len(names), dtype=np.int64),
            num_computed_tokens=computed,
            num_scheduled_tokens=scheduled,
        ),
        scheduled_new_reqs=new or [],
        resumed_reqs=[],
        block_updates=[],
        copies=CacheCopies(),
        total_num_scheduled_tokens=int(scheduled.sum()),
        scheduled_spec_decode_tokens={
            name: [0] * (number - 1)
            for name, number in zip(names, scheduled.tolist(), strict=True)
            if number > 1 and not new
        },
        finished_req_ids=finished or [],
        preempted_req_ids=[],
        num_output_tokens=np.zeros(len(names), np.int32),
    )
