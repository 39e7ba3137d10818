"""A whole model on the native CPU backend beside torch's, and the host's share of a step."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from cyclopts import Parameter

from engine_core.adapters.pool import AdapterPool
from engine_core.kv_cache import KVCacheManager
from engine_core.model_files import ModelFiles, open_model_files
from engine_core.model_runner.config import RunnerConfig, plan_cache_layout
from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.models import Model as LanguageModel
from engine_core.models import load_model
from engine_core.scheduler import Request, Scheduler, SchedulerConfig
from kernels.cpu.library import NativeLibrary, load_library
from kernels.cpu.operations import CpuOperations
from kernels.interface.operations import Operations
from kernels.torch.operations import TorchOperations
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from scripts.benchmarks import DEFAULT_MODEL, Json, Model, Rows, report
from scripts.benchmarks.best_times import Threads, clock, set_threads
from scripts.load.report import log

BLOCK_SIZE = 16
NEAR_TIE = 1e-3
PROMPT_LENGTH = 64
Results = dict[str, dict[str, float]]


@dataclasses.dataclass
class Answers:
    """Of one call of `GreedyRun.generate`, a list for each prompt."""

    tokens: list[list[int]]
    margins: list[list[float]]
    """By how much each token's logit was above the next best; empty unless asked for."""
    first_s: float = 0.0
    """Seconds of the runner to all first tokens."""
    rest_s: float = 0.0
    """Its seconds for all others."""


class GreedyRun:
    """Prompts of equal length, computed together. Only the runner's time is counted.

    Args:
        max_rows: most prompts of a call.
        max_length: most tokens of a prompt with its answer.
        max_tokens: most tokens of all prompts of a call with their answers.
        keeps_blocks: quantised weights run as the file holds them.
        make_pool: of adapters, which requests name by their fingerprints.
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
        make_pool: Callable[[LanguageModel], AdapterPool] | None = None,
    ) -> None:
        tensors = files.tensors(keeps_blocks=keeps_blocks)
        model = load_model(files.config, tensors, dtype=torch.float32, ops=ops)
        layout = plan_cache_layout(model.kv_cache_spec.sliding_windows)
        self._groups = layout.group_specs
        self._num_blocks = (max_tokens // BLOCK_SIZE + 2 * max_rows) * len(layout.groups) + 1
        self._max_length = max_length
        config = RunnerConfig(
            model=model,
            ops=ops,
            num_blocks=self._num_blocks,
            block_size=BLOCK_SIZE,
            max_num_seqs=max_rows,
            max_model_len=max_length,
            max_num_batched_tokens=max_rows * max_length,
            dtype=torch.float32,
            kv_dtype=torch.float32,
            eos_token_ids=(),
            adapters=None if make_pool is None else make_pool(model),
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
        adapters: Sequence[str | None] | None = None,
    ) -> Answers:
        """`num_output` tokens for each; a step computes `chunk` tokens of every prompt at most.
        `after_first` is called when each has its first."""
        answers = Answers([[] for _ in prompts], [[] for _ in prompts])
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
        params = SamplingParams(
            max_tokens=num_output,
            temperature=0.0,
            ignore_eos=True,
            logprobs=2 if with_margins else None,
        )
        for index, prompt in enumerate(prompts):
            scheduler.add_request(
                Request(
                    EngineRequest(
                        request_id=str(index),
                        prompt_token_ids=prompt,
                        sampling_params=params,
                        adapter=None if adapters is None else adapters[index],
                    )
                )
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
                if output.logprobs:
                    reported = output.logprobs[str(index)].logprobs
                    _, best, second = np.frombuffer(reported, "<f4")
                    answers.margins[index].append(float(best - second))
            if len(answers.tokens[0]) == 1:
                after_first()
        self._runner.execute(scheduler.schedule())  # frees the rows
        return answers


def cpu_model(
    *,
    model: Model = DEFAULT_MODEL,
    rows: Rows = (1, 32, 64),
    num_output: int = 48,
    long: Annotated[int, Parameter(help="Tokens of the long prompt.")] = 2000,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Decode of each number of rows, and a long prompt's first token, of the real runner. Fails
    if the greedy tokens differ where torch's two best logits are more than 0.001 apart."""
    set_threads(threads)
    files = open_model_files(model, report=log)
    runs = {
        name: GreedyRun(
            ops,
            files,
            max_rows=max(rows),
            max_length=long + num_output,
            max_tokens=max(max(rows) * (PROMPT_LENGTH + num_output), long + num_output),
        )
        for name, ops in {
            "torch": TorchOperations(),
            "native": CpuOperations(load_library()),
        }.items()
    }
    results: Results = {}
    for num_rows, length in [*((count, PROMPT_LENGTH) for count in rows), (1, long)]:
        prompts = random_prompts(files, num_rows, length)
        chunk = 256 if length == long else 1024
        answers = [
            run.generate(prompts, 16, chunk=chunk, with_margins=True) for run in runs.values()
        ]
        num_ties = count_near_ties(*answers)
        num_decoded = num_output if length != long else 1
        timed: dict[str, list[Answers]] = {name: [] for name in runs}
        for _ in range(2):
            for name, run in runs.items():
                timed[name].append(run.generate(prompts, num_decoded, chunk=chunk))
        figures = {
            f"{name}_first_s": min(one.first_s for one in ones) for name, ones in timed.items()
        }
        line = f"{num_rows:3} x {length}: first tokens, ms {_both(figures, 'first_s', 1e3)}"
        if num_decoded > 1:
            num_tokens = num_rows * (num_decoded - 1)
            figures |= {
                f"{name}_tok_s": num_tokens / min(one.rest_s for one in ones)
                for name, ones in timed.items()
            }
            line += f"; decode, tok/s {_both(figures, 'tok_s', 1.0)}"
        log(f"{line}; tokens equal, {num_ties} answers up to a near tie")
        results[f"{num_rows} x {length}"] = figures
    report(results, json)


def _both(figures: dict[str, float], name: str, scale: float) -> str:
    return ", ".join(f"{figures[f'{ops}_{name}'] * scale:.1f} {ops}" for ops in ("torch", "native"))


def random_prompts(files: ModelFiles, num_rows: int, length: int) -> list[list[int]]:
    """The same ones every time."""
    generator = np.random.default_rng(num_rows)
    drawn: list[list[int]] = generator.integers(
        0, int(files.config["vocab_size"]), (num_rows, length)
    ).tolist()
    return drawn


def count_near_ties(reference: Answers, native: Answers) -> int:
    """How many answers part at a near tie. Raises RuntimeError: one parts elsewhere."""
    num_ties = 0
    for row, (wanted, given) in enumerate(zip(reference.tokens, native.tokens, strict=True)):
        if wanted == given:
            continue
        at = next(i for i, (a, b) in enumerate(zip(wanted, given, strict=True)) if a != b)
        margin = reference.margins[row][at]
        if margin > NEAR_TIE:
            raise RuntimeError(
                f"answer {row} differs at token {at}, where torch's best leads by {margin:.4f}"
            )
        num_ties += 1
    return num_ties


class MeasuredLibrary(NativeLibrary):
    """The library, with the seconds of every call kept. A call's way through ctypes (about a
    microsecond) is counted as the library's."""

    def __init__(self, library: NativeLibrary) -> None:
        # the loaded library's own state: the same binary, the same threads
        self.__dict__.update(library.__dict__)
        self.spent_s: dict[str, float] = {}
        """By function."""

    def function(self, name: str, *argument_types: Any) -> Callable[..., bytes | None]:
        found = super().function(name, *argument_types)
        self.spent_s.setdefault(name, 0.0)

        def measured(*arguments: object) -> bytes | None:
            start = clock()
            refusal = found(*arguments)
            self.spent_s[name] += clock() - start
            return refusal

        return measured

    def reset(self) -> None:
        self.spent_s.update(dict.fromkeys(self.spent_s, 0.0))


def cpu_overhead(
    *,
    model: Model = DEFAULT_MODEL,
    rows: Rows = (1, 32, 64),
    num_output: int = 48,
    weights: Annotated[
        Literal["float32", "int8", "int4", "own"],
        Parameter(help='"own": quantised ones as the file holds them.'),
    ] = "float32",
    threads: Threads = None,
    json: Json = None,
) -> None:
    """What of a decode step is spent inside the native library, and what around it."""
    set_threads(threads)
    files = open_model_files(model, report=log)
    library = MeasuredLibrary(load_library())
    length = PROMPT_LENGTH + num_output
    run = GreedyRun(
        CpuOperations(library, linear_weights="float32" if weights == "own" else weights),
        files,
        max_rows=max(rows),
        max_length=length,
        max_tokens=max(rows) * length,
        keeps_blocks=weights == "own",
    )
    results: Results = {}
    for num_rows in rows:
        prompts = random_prompts(files, num_rows, PROMPT_LENGTH)
        measured = []
        for _ in range(4):
            answers = run.generate(prompts, num_output, after_first=library.reset)
            num_steps = num_output - 1
            by_name = {name: spent_s / num_steps for name, spent_s in library.spent_s.items()}
            measured.append((answers.rest_s / num_steps, sum(by_name.values()), by_name))
        step_s, library_s, by_name = min(measured, key=lambda one: one[0] - one[1])
        log(
            f"{num_rows:3} rows: a step {step_s * 1e3:.2f} ms, in the library "
            f"{library_s * 1e3:.2f} ms, around it {(step_s - library_s) * 1e3:.2f} ms "
            f"({(step_s / library_s - 1) * 100:.1f} %)"
        )
        for name, seconds in sorted(by_name.items(), key=lambda item: -item[1]):
            if seconds > 1e-6:
                log(f"      {name:24}{seconds * 1e3:9.3f} ms")
        results[str(num_rows)] = {"step_s": step_s, "library_s": library_s}
    report(results, json)
