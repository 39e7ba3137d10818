"""The first token of a prompt that differs from an earlier one, against a search token by token."""

import random
from types import SimpleNamespace

import pytest

from engine_core.scheduler.report.prompt_changes import PromptChanges
from engine_core.scheduler.request import Request
from protocol.pooling import POOLING_SAMPLING, PoolingParams, PoolingTask
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

SYSTEM, TURN = list(range(1000, 1037)), list(range(2000, 2500))


class Prompts:
    """Finished requests, by their numbers, and what is said of them."""

    def __init__(self):
        self.pool = SimpleNamespace(by_id={})
        self.changes = PromptChanges(self.pool)
        self.num = 0

    def request(self, tokens, client_index=0, **fields):
        self.num += 1
        fields.setdefault("sampling_params", SamplingParams(max_tokens=1))
        message = EngineRequest(request_id=str(self.num), prompt_token_ids=tokens, **fields)
        return Request(message, client_index=client_index)

    def of(self, tokens, *, is_live=False, **fields):
        request = self.request(tokens, **fields)
        if is_live:
            self.pool.by_id = {request.request_id: request}
        else:
            self.changes.on_finish(request, None, 0.0)
        return self.changes.of(request.request_id)


@pytest.mark.parametrize("is_live", [False, True])
def test_a_clock_in_the_system_text_is_found_with_what_stands_around_it(is_live):
    prompts = Prompts()
    assert prompts.of([*SYSTEM, 5, 6, *TURN]) is None
    change = prompts.of([*SYSTEM, 7, *TURN, 1, 2, 3], is_live=is_live)
    assert (change.position, change.before) == (37, SYSTEM[-24:])
    assert (change.was[:3], change.now[:2]) == ([5, 6, TURN[0]], [7, TURN[0]])
    assert 500 - 16 <= change.num_same <= 500


def test_a_conversation_that_goes_on_and_another_one_get_no_advice():
    prompts = Prompts()
    prompts.of([*SYSTEM, *TURN])
    assert prompts.of([*SYSTEM, *TURN, 1, 2, 3]) is None
    assert prompts.of([*SYSTEM, *TURN]) is None, "the same again"
    assert prompts.of([*SYSTEM, *range(4000, 4500)]) is None
    assert prompts.of([9, *range(4000, 4500)]).position == 0, "or all of it but the first token"


@pytest.mark.parametrize(
    "fields",
    [{"tenant": "ann"}, {"cache_salt": "s"}, {"adapter": "a"}, {"client_index": 1}],
    ids=str,
)
def test_prompts_of_other_callers_are_not_compared(fields):
    prompts = Prompts()
    prompts.of([*SYSTEM, 5, *TURN])
    assert prompts.of([*SYSTEM, 6, *TURN], **fields) is None
    assert prompts.of([*SYSTEM, 7, *TURN], **fields).was[0] == 6


def test_the_most_similar_one_is_meant_and_of_equal_ones_the_last():
    prompts = Prompts()
    for tokens in ([*SYSTEM, 5, *TURN], [8, *SYSTEM, *TURN], [*SYSTEM, 6, *TURN], TURN):
        prompts.of(tokens)
    change = prompts.of([*SYSTEM, 7, *TURN])
    assert (change.position, change.was[0]) == (37, 6)


def test_random_edits_are_found_where_a_search_finds_them():
    draw = random.Random(7)
    for _ in range(40):
        before = [draw.randrange(50_000) for _ in range(draw.randrange(200, 700))]
        start, length = draw.randrange(100), draw.randrange(1, 40)
        now = [*before[:start], *(draw.randrange(50_000) for _ in range(draw.randrange(40)))]
        now += before[start + length :]
        prompts = Prompts()
        prompts.of(before)
        change = prompts.of(now)
        pairs = enumerate(zip(before, now, strict=False))
        first = next((at for at, (one, other) in pairs if one != other), None)
        assert change.position == first
        left = len(before) - start - length
        assert left - 16 - length <= change.num_same <= left + length
        assert before[-change.num_same :] == now[-change.num_same :]


def test_what_is_kept_is_bounded_and_pooled_prompts_are_not():
    prompts = Prompts()
    kept = prompts.request([*SYSTEM, 5, *TURN])
    prompts.changes.on_finish(kept, None, 0.0)
    pooling = PoolingParams(task=PoolingTask.EMBED)
    given = {"pooling_params": pooling, "sampling_params": POOLING_SAMPLING}
    assert prompts.of([*SYSTEM, 6, *TURN], **given) is None
    prompts.of([1] * 2**19)
    assert prompts.of([*SYSTEM, 7, *TURN]).was[0] == 5
    prompts.of([2] * (2**19 - 400))
    assert prompts.of([*SYSTEM, 8, *TURN], is_live=True).was[0] == 7, "the oldest are dropped"
    for number in range(64):
        prompts.of([number + 1])
    assert prompts.of([*SYSTEM, 9, *TURN], is_live=True) is None
