"""A loop in which the runner makes drafts, and requests for it. Not a test."""

import random

import numpy as np
import torch
from engine_loop import EngineLoop, make_scheduler
from same_answers import draw_params

from engine_core.scheduler.speculation.draft_lengths import DraftLengths
from protocol.sampling import BeamSearchParams, SamplingParams

MOST = 3
VOCAB = 131


class DraftedLoop(EngineLoop):
    """Counts drafts; `runner` makes `wanted` of them for each sequence, or any number."""

    def __init__(
        self, runner, monkeypatch, *, wanted=MOST, seed=0, swap=False, drafted=True, chunk=32
    ):
        draw = np.random.default_rng(seed)
        monkeypatch.setattr(
            DraftLengths,
            "choose",
            lambda self, rows, *load: (
                draw.integers(0, MOST + 1, len(rows))
                if wanted is None
                else np.full(len(rows), wanted)
            ),
        )
        options = {"num_speculative_tokens": MOST, "num_lookahead_slots": MOST} if drafted else {}
        config = runner.config
        scheduler = make_scheduler(
            config.layout,
            num_blocks=config.num_blocks,
            num_host_blocks=config.num_host_blocks,
            swap=swap,
            max_num_batched_tokens=chunk,
            max_num_seqs=8,
            max_model_len=64,
            **options,
        )
        super().__init__(scheduler, runner, depth=1)
        self.num_drafted = self.num_accepted = 0
        self.drafts = []
        """(request id, its tokens so far, what was drafted behind them)"""
        collect = runner.collect

        def counted():
            """Also drafts behind an end of sequence, which no client gets."""
            drafts = self.open_plan.scheduled_spec_decode_tokens
            output = collect()
            for name in drafts:
                self.num_drafted += len(drafts[name])
                self.num_accepted += len(output.verified_token_ids[name]) - 1
            if output.draft_token_ids is not None:
                made = output.draft_token_ids
                for name, drafts in zip(made.req_ids, made.draft_token_ids, strict=True):
                    row = self.scheduler.pool.find_sequence(name).row
                    batch = getattr(runner, "host_batch", runner.batch)
                    tokens = batch.token_ids[row, : batch.num_tokens[row]].tolist()
                    self.drafts.append((name, tokens, drafts))
            return output

        monkeypatch.setattr(runner, "collect", counted)

    def take_in(self):
        self.open_plan = self.open[0]
        super().take_in()


def add_all(loop, seed, *, beams=False):
    draw = random.Random(seed)
    shared = [draw.randrange(8, VOCAB) for _ in range(14)]
    for number in range(7):
        prompt = shared[: draw.choice([0, 9, 14])]
        prompt = prompt + [draw.randrange(8, VOCAB) for _ in range(draw.randint(1, 12))]
        params = draw_params(draw, max_tokens=draw.randint(1, 20), may_fail=False)
        is_several = number % 4 == 1 and not params.is_greedy
        loop.add(f"r{number}", prompt, params, num_sequences=2 if is_several else 1)
    if beams:
        params = SamplingParams(max_tokens=8, temperature=0.0)
        loop.add("beams", shared, params, num_sequences=3, beam_search=BeamSearchParams(3))


def answers_of_all(loop):
    """Tokens and ends of requests of all kinds, beams among them, beside one that is aborted."""
    add_all(loop, 7, beams=True)
    loop.add("gone", [9, 9, 9], SamplingParams(max_tokens=30, temperature=1.0, seed=1))
    for _ in range(4):
        loop.step()
    loop.abort("gone")
    loop.finish()
    del loop.tokens["gone", 0]
    return loop.tokens, loop.ends


def finish_greedy(loop):
    """Eight requests with prompts of 1 to 36 tokens, to their end."""
    draw = torch.Generator().manual_seed(4)
    for number in range(8):
        prompt = torch.randint(8, VOCAB, (5 * number + 1,), generator=draw).tolist()
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        loop.add(f"r{number}", prompt, params, num_sequences=1)
    loop.finish()
