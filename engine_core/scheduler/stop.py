"""When a sequence is over: end-of-sequence and stop tokens, and the limits of its length."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from engine_core.scheduler.batch_state import BoolArray, Int32Array
from engine_core.scheduler.request import Request, RequestStatus, Sequence
from protocol.sampling import RepetitionDetection


def append_until_stop(sequence: Sequence, token_ids: list[int], max_model_len: int) -> list[int]:
    """Append sampled tokens up to and including the one that ends the sequence, which sets `status`
    and `stop_reason`. Returns the tokens that were appended."""
    for count, token_id in enumerate(token_ids, start=1):
        sequence.append_output_token(token_id)
        if check_stop(sequence, max_model_len):
            return token_ids[:count]
    return token_ids


def check_stop(sequence: Sequence, max_model_len: int) -> bool:
    """Whether the last output token ends the sequence; sets `status` and `stop_reason` if so.

    End-of-sequence comes before stop tokens, both before the limits, and both count only from
    `min_tokens` on; so does repetition, which comes last."""
    request = sequence.request
    params = request.sampling_params
    num_tokens = sequence.num_tokens
    num_output_tokens = num_tokens - request.num_prompt_tokens
    if num_output_tokens and num_output_tokens >= params.min_tokens:
        last = sequence.last_token_id
        if last in request.eos_token_ids and not params.ignore_eos:
            sequence.status = RequestStatus.FINISHED_STOPPED
            return True
        if last in params.stop_token_ids:
            sequence.status = RequestStatus.FINISHED_STOPPED
            sequence.stop_reason = last
            return True
    if num_output_tokens >= params.max_tokens or num_tokens >= max_model_len:
        sequence.status = RequestStatus.FINISHED_LENGTH
        return True
    detection = params.repetition_detection
    if detection is None or num_output_tokens < params.min_tokens:
        return False
    if repeats_itself(sequence.known_tokens()[request.num_prompt_tokens :], detection):
        sequence.status = RequestStatus.FINISHED_REPETITION
        sequence.stop_reason = "repetition_detected"
        return True
    return False


def repeats_itself(token_ids: Int32Array, detection: RepetitionDetection) -> bool:
    """Whether they end in a pattern of an allowed size, as often as it says in a row.

    a b | x y z x y z x y z    size 3, 3 times: each of the last 6 is the one 3 before it
    """
    number, count = len(token_ids), detection.min_count
    longest = min(detection.max_pattern_size, number // count)
    sizes = np.arange(detection.min_pattern_size, longest + 1)
    if not len(sizes):
        return False
    # few patterns have the last token again at their end
    for size in sizes[token_ids[-1 - sizes] == token_ids[-1]].tolist():
        start = number - size * (count - 1)
        if np.array_equal(token_ids[start:], token_ids[start - size : number - size]):
            return True
    return False


def stop_token_ids(request: Request) -> list[int]:
    """Every token that may end a sequence of the request."""
    params = request.sampling_params
    if params.ignore_eos:
        return [*params.stop_token_ids]
    return [*request.eos_token_ids, *params.stop_token_ids]


class StopTokens:
    """The union of the stop tokens of all running sequences, as a table: one look for a whole
    step's tokens. Which sequence stops is then checked one by one (`check_stop`)."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._table: BoolArray = np.zeros(1, np.bool_)

    @property
    def is_empty(self) -> bool:
        return not self._counts

    def add(self, token_ids: Iterable[int]) -> None:
        """One more sequence stops at each of these."""
        for token_id in token_ids:
            self._counts[token_id] += 1
            if token_id + 1 >= len(self._table):
                # the last entry stands for all ids beyond the table, and is false
                table = np.zeros(2 * token_id + 2, np.bool_)
                table[: len(self._table)] = self._table
                self._table = table
            self._table[token_id] = True

    def remove(self, token_ids: Iterable[int]) -> None:
        """One sequence less stops at each of these."""
        for token_id in token_ids:
            self._counts[token_id] -= 1
            if not self._counts[token_id]:
                del self._counts[token_id]
                self._table[token_id] = False

    def may_stop(self, token_ids: Int32Array) -> BoolArray:
        """Whether each token may end a sequence."""
        return self._table[np.minimum(token_ids, len(self._table) - 1)]
