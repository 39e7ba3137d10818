"""Several decode steps of one plan give the tokens that a plan a token gives.

Proves S091.
"""

import collections
import random

import pytest
import torch

from engine_core.kv_cache import KVCacheManager
from engine_core.scheduler import SchedulerConfig
from engine_core.startup.scheduler import build_scheduler
from protocol.outputs import FinishReason
from protocol.sampling import SamplingParams
from tests.engine_core.new_request import new_request
from tests.protocol.all_outputs import all_outputs

EOS = 7
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.3, "seed": 6, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 8, "min_tokens": 6, "logit_bias": {EOS: 8.0, 3: 2.0}},
]


def serve(runner, requests, num_decode_steps, **options):
    """Tokens and end of every sequence, and the steps of each plan."""
    scheduler = build_scheduler(
        SchedulerConfig(
            max_num_batched_tokens=32,
            max_num_seqs=8,
            max_model_len=64,
            num_decode_steps=num_decode_steps,
            num_lookahead_slots=num_decode_steps - 1,
            **options,
        ),
        KVCacheManager(
            num_blocks=runner.config.num_blocks,
            block_size=runner.config.block_size,
            groups=runner.config.layout.group_specs,
            num_host_blocks=runner.config.num_host_blocks,
        ),
    )
    for name, prompt, params, num_sequences in requests:
        scheduler.add_request(
            new_request(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=params,
                eos_token_ids=(EOS,),
                num_sequences=num_sequences,
            )
        )
    tokens, ends, steps = collections.defaultdict(list), {}, []
    while scheduler.has_work():
        plan = scheduler.schedule()
        steps.append(plan.num_decode_steps)
        outputs = scheduler.update_from_output(plan, runner.execute(plan))
        scheduler.check()
        for output in (each for one in outputs.values() for each in all_outputs(one)):
            place = (output.request_id, output.index)
            tokens[place] += output.new_token_ids
            if output.finish_reason is not None:
                ends[place] = output.finish_reason, output.detail
    return tokens, ends, steps


def drawn_requests():
    draw = random.Random(3)
    return [
        (
            f"r{number}",
            [draw.randrange(8, 120) for _ in range(draw.randint(1, 20))],
            SamplingParams(max_tokens=draw.randint(1, 30), **KINDS[number % len(KINDS)]),
            2 if number % 5 == 1 else 1,
        )
        for number in range(8)
    ]


@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 34}, {"num_blocks": 34, "num_host_blocks": 60}]
)
def test_tokens_are_those_of_one_step_a_plan(make_runner, options):
    """Also where blocks are so few that requests are preempted, and swapped."""
    if len(make_runner().config.layout.groups) > 1 and options:
        options = {**options, "num_blocks": 80}
    plain, ends, _ = serve(make_runner(**options), drawn_requests(), 1)
    several, ends_of_several, steps = serve(make_runner(**options), drawn_requests(), 5)
    assert several == plain
    assert ends_of_several == ends
    assert {FinishReason.STOP, FinishReason.LENGTH} == {reason for reason, _ in ends.values()}
    assert max(steps) == 5


def test_a_row_that_fails_on_the_way_keeps_the_tokens_before(make_runner, monkeypatch):
    """Logits of the one sequence are no numbers at a position in the middle of a plan."""
    requests = [
        (name, [9, 8, 10], SamplingParams(max_tokens=20, temperature=1.0, seed=seed), 1)
        for seed, name in enumerate(["a", "b"])
    ]
    expected = serve(make_runner(), requests, 1)[0]

    def serve_with_fault(num_decode_steps):
        runner = make_runner()
        sample = runner.sampler.sample

        def poisoned(logits, rows, positions, *rest):
            logits[torch.from_numpy((rows == 0) & (positions == 9))] = torch.nan
            return sample(logits, rows, positions, *rest)

        monkeypatch.setattr(runner.sampler, "sample", poisoned)
        return serve(runner, requests, num_decode_steps)

    tokens, ends, steps = serve_with_fault(8)
    assert max(steps) > 1
    assert (tokens, ends) == serve_with_fault(1)[:2]
    assert tokens["a", 0] == expected["a", 0][:6]
    assert tokens["b", 0] == expected["b", 0]
    assert ends["a", 0] == (FinishReason.ERROR, "the model's logits are not finite numbers")
