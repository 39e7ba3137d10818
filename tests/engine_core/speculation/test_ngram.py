"""Look-up in a sequence's own tokens, against its definition read plainly."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine_core.speculation.ngram import NgramProposer, follow, longest_match

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def plain_match(tokens, smallest, largest):
    for length in range(min(largest, len(tokens) - 1), smallest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                return length, end
    return 0, 0


@given(TOKENS, st.integers(1, 4), st.integers(0, 4))
def test_the_longest_ngram_is_found_where_it_was_last(tokens, smallest, more):
    found = longest_match(np.array(tokens, np.int32), smallest=smallest, largest=smallest + more)
    assert found == plain_match(tokens, smallest, smallest + more)


def test_drafts_are_what_followed_and_a_period_goes_on():
    propose = NgramProposer(smallest=2, largest=5).propose
    assert propose(np.array([1, 2, 3, 4, 9, 1, 2], np.int32), None, 3) == [3, 4, 9]
    assert propose(np.array([1, 2, 3, 1, 2, 3, 1, 2], np.int32), None, 7) == [3, 1, 2, 3, 1, 2, 3]
    assert propose(np.array([8, 2, 3, 4, 9, 1, 2], np.int32), None, 3) == []
    assert follow(np.array([5, 6], np.int32), 1, 3) == [6, 6, 6]
