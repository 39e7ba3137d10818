"""Sequences that follow a grammar, on the CPU's runner: among others, preempted, with drafts."""

import random

import pytest
from drafting_loop import DraftingLoop
from engine_loop import EngineLoop, few_blocks
from made_up_grammar import MadeUpGrammar, is_led
from same_answers import V
from test_drafts import lives, run, scheduler_for


def without_limits(requests):
    """Tokens that are allowed or forbidden otherwise might leave none."""
    return [
        each for each in requests if each[2].allowed_token_ids is None and not each[2].min_tokens
    ]


@pytest.mark.parametrize(("ops", "seed"), [("native", 0), ("torch", 1)], indirect=["ops"])
def test_every_token_is_of_the_grammar_and_drafts_change_none(make_runner, reference, ops, seed):
    requests = without_limits(lives(random.Random(seed), 24))
    blocks = few_blocks(reference)
    runner, grammar = make_runner(**blocks), MadeUpGrammar(V)
    scheduler = grammar.lead(scheduler_for(runner, blocks, swap=seed % 2 == 1))
    plain = run(EngineLoop(scheduler, runner, depth=1), requests, seed=seed)
    assert grammar.follows(requests, plain.tokens)
    runner, grammar = make_runner(**blocks), MadeUpGrammar(V)
    drafting = DraftingLoop(
        grammar.lead(scheduler_for(runner, blocks)),
        runner,
        depth=1,
        answers=plain.tokens,
        vocab_size=V,
        seed=seed,
    )
    run(drafting, requests, seed=seed + 1)
    assert drafting.tokens == plain.tokens
    assert drafting.logprobs == plain.logprobs
    assert drafting.num_drafted > drafting.num_accepted > 50


@pytest.mark.parametrize("ops", ["native"], indirect=True)
@pytest.mark.parametrize("reference", ["one group"], indirect=True)
def test_forced_tokens_are_drafts_that_are_always_right(make_runner, reference):
    requests = [each for each in without_limits(lives(random.Random(5), 24)) if is_led(each[0])]
    blocks = few_blocks(reference)
    tokens, num_steps = [], []
    for drafts_forced in (False, True):
        grammar = MadeUpGrammar(V, drafts_forced=drafts_forced)
        runner = make_runner(**blocks)
        scheduler = grammar.lead(scheduler_for(runner, blocks))
        loop = run(EngineLoop(scheduler, runner, depth=1), requests, seed=1)
        tokens.append(loop.tokens)
        num_steps.append(scheduler.statistics().num_steps)
    assert tokens[0] == tokens[1]
    assert grammar.num_forced > 10
    assert num_steps[1] < num_steps[0]
