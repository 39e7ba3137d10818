"""A whole model on the real runner, without sockets and client: prompts in, greedy tokens out."""

import dataclasses
from collections.abc import Callable

import torch

from engine_core.kv_cache import KVCacheGroupSpec, KVCacheManager
from engine_core.model_files import ModelFiles
from engine_core.model_runner.cache_layout import plan_cache_layout
from engine_core.model_runner.config import RunnerConfig
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.models import load_model
from engine_core.scheduler import Request, Scheduler, SchedulerConfig
from kernels.interface.operations import Operations
from protocol.sampling import SamplingParams
from scripts.benchmarks.best_times import clock

BLOCK_SIZE = 16


@dataclasses.dataclass
class Answers:
    """Of one call of `GreedyRun.generate`.

    Attributes:
        tokens: of each prompt.
        margins: by how much each token's logit was above the next best; empty unless asked for.
        first_s: seconds of the runner to all first tokens.
        rest_s: its seconds for all others.
    """

    tokens: list[list[int]]
    margins: list[list[float]]
    first_s: float = 0.0
    rest_s: float = 0.0


class GreedyRun:
    """Prompts of equal length, computed together. Only the runner's time is counted.

    Args:
        max_rows: most prompts of a call.
        max_length: most tokens of a prompt with its answer.
        max_tokens: most tokens of all prompts of a call with their answers.
        keeps_blocks: quantised weights run as the file holds them.
    """

    def __init__(
        self,
        ops: Operations,
        files: ModelFiles,
        *,
        max_rows: int,
        max_length: int,
        max_tokens: int,
        keeps_blocks: bool = False,
    ) -> None:
        tensors = files.tensors(keeps_blocks=keeps_blocks)
        self._model = load_model(files.config, tensors, dtype=torch.float32, ops=ops)
        layout = plan_cache_layout(self._model.kv_cache_spec.sliding_windows)
        self._groups = [KVCacheGroupSpec(group.sliding_window) for group in layout.groups]
        self._num_blocks = (max_tokens // BLOCK_SIZE + 2 * max_rows) * len(layout.groups) + 1
        self._max_length = max_length
        config = RunnerConfig(
            model=self._model,
            ops=ops,
            layout=layout,
            num_blocks=self._num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_rows,
            max_model_len=max_length,
            max_num_batched_tokens=max_rows * max_length,
            dtype=torch.float32,
            kv_dtype=torch.float32,
            eos_token_ids=(),
        )
        self._runner = CPUModelRunner(config)

    def generate(
        self,
        prompts: list[list[int]],
        num_output: int,
        *,
        chunk: int = 1024,
        with_margins: bool = False,
        after_first: Callable[[], None] = lambda: None,
    ) -> Answers:
        """`num_output` tokens for each; a step computes `chunk` tokens of every prompt at most.

        `after_first` is called when each has its first.
        """
        answers = Answers([[] for _ in prompts], [[] for _ in prompts])
        compute_logits = self._model.compute_logits
        step_margins: list[float] = []
        if with_margins:

            def kept_margins(hidden_RE: torch.Tensor) -> torch.Tensor:
                logits_RV = compute_logits(hidden_RE)
                best_R2 = logits_RV.topk(2, dim=1).values
                step_margins[:] = (best_R2[:, 0] - best_R2[:, 1]).tolist()
                return logits_RV

            self._model.compute_logits = kept_margins  # type: ignore[method-assign]
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_batched_tokens=chunk * len(prompts),
                max_num_seqs=len(prompts),
                max_model_len=self._max_length,
                max_chunk_size=chunk,
            ),
            KVCacheManager(
                num_blocks=self._num_blocks,
                block_size=BLOCK_SIZE,
                groups=self._groups,
                enable_prefix_caching=False,
            ),
        )
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            scheduler.add_request(
                Request(request_id=str(index), prompt_token_ids=prompt, sampling_params=params)
            )
        while scheduler.get_request_counts() != (0, 0):
            plan = scheduler.schedule()
            start = clock()
            output = self._runner.execute(plan)
            spent_s = clock() - start
            scheduler.update_from_output(plan, output)
            if answers.tokens[0]:
                answers.rest_s += spent_s
            else:
                answers.first_s += spent_s
            if plan.batch.num_computed_tokens[0] + chunk < len(prompts[0]):
                continue
            for index, token in enumerate(output.sampled_token_ids):
                answers.tokens[index].append(int(token))
                answers.margins[index] += step_margins[index : index + 1]
            if len(answers.tokens[0]) == 1:
                after_first()
        if with_margins:
            self._model.compute_logits = compute_logits  # type: ignore[method-assign]
        self._runner.execute(scheduler.schedule())  # frees the rows
        return answers
