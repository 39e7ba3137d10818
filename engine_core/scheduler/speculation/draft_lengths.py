"""How many drafts each sequence gets: as many as are worth what it costs to verify them.

With a the probability that a draft is accepted behind accepted ones, n sequences in the step and

    T(n + d)   seconds of a step that verifies d drafts, by the cost model
    price      (T(n + d) - T(n)) / d, in tokens: times the tokens a second that the step brings

the j-th draft of a sequence brings a^j tokens and costs `price`, so it gets
k = floor(log(price) / log(a)) of them. Copied text comes in runs: a sequence begins with two, has
twice as many as long as all are accepted, and otherwise one more than were accepted."""

import numpy as np

from engine_core.scheduler.batch_state import BatchState, Int64Array
from engine_core.scheduler.token_budget.base import Float64Array, StepLoad
from engine_core.scheduler.token_budget.cost_model import CostModel

_DECAY = 0.95
"""Weight of what a sequence's drafts said before, with each step that verifies some of them."""
_COMMON_DECAY = 0.995
"""Weight of what all sequences' drafts said before, with each sequence that had some verified."""
_PRIOR_WEIGHT = 1.0
"""Drafts that a new sequence is believed to have had, at the common rate."""
_MOST_BELIEVED = 0.7
"""Most of the common rate that is believed: behind many copies a first chat may come."""
_FIRST_PRICE = 0.3
"""Price of a draft until steps with drafts were timed at this number of sequences."""
_FIRST_DRAFTS = 2
_LEAST_PRICE = 0.03
"""Least price of a draft: it costs the host something too."""
_PRICE_OF_ANY = 0.15
"""Price of having drafts, for each of a step's sequences: they are no columns any more."""
_ASK_AFTER = 8
"""Tokens for which an answer holds, if no draft is verified: to find one takes time, too."""
_MEASURE_AFTER = 128
"""Steps between two with a draft while all are dearer than what they could bring."""
_OBSERVE_ALL, _OBSERVE_EACH = 16, 8
"""The first steps without drafts are all looked at, of the later ones each eighth."""
_PROBE_AFTER = 32
_PROBE_AT_MOST = 1024
"""Tokens between two drafts of a sequence for which none are worth their price."""


class DraftLengths:
    """
    Args:
        batch: rows of the sequences.
        most: drafts of a sequence in a step.
        slo_tpot_s: no step gets drafts with which it would take longer; None: no limit.
        num_plain_steps: that are timed before any gets drafts, at each number of sequences.
    """

    def __init__(
        self, batch: BatchState, *, most: int, slo_tpot_s: float | None, num_plain_steps: int = 0
    ) -> None:
        self._batch = batch
        self._most = most
        self._slo_tpot_s = slo_tpot_s
        self._num_plain_steps = num_plain_steps
        num_rows = batch.max_num_rows
        self._generation: Int64Array = np.full(num_rows, -1, np.int64)
        self._accepted: Float64Array = np.zeros(num_rows)
        self._rejected: Float64Array = np.zeros(num_rows)
        self._next_probe: Int64Array = np.zeros(num_rows, np.int64)
        """Length of the sequence from which on it gets a draft though none is worth its price."""
        self._probe_after: Int64Array = np.zeros(num_rows, np.int64)
        self._ask_at: Int64Array = np.zeros(num_rows, np.int64)
        """Length of the sequence below which it is given what it was given last."""
        self._given: Int64Array = np.zeros(num_rows, np.int64)
        self._size_class = 0
        """Bit length of the number of sequences of the batch for which lengths were last found."""
        self._rate: Float64Array = np.zeros(num_rows)
        """Rates at which drafts were last taken to be accepted; 1 where one is a probe."""
        self._price = 0.0
        self._longest: Int64Array = np.full(num_rows, _FIRST_DRAFTS, np.int64)
        """Drafts that a sequence may have next."""
        self._common = [2.0, 2.0]
        """Accepted and rejected drafts of all sequences, the latest weigh most."""
        self._measure_at: dict[int, int] = {}
        """By bit length of the number of sequences, the step from which on one gets a draft
        although drafts are too dear."""
        self._num_steps = 0
        self._costs: dict[int, CostModel] = {}
        """Cost models of steps, by bit length of the number of sequences."""

    # ------------------------------------------------------------------ what steps tell

    def counts_step(self, num_sequences: int, num_drafts: int) -> bool:
        """Counts a step that computed the last token of each sequence, and drafts. Returns whether
        `observe_step` is to hear of it: most steps have no drafts, and some of them say enough."""
        size_class = num_sequences.bit_length()
        self._num_steps += 1
        if num_drafts:
            self._measure_at.pop(size_class, None)
            return True
        cost = self._costs.get(size_class)
        num_plain = 0 if cost is None else cost.num_observed - cost.num_observed_with_chunks
        return num_plain < _OBSERVE_ALL or self._num_steps % _OBSERVE_EACH == 0

    def observe_step(self, load: StepLoad, duration_s: float) -> None:
        """A step that `counts_step` asked for took that long."""
        size_class = load.num_sequences.bit_length()
        self._costs.setdefault(size_class, CostModel()).observe(load, duration_s)

    def observe_drafts(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """A sequence's drafts were verified. Those behind the first rejection were not tested."""
        self._claim(np.array([row]))
        is_rejected = num_accepted < num_drafts
        self._accepted[row] = _DECAY * self._accepted[row] + num_accepted
        self._rejected[row] = _DECAY * self._rejected[row] + is_rejected
        self._common[0] = _COMMON_DECAY * self._common[0] + num_accepted
        self._common[1] = _COMMON_DECAY * self._common[1] + is_rejected
        next_longest = num_accepted + 1 if is_rejected else 2 * num_drafts
        self._longest[row] = max(next_longest, self._longest[row] * (not is_rejected))
        if num_accepted:
            self._probe_after[row] = _PROBE_AFTER
        else:
            self._probe_after[row] = min(2 * self._probe_after[row], _PROBE_AT_MOST)
        self._next_probe[row] = self._batch.num_tokens[row] + self._probe_after[row]
        self._ask_at[row] = 0

    # ------------------------------------------------------------------ what the next one gets

    def choose(self, rows: Int64Array, order: Int64Array) -> Int64Array:
        """Most drafts for each of these rows. `order`: all rows of the next step."""
        batch, num_sequences = self._batch, len(order)
        size_class = num_sequences.bit_length()
        num_tokens = batch.num_tokens[rows]
        is_due = num_tokens >= self._ask_at[rows]
        is_due |= self._generation[rows] != batch.generation[rows]
        is_limited = self._slo_tpot_s is not None
        if is_limited or size_class != self._size_class or np.count_nonzero(is_due):
            self._claim(rows)
            self._size_class = size_class
            num_context = int(batch.num_tokens[order].sum())
            self._given[rows] = self._worth(rows, num_sequences, num_context)
            self._ask_at[rows] = num_tokens + _ASK_AFTER
        return self._given[rows]

    def are_worth_a_step(self, rows: Int64Array, counts: Int64Array, num_sequences: int) -> bool:
        """Whether so many drafts of these rows bring more than they cost, also the host."""
        rate = np.minimum(self._rate[rows], 1 - 1e-9)
        gain = (rate * (1 - rate**counts) / (1 - rate) - self._price * counts).sum()
        return bool(gain >= _PRICE_OF_ANY * num_sequences or (self._rate[rows] == 1).any())

    def _worth(self, rows: Int64Array, num_sequences: int, num_context: int) -> Int64Array:
        size_class = num_sequences.bit_length()
        cost = self._costs.get(size_class)
        num_plain = 0 if cost is None else cost.num_observed - cost.num_observed_with_chunks
        if num_plain < self._num_plain_steps:
            return np.zeros(len(rows), np.int64)
        most, together = self._most, self._most * len(rows)
        plain = StepLoad(num_sequences, num_sequences, num_context, num_context)
        if cost is None or cost.num_observed_with_chunks < 2 or cost.num_observed < 4:
            if self._slo_tpot_s is not None:
                return self._one(rows)
            price, most = _FIRST_PRICE, min(most, _FIRST_DRAFTS)
        else:
            plain_s = cost.predict(plain)
            drafted = StepLoad(num_sequences + most, num_sequences, num_context, num_context)
            draft_s = (cost.predict(drafted) - plain_s) / most
            price = max(_LEAST_PRICE, draft_s * num_sequences / max(plain_s, 1e-9))
            if self._slo_tpot_s is not None:
                left_s = self._slo_tpot_s - plain_s
                together = int(max(0.0, left_s) / max(draft_s, 1e-9))
                together = min(together, 2 * cost.most_chunk_tokens)  # beyond it was not measured
        if together < 1 or price >= 1:
            return self._measure_again(rows, together, size_class)
        self._measure_at.pop(size_class, None)
        accepted, rejected = self._accepted[rows], self._rejected[rows]
        common = min(_MOST_BELIEVED, self._common[0] / (self._common[0] + self._common[1]))
        rate = (accepted + _PRIOR_WEIGHT * common) / (accepted + rejected + _PRIOR_WEIGHT)
        lengths = self._lengths(rate, price, most)
        # drafts that are accepted make a second worth more tokens
        gain = 1 + (rate * (1 - rate**lengths) / (1 - rate)).mean()
        spent = 1 + price * lengths.sum() / num_sequences
        if gain > spent:
            lengths = self._lengths(rate, price * gain / spent, most)
        np.minimum(lengths, self._longest[rows], out=lengths)
        is_probe = (lengths == 0) & (self._batch.num_tokens[rows] >= self._next_probe[rows])
        lengths[is_probe] = 1
        if self._slo_tpot_s is not None:
            before = np.cumsum(lengths) - lengths
            np.minimum(lengths, np.maximum(together - before, 0), out=lengths)
        self._price, self._rate[rows] = price, np.where(is_probe, 1.0, rate)
        return lengths

    def _measure_again(self, rows: Int64Array, together: int, size_class: int) -> Int64Array:
        """Drafts are too dear, as far as was measured: of the newest sequence one, now and then."""
        measure_at = self._measure_at.setdefault(size_class, self._num_steps + _MEASURE_AFTER)
        if together and self._num_steps >= measure_at:
            return self._one(rows)
        return np.zeros(len(rows), np.int64)

    def _one(self, rows: Int64Array) -> Int64Array:
        """One draft for the newest sequence, to measure what it costs."""
        lengths = np.zeros(len(rows), np.int64)
        lengths[-1] = self._rate[rows[-1]] = 1
        return lengths

    @staticmethod
    def _lengths(rate: Float64Array, price: float, most: int) -> Int64Array:
        if price >= 1:
            return np.zeros(len(rate), np.int64)
        lengths: Int64Array = np.minimum(np.log(price) / np.log(rate), most).astype(np.int64)
        return lengths

    def _claim(self, rows: Int64Array) -> None:
        """Rows that another sequence had begin anew."""
        generation = self._batch.generation[rows]
        if (self._generation[rows] == generation).all():
            return
        new = rows[self._generation[rows] != generation]
        self._generation[rows] = generation
        self._accepted[new] = self._rejected[new] = 0.0
        self._next_probe[new] = self._ask_at[new] = 0
        self._longest[new] = _FIRST_DRAFTS
        self._probe_after[new] = _PROBE_AFTER
