"""The engine without its sockets: the real scheduler over the device's runner, a step in flight.

On CPU tensors the model's kernels are interpreted, and rows and sampling are torch's.
"""

import collections
import dataclasses
import time
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

import numpy as np
import torch

from engine_core.executor import InProcessExecutor
from engine_core.kv_cache import KVCacheManager, PoolSizes
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.gpu import CudaQueue, DeviceQueue, GPUModelRunner
from engine_core.models.interface import Model
from engine_core.scheduler import (
    ModelRunnerOutput,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
)
from engine_core.startup.scheduler import build_scheduler
from kernels.backends import device_step_operations
from kernels.interface.device_steps import DeviceStepOperations
from kernels.interface.operations import Operations
from kernels.triton.linear.few_rows import FewRowsProducts
from kernels.triton.operations import TritonOperations
from protocol.outputs import EngineCoreOutput
from protocol.sampling import SamplingParams
from tests.engine_core.model_runner.gpu.fake_device import SynchronousQueue
from tests.engine_core.new_request import new_request
from tests.kernels.torch_device_steps import TorchDeviceSteps
from tests.protocol.all_outputs import all_outputs

BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of an engine.

    Attributes:
        max_num_batched_tokens: of a step, as the runner is made for.
        budget: tokens that the scheduler gives a step, if fewer.
        num_blocks: of the cache, or of each of its pools.
    """

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: PoolSizes
    budget: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request. Without `temperature` it is greedy; its seed matters otherwise."""

    name: str
    prompt: list[int]
    num_output: int
    temperature: float = 0.0
    seed: int = 0
    num_logprobs: int | None = None


@dataclasses.dataclass(slots=True)
class GeneratedOutput:
    """What a request was given.

    Attributes:
        tokens: in order.
        reports: (token ids, log-probabilities) a token, the chosen one first; as they came.
        problem: why it ended, if not for its length.
    """

    tokens: list[int] = dataclasses.field(default_factory=list)
    reports: list[tuple[list[int], bytes]] = dataclasses.field(default_factory=list)
    problem: str | None = None
    num_cached: int = 0

    def logprobs_of_all(self, vocab_size: int) -> torch.Tensor:
        """float32 [N, V]; NaN where nothing was reported."""
        table = torch.full((len(self.tokens), vocab_size), float("nan"))
        for row, (ids, values) in enumerate(self.reports):
            table[row, ids] = torch.frombuffer(bytearray(values), dtype=torch.float32)
        return table


def triton_operations(
    device: str,
    *,
    batch_invariant: bool = False,
    quantised_types: AbstractSet[str] = frozenset(),
    few_rows: FewRowsProducts | None = None,
) -> TritonOperations:
    """Of a CUDA device, or of CPU tensors under Triton's interpreter."""
    return TritonOperations(
        _numbered(device),
        batch_invariant=batch_invariant,
        quantised_types=quantised_types,
        few_rows=few_rows,
    )


def queue_of(device: str) -> DeviceQueue:
    """Of that device."""
    return SynchronousQueue() if device == "cpu" else CudaQueue(_numbered(device))


def steps_of(device: torch.device) -> DeviceStepOperations:
    """Of that device."""
    return TorchDeviceSteps() if device.type == "cpu" else device_step_operations(device)


def _numbered(device: str) -> torch.device:
    return torch.device("cpu") if device == "cpu" else torch.device("cuda", 0)


class EngineRun:
    """
    Args:
        model: loaded with `ops`.
        use_graphs: replay decode steps.
    """

    def __init__(
        self,
        model: Model,
        ops: Operations,
        sizes: Sizes,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        use_graphs: bool = True,
    ) -> None:
        self.sizes = sizes
        config = RunnerConfig(
            model=model,
            ops=ops,
            num_blocks=sizes.num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=sizes.max_num_seqs,
            max_model_len=sizes.max_model_len,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            eos_token_ids=(),
        )
        self.num_groups = config.num_groups
        self.runner = GPUModelRunner(
            config,
            steps=steps_of(ops.device),
            queue=queue_of(ops.device.type),
            use_graphs=use_graphs,
        )
        self.executor = InProcessExecutor(self.runner)
        self.scheduler: Scheduler = build_scheduler(
            SchedulerConfig(
                max_num_batched_tokens=sizes.budget or sizes.max_num_batched_tokens,
                max_num_seqs=sizes.max_num_seqs,
                max_model_len=sizes.max_model_len,
                max_steps_in_flight=self.executor.max_steps_in_flight,
                computes_in_order=False,
            ),
            KVCacheManager(
                num_blocks=config.layout.sizes(sizes.num_blocks),
                block_size=BLOCK_SIZE,
                groups=tuple(config.layout.group_specs),
                watermark=0.0,
            ),
        )
        self.answers: dict[str, GeneratedOutput] = collections.defaultdict(GeneratedOutput)
        self.requests: dict[str, Request] = {}
        self.host_s = 0.0
        """Spent on planning, launching and taking in; not on waiting."""
        self._open: collections.deque[SchedulerOutput] = collections.deque()

    def generate(self, requests: Iterable[RequestSpec]) -> dict[str, GeneratedOutput]:
        """Serve them all, together.

        Raises:
            RuntimeError: one ended for another reason than its length, or ended twice.
        """
        requests = list(requests)
        for request in requests:
            self.add(request)
        while self.has_work():
            self.step()
        for request in requests:
            answer = self.answers[request.name]
            if answer.problem is not None or len(answer.tokens) != request.num_output:
                raise RuntimeError(
                    f"{request.name} has {len(answer.tokens)} of {request.num_output} tokens: "
                    f"{answer.problem}"
                )
        return {request.name: self.answers[request.name] for request in requests}

    def add(self, request: RequestSpec) -> None:
        """Queue a request."""
        added = self.requests[request.name] = new_request(
            request_id=request.name,
            prompt_token_ids=request.prompt,
            sampling_params=SamplingParams(
                max_tokens=request.num_output,
                temperature=request.temperature,
                seed=request.seed,
                ignore_eos=True,
                logprobs=request.num_logprobs,
            ),
        )
        self.scheduler.add_request(added)

    def has_work(self) -> bool:
        """Whether a request or a step is not done."""
        return self.scheduler.has_work() or bool(self._open)

    def step(self) -> None:
        """Plan and launch a step, if there is anything to plan; take in the oldest one, if no other
        may be launched behind it."""
        started_s = time.perf_counter()
        is_idle = True
        if self.scheduler.has_work():
            plan = self.scheduler.schedule(time.monotonic())
            self.executor.submit(plan)
            self._open.append(plan)
            is_idle = not plan.total_num_scheduled_tokens
        waiting_s = 0.0
        if self._open and (is_idle or len(self._open) == self.executor.max_steps_in_flight):
            before_s = time.perf_counter()
            result = self.executor.collect()
            waiting_s = time.perf_counter() - before_s
            self._process_outputs(self._open.popleft(), result)
        self.host_s += time.perf_counter() - started_s - waiting_s

    def abort(self, names: Iterable[str]) -> None:
        """End these requests, and whatever is in flight."""
        self.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)
        while self.has_work():
            self.step()

    def _process_outputs(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(plan, result).values():
            for output in all_outputs(outputs):
                self._keep(output)

    def _keep(self, output: EngineCoreOutput) -> None:
        answer = self.answers[output.request_id]
        answer.tokens += output.new_token_ids
        answer.num_cached = output.num_cached_tokens or answer.num_cached
        if output.logprobs is not None:
            width = output.logprobs.width
            ids = np.frombuffer(output.logprobs.token_ids, "<i4").reshape(-1, width).tolist()
            values = output.logprobs.logprobs
            answer.reports += [
                (row, values[4 * width * at : 4 * width * (at + 1)]) for at, row in enumerate(ids)
            ]
        if output.finished and output.finish_reason != "length":
            answer.problem = f"{output.finish_reason}: {output.detail}"
