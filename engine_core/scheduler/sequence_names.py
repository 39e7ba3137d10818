"""How sequences are called on the way to the runner and to clients. Names only."""

import msgspec

from engine_core.scheduler.batch_state import BatchState, Int32Array
from engine_core.scheduler.sequence import Sequence
from protocol.sampling import SamplingParams, sequence_seed


class SequenceNames:
    """Lists of names for rows. The same rows give the same list again, at the cost of a look-up:
    from step to step the batch mostly stays. The lists must not be changed.

    Args:
        of_requests: name each row by its request, not by its sequence.
    """

    def __init__(self, rows: BatchState, *, of_requests: bool = False) -> None:
        self._rows = rows
        self._of_requests = of_requests
        self._key: tuple[int, bytes] | None = None
        self._names: list[str] = []

    def of(self, rows: Int32Array) -> list[str]:
        """A name for each of these rows, all of them in use."""
        key = (self._rows.version, rows.tobytes())
        if key != self._key:
            sequences = [self._rows.sequences[row] for row in rows.tolist()]
            if self._of_requests:
                self._names = [seq.request.request_id for seq in sequences if seq is not None]
            else:
                self._names = [seq.sequence_id for seq in sequences if seq is not None]
            assert len(self._names) == len(rows)
            self._key = key
        return self._names


def sampling_params_of(sequence: Sequence) -> SamplingParams:
    """The request's, with what differs from sequence to sequence: the seed; and of a beam, that the
    likeliest tokens are reported."""
    request = sequence.request
    params = request.sampling_params
    if request.beam_search is not None:
        return msgspec.structs.replace(
            params, temperature=0.0, logprobs=request.beam_search.num_candidates, min_tokens=0
        )
    if sequence.index == 0 or params.seed is None:
        return params
    return msgspec.structs.replace(params, seed=sequence_seed(params.seed, sequence.index))
