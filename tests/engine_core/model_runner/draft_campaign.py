"""Thousands of random requests with drafts of all kinds and without: by hand, from the root.

python -m tests.engine_core.model_runner.draft_campaign --num-rounds 200
"""

import argparse
import random
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))

from conftest import CONFIGS
from drafting_loop import DraftingLoop
from eagle_runners import TARGETS, eagle_reference, eagle_runner
from engine_loop import EngineLoop, few_blocks
from runners import load_reference, runner_config, spoiled
from same_answers import V
from test_drafts import lives, run, scheduler_for

from engine_core.model_runner.cpu.runner import CPUModelRunner
from engine_core.scheduler.speculation.draft_lengths import DraftLengths
from kernels.cpu.operations import CpuOperations
from tests.native_kernels import native_library_or_skip


def one_round(seed: int) -> tuple[int, int, int]:
    """Requests, drafts and accepted ones. Raises AssertionError: something differs."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    config = draw.choice(list(CONFIGS.values()))
    reference = transformers.AutoModelForCausalLM.from_config(config).eval()
    ops = CpuOperations(native_library_or_skip())
    model, blocks = load_reference(reference, ops), few_blocks(reference)
    blocks["num_blocks"] += 12  # three samples of the longest request must fit alone
    options = {"swap": draw.random() < 0.5, "max_num_batched_tokens": draw.choice([16, 64, 200])}
    requests = list(lives(draw, 40))

    def made(kind, **more):
        runner = spoiled(CPUModelRunner(runner_config(model, ops, **blocks)))
        loop = kind(scheduler_for(runner, blocks, **options), runner, depth=1, **more)
        return run(loop, requests, seed=draw.random())

    plain = made(EngineLoop)
    drafting = made(DraftingLoop, answers=plain.tokens, vocab_size=V, seed=seed, most=9)
    assert drafting.tokens == plain.tokens, seed
    assert drafting.ends == plain.ends, seed
    assert drafting.logprobs == plain.logprobs, seed
    assert drafting.logprob_bytes == plain.logprob_bytes, seed
    return len(requests), drafting.num_drafted, drafting.num_accepted


def one_eagle_round(seed: int) -> tuple[int, int, int]:
    """Likewise, with drafts of a random EAGLE-3 head."""
    draw = random.Random(seed)
    reference = eagle_reference(draw.choice(list(TARGETS)), seed=seed)
    ops = CpuOperations(native_library_or_skip())
    model, blocks = load_reference(reference, ops), few_blocks(reference)
    blocks["num_blocks"] += 12
    options = {"swap": draw.random() < 0.5, "max_num_batched_tokens": draw.choice([16, 64, 200])}
    requests, loops, lengths = list(lives(draw, 40)), [], np.random.default_rng(seed)

    def random_lengths(rows):
        return lengths.integers(0, 6, len(rows))

    for head in (None, reference.head):
        runner = eagle_runner(
            model, ops, head, reference.head_tensors, max_num_drafts=8 * 5, **blocks
        )
        drafts = {} if head is None else {"num_speculative_tokens": 5, "num_lookahead_slots": 5}
        loop = EngineLoop(scheduler_for(runner, blocks, **options, **drafts), runner, depth=1)
        with mock.patch.object(DraftLengths, "choose", lambda _, rows, *load: random_lengths(rows)):
            loops.append(run(loop, requests, seed=draw.random()))
    plain, drafted = loops
    assert drafted.tokens == plain.tokens, seed
    assert drafted.ends == plain.ends, seed
    assert drafted.logprobs == plain.logprobs, seed
    assert drafted.logprob_bytes == plain.logprob_bytes, seed
    statistics = drafted.scheduler.statistics()
    return len(requests), statistics.num_draft_tokens, statistics.num_accepted_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-rounds", type=int, default=50)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--eagle", action="store_true", help="drafts of heads")
    options = parser.parse_args()
    torch.set_num_threads(1)
    totals = [0, 0, 0]
    for seed in range(options.first, options.first + options.num_rounds):
        found = (one_eagle_round if options.eagle else one_round)(seed)
        totals = [old + new for old, new in zip(totals, found, strict=True)]
    requests, drafted, accepted = totals
    print(f"{requests} requests equal, {drafted} drafts, {accepted} accepted")


if __name__ == "__main__":
    main()
