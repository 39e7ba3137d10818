"""A whole model on the real runner, without scheduler and sockets: prompts in, greedy tokens out.

Owns the plans, written by hand. Must not know what is compared.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from engine_core.kv_cache import CacheCopies
from engine_core.model_files import ModelFiles
from engine_core.model_runner.cache_layout import plan_cache_layout
from engine_core.model_runner.runner import ModelRunner
from engine_core.models import load_model
from engine_core.scheduler.plan import NewRequestData, ScheduledBatch, SchedulerOutput
from kernels.interface.operations import Operations
from protocol.sampling import SamplingParams
from scripts.cpu_operations.clock import clock

BLOCK_SIZE = 16


@dataclasses.dataclass(slots=True)
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
    """Prompts of equal length, computed together; every block is given at once.

    Args:
        max_rows: most prompts of a call.
        max_length: most tokens of a prompt with its answer.
        max_tokens: most tokens of all prompts of a call with their answers.
        keeps_blocks: quantised weights run as the file holds them.
        kv_dtype: of the cache.
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
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.ops = ops
        tensors = files.tensors(keeps_blocks=keeps_blocks)
        self.model = load_model(files.config, tensors, dtype=torch.float32, ops=ops)
        layout = plan_cache_layout(self.model.kv_cache_spec.sliding_windows)
        self._num_groups = len(layout.groups)
        self._num_steps = 0
        self.runner = ModelRunner(
            model=self.model,
            ops=ops,
            layout=layout,
            num_blocks=(max_tokens // BLOCK_SIZE + max_rows) * self._num_groups,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_rows,
            max_model_len=max_length,
            dtype=torch.float32,
            kv_dtype=kv_dtype,
            eos_token_ids=(),
        )

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
        names = [str(row) for row in range(len(prompts))]
        answers = Answers([[] for _ in prompts], [[] for _ in prompts])
        compute_logits = self.model.compute_logits
        if with_margins:

            def kept_margins(hidden_RE: torch.Tensor) -> torch.Tensor:
                logits_RV = compute_logits(hidden_RE)
                best_R2 = logits_RV.topk(2, dim=1).values
                for kept, (best, second) in zip(answers.margins, best_R2.tolist(), strict=True):
                    kept.append(best - second)
                return logits_RV

            self.model.compute_logits = kept_margins  # type: ignore[method-assign]
        length, computed = len(prompts[0]), 0
        new = self._new_requests(names, prompts, num_output)
        while computed < length + num_output - 1:
            count = min(chunk, length - computed) if computed < length else 1
            plan = self._plan(names, computed, count, new if not computed else [])
            begun = clock()
            sampled = self.runner.execute(plan).sampled_token_ids
            spent_s = clock() - begun
            computed += count
            if computed > length:
                answers.rest_s += spent_s
            else:
                answers.first_s += spent_s
            if computed < length:
                continue
            for kept, token in zip(answers.tokens, sampled, strict=True):
                kept.append(int(token))
            if computed == length:
                after_first()
        if with_margins:
            self.model.compute_logits = compute_logits  # type: ignore[method-assign]
        self.runner.execute(self._plan([], 0, 0, [], finished=names))
        return answers

    def _new_requests(
        self, names: list[str], prompts: list[list[int]], num_output: int
    ) -> list[NewRequestData]:
        params = SamplingParams(max_tokens=num_output, temperature=0.0)
        width = -(-(len(prompts[0]) + num_output) // BLOCK_SIZE)
        return [
            NewRequestData(
                req_id=name,
                prompt_token_ids=prompt,
                output_token_ids=[],
                mm_features=[],
                sampling_params=params,
                block_ids=tuple(
                    list(range(1 + at * width, 1 + (at + 1) * width))
                    for at in range(row * self._num_groups, (row + 1) * self._num_groups)
                ),
                num_computed_tokens=0,
                lora_request=None,
                row=row,
            )
            for row, (name, prompt) in enumerate(zip(names, prompts, strict=True))
        ]

    def _plan(
        self,
        names: list[str],
        computed: int,
        count: int,
        new: list[NewRequestData],
        finished: list[str] | None = None,
    ) -> SchedulerOutput:
        num_rows = len(names)
        self._num_steps += 1
        return SchedulerOutput(
            step_id=self._num_steps,
            batch=ScheduledBatch(
                req_ids=names,
                rows=np.arange(num_rows, dtype=np.int32),
                num_computed_tokens=np.full(num_rows, computed, np.int32),
                num_scheduled_tokens=np.full(num_rows, count, np.int32),
            ),
            scheduled_new_reqs=new,
            resumed_reqs=[],
            block_updates=[],
            copies=CacheCopies(swap_in=[], swap_out=[], copy=[]),
            total_num_scheduled_tokens=num_rows * count,
            scheduled_spec_decode_tokens={},
            finished_req_ids=finished or [],
            preempted_req_ids=[],
            num_output_tokens=np.zeros(num_rows, np.int32),
        )
