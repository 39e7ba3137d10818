"""The operator's logits processors over real runners: tokens are those of the reference, and a
processor that fails ends its request alone."""

import random

import pytest
import torch
from drafting_loop import DraftingLoop
from engine_loop import EngineLoop, few_blocks, make_scheduler
from made_up_processors import Fails, NoRepeatedPair
from same_answers import V

from engine_core.logits_processors import NamedProcessor, ServedVocabulary
from protocol.outputs import FinishReason
from protocol.sampling import SamplingParams

pytestmark = [
    pytest.mark.parametrize("reference", ["one group"], indirect=True),
    pytest.mark.parametrize("ops", ["native"], indirect=True),
]
VOCABULARY = ServedVocabulary(V, (7,), None)


def named(*kinds):
    return tuple(NamedProcessor(kind.__name__, kind(VOCABULARY)) for kind in kinds)


def requests(number=8):
    """Greedy and sampled; all but each fourth may not repeat a pair."""
    draw = random.Random(1)
    for at in range(number):
        params = SamplingParams(
            max_tokens=24,
            temperature=0.0 if at % 2 else 0.5,
            seed=at,
            ignore_eos=True,
            logprobs=0 if at == 5 else None,
            extra_args=None if at % 4 == 2 else '{"no_repeated_pair": true}',
        )
        yield f"r{at}", [draw.randrange(8, V) for _ in range(draw.randint(2, 20))], params


def serve(runner, wanted, *, loop=EngineLoop, swap=False, num_decode_steps=1, **options):
    scheduler = make_scheduler(
        runner.config.layout,
        num_blocks=runner.config.num_blocks,
        num_host_blocks=runner.config.num_host_blocks,
        swap=swap,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_model_len=64,
        num_decode_steps=num_decode_steps,
        num_lookahead_slots=num_decode_steps - 1,
    )
    engine = loop(scheduler, runner, depth=1, **options)
    engine.failures = {}
    collect = runner.collect

    def collected():
        output = collect()
        engine.failures |= output.failures
        return output

    runner.collect = collected
    for name, prompt, params in wanted:
        engine.add(name, prompt, params, num_sequences=2 if name == "r4" else 1)
    engine.finish()
    return engine


def test_tokens_are_those_of_transformers_alone_and_in_any_batch_and_with_drafts(
    make_runner, reference
):
    wanted = list(requests())
    processors = named(NoRepeatedPair)
    blocks = {"num_blocks": 150, "num_host_blocks": 60}

    def runner(**options):
        return make_runner(logits_processors=processors, **{**blocks, **options})

    plain = serve(runner(), wanted)
    for name, prompt, params in wanted:
        if not params.is_greedy:
            continue
        answer = reference.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=24,
            min_new_tokens=24,
            no_repeat_ngram_size=2 if params.extra_args else 0,
            suppress_tokens=[],
            eos_token_id=None,
        )
        assert plain.tokens[name, 0] == answer[0, len(prompt) :].tolist()
    without = serve(make_runner(**blocks), [(*each[:2], each[2]) for each in wanted])
    changed = {place for place in plain.tokens if plain.tokens[place] != without.tokens[place]}
    assert changed and not {place for place in changed if place[0] in ("r2", "r6")}
    alone = [serve(runner(), [each]).tokens for each in wanted]
    assert {place: ids for each in alone for place, ids in each.items()} == plain.tokens
    for swap in (False, True):  # and preempted
        again = serve(runner(**few_blocks(reference)), wanted, swap=swap)
        assert again.tokens == plain.tokens
    assert serve(runner(), wanted, num_decode_steps=4).tokens == plain.tokens
    drafts = {"answers": plain.tokens, "vocab_size": V, "seed": 3}
    processors[0].processor.num_rows.clear()
    drafting = serve(
        runner(**few_blocks(reference)), wanted, swap=True, loop=DraftingLoop, **drafts
    )
    assert drafting.tokens == plain.tokens
    assert drafting.num_drafted > drafting.num_accepted > 20
    assert max(processors[0].processor.num_rows) > 8  # some of one sequence


def test_a_processor_runs_beside_requests_with_rules_of_their_own(make_runner):
    own = SamplingParams(max_tokens=6, seed=1, logit_bias={9: 3.0}, frequency_penalty=1.0)
    led = SamplingParams(max_tokens=6, seed=1, extra_args='{"no_repeated_pair": true}')
    wanted = [("own", [9, 8], own), ("led", [9, 8], led)]
    both = serve(make_runner(logits_processors=named(NoRepeatedPair)), wanted).tokens
    for each in wanted:
        alone = serve(make_runner(logits_processors=named(NoRepeatedPair)), [each])
        assert alone.tokens[each[0], 0] == both[each[0], 0]


@pytest.mark.parametrize("loop", [EngineLoop, DraftingLoop])
def test_a_processor_that_raises_ends_its_requests_alone(make_runner, loop, caplog):
    params = [
        SamplingParams(max_tokens=9, seed=at, extra_args=extra_args)
        for at, extra_args in enumerate(
            [None, '{"fails_at": 4}', '{"fails_at": -1}', '{"fails_at": 99}', '{"fails_at": -3}']
        )
    ]
    wanted = [(f"r{at}", [9, 8, 7 + at], each) for at, each in enumerate(params)]
    plain = serve(make_runner(), wanted).tokens
    options = {} if loop is EngineLoop else {"answers": plain, "vocab_size": V, "seed": 3}
    engine = serve(make_runner(logits_processors=named(Fails)), wanted, loop=loop, **options)
    failed = {name for (name, _), end in engine.ends.items() if end is FinishReason.ERROR}
    assert failed == engine.failures.keys() == {"r1", "r2", "r4"}
    assert engine.tokens["r0", 0] == plain["r0", 0]
    assert engine.tokens["r3", 0] == plain["r3", 0]
    assert engine.tokens["r1", 0] == plain["r1", 0][:4]
    assert "logits processor Fails failed: ZeroDivisionError: too long" in engine.failures["r1"]
    assert "logits processor Fails failed: RuntimeError: no such row" in engine.failures["r2"]
    assert "apply must return logits of the shape" in engine.failures["r4"]
    assert sum(record.levelname == "ERROR" for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("value", "why"), [(-torch.inf, "logits processors leave none"), (torch.nan, "infinite")]
)
def test_logits_that_are_no_numbers_or_leave_no_token_end_the_request(make_runner, value, why):
    class Spoils(NoRepeatedPair):
        def apply(self, logits, rows, output_token_ids):
            logits[:, 3] = value
            return logits if value != value else logits.fill_(value)

    given = SamplingParams(max_tokens=3, seed=1, extra_args='{"no_repeated_pair": true}')
    wanted = [("spoiled", [9, 8], given), ("other", [9, 8], SamplingParams(max_tokens=3, seed=1))]
    engine = serve(make_runner(logits_processors=named(Spoils)), wanted)
    assert engine.failures.keys() == {"spoiled"} and why in engine.failures["spoiled"]
    assert engine.tokens["other", 0] == serve(make_runner(), wanted).tokens["other", 0]
