"""Look-up in earlier outputs: what is found, what is never shared, what is dropped."""

import numpy as np

from engine_core.speculation import suffix
from engine_core.speculation.suffix import SuffixProposer


def tokens(*ids):
    return np.array(ids, np.int32)


def test_earlier_outputs_are_found_by_the_longest_match_and_give_as_many_tokens():
    proposer = SuffixProposer()
    proposer.learn([1, 2, 3, 4, 5, 6, 7], "a")
    proposer.learn([9, 2, 3, 8, 8], "a")
    assert proposer.propose(tokens(1, 2, 3), "a", 8) == [4, 5, 6]
    assert proposer.propose(tokens(9, 2, 3), "a", 8) == [8, 8]  # no further than its output
    assert proposer.propose(tokens(0, 2, 3), "a", 8) == [8, 8]  # of equals the last
    assert proposer.propose(tokens(0, 2, 3), "a", 1) == [8]
    assert proposer.propose(tokens(0, 3), "a", 8) == []
    assert proposer.propose(tokens(7), "a", 8) == []


def test_its_own_tokens_win_with_a_match_that_is_as_long():
    proposer = SuffixProposer()
    proposer.learn([0, 1, 2, 3, 4], "a")
    assert proposer.propose(tokens(1, 2, 3, 7, 1, 2, 3), "a", 8) == [7, 1, 2]
    assert proposer.propose(tokens(1, 2, 3, 7, 0, 1, 2, 3), "a", 8) == [4]


def test_two_tokens_of_its_own_say_too_little():
    assert SuffixProposer().propose(tokens(2, 3, 7, 2, 3), "a", 8) == []


def test_nothing_is_shared_between_scopes():
    proposer = SuffixProposer()
    proposer.learn([1, 2, 3, 4], ("salt", None))
    for scope in ((None, None), ("other", None), ("salt", "adapter")):
        assert proposer.propose(tokens(1, 2, 3), scope, 8) == []
    assert proposer.propose(tokens(1, 2, 3), ("salt", None), 8) == [4]


def test_memory_is_bounded_and_the_scopes_used_last_stay(monkeypatch):
    monkeypatch.setattr(suffix, "_GENERATION_TOKENS", 100)
    monkeypatch.setattr(suffix, "_MOST_TOKENS", 400)
    proposer = SuffixProposer()
    for number in range(200):
        scope = number % 7
        proposer.learn([1000 * number + at for at in range(10 + number % 60)], scope)
        held = sum(len(each.tokens) for each in proposer.generations.values())
        assert held == proposer.num_tokens <= 400
        assert {scope for scope, _ in proposer.generations} == set(proposer.newest)
    last = [1000 * 199 + at for at in range(3)]
    assert proposer.propose(tokens(*last), 199 % 7, 2) == [199003, 199004]
    assert proposer.propose(tokens(0, 1, 2), 0, 2) == []  # learnt first, dropped long ago


def test_an_output_longer_than_all_that_is_kept_leaves_its_end(monkeypatch):
    monkeypatch.setattr(suffix, "_MOST_OUTPUT", 50)
    proposer = SuffixProposer()
    proposer.learn(list(range(500)), "a")
    assert proposer.num_tokens == 51
    assert proposer.propose(tokens(480, 481), "a", 2) == [482, 483]
    assert proposer.propose(tokens(30, 31), "a", 2) == []
