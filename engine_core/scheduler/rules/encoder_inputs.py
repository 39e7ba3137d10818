"""Which images and sounds are encoded in a step, and whose outputs a model runner keeps. Sizes are
counted in rows of an encoder's output, of which each takes the place of one prompt token."""

import dataclasses
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from engine_core.scheduler.batch_state import Int32Array, Int64Array
from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.in_flight import InFlightStep
from engine_core.scheduler.part import SchedulerPart
from engine_core.scheduler.plan import SchedulerOutput
from engine_core.scheduler.report.explanations import Explanations
from engine_core.scheduler.request import Request, Sequence
from engine_core.scheduler.request_pool import RequestPool
from protocol.explanations import WaitReason


class EncoderCache:
    """Outputs by their inputs' identifiers. What no sequence needs any more stays until its room is
    wanted, and is evicted the oldest first.

        |-- needed by sequences --|-- evictable --|-- empty --|
        0                                              capacity"""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._num_rows: dict[bytes, int] = {}
        self._references: dict[bytes, int] = {}
        """References of each output that is needed, by identifier."""
        self._evictable: OrderedDict[bytes, None] = OrderedDict()
        """Identifiers of outputs that may be evicted, the oldest first."""
        self._num_empty = capacity
        self._num_evictable_rows = 0
        self.evicted: list[bytes] = []
        """Identifiers of outputs evicted since they were last taken from here."""

    def __contains__(self, identifier: bytes) -> bool:
        return identifier in self._num_rows

    def is_needed(self, identifier: bytes) -> bool:
        return identifier in self._references

    @property
    def num_available(self) -> int:
        """Rows that are empty or evictable."""
        return self._num_empty + self._num_evictable_rows

    @property
    def num_kept(self) -> int:
        return self.capacity - self._num_empty

    def acquire(self, identifier: bytes, num_rows: int) -> bool:
        """One more reference. Returns whether it is new, and to be encoded. There must be room."""
        is_new = identifier not in self._num_rows
        if is_new:
            while self._num_empty < num_rows:
                self._evict(next(iter(self._evictable)))
            self._num_rows[identifier] = num_rows
            self._num_empty -= num_rows
        elif identifier in self._evictable:
            del self._evictable[identifier]
            self._num_evictable_rows -= num_rows
        self._references[identifier] = self._references.get(identifier, 0) + 1
        return is_new

    def release(self, identifier: bytes) -> None:
        """One reference less."""
        self._references[identifier] -= 1
        if not self._references[identifier]:
            del self._references[identifier]
            self._evictable[identifier] = None
            self._num_evictable_rows += self._num_rows[identifier]

    def evict_all(self) -> None:
        """No sequence needs any."""
        assert not self._references
        for identifier in list(self._evictable):
            self._evict(identifier)

    def _evict(self, identifier: bytes) -> None:
        del self._evictable[identifier]
        num_rows = self._num_rows.pop(identifier)
        self._num_evictable_rows -= num_rows
        self._num_empty += num_rows
        self.evicted.append(identifier)

    def check(self) -> None:
        """Assert that each output is needed or evictable, and that the rows add up."""
        assert self._num_rows.keys() == self._references.keys() | self._evictable.keys()
        assert not self._references.keys() & self._evictable.keys()
        assert all(count > 0 for count in self._references.values())
        num_evictable = sum(self._num_rows[each] for each in self._evictable)
        assert num_evictable == self._num_evictable_rows
        assert sum(self._num_rows.values()) + self._num_empty == self.capacity
        assert self._num_empty >= 0


@dataclasses.dataclass(frozen=True, slots=True)
class EncoderWork:
    """`num_tokens` may run, with these of the request's inputs."""

    num_tokens: int
    inputs: dict[bytes, int] = dataclasses.field(default_factory=dict)
    """Indices of inputs that are not held yet, by identifier."""
    why_fewer: str | None = None


class EncoderInputRule(SchedulerPart):
    """A chunk of a prompt stops before an input whose output cannot be had in this step:

        prompt     text text [image image image] text [image image] text
        computed        ^ ........ step n ............ ^ .. n + 1 ......

    A sequence holds the outputs of the inputs that it computes next, in their order, from the step
    that has its first position to the one that has its last. So what it holds it can use up without
    any more, and no two sequences wait for each other. Text alone costs nothing here."""

    def __init__(
        self, pool: RequestPool, explanations: Explanations, config: SchedulerConfig
    ) -> None:
        self._pool = pool
        self._explanations = explanations
        self._budget = self._num_left = config.max_num_encoder_input_tokens
        self._max_chunk = config.max_chunk
        self._is_whole = config.disable_chunked_mm_input
        self._cache = EncoderCache(config.encoder_cache_size)
        self._held: dict[Sequence, dict[bytes, int]] = {}
        """Identifiers, and the positions behind their inputs."""
        self._scheduled: dict[str, list[int]] = {}

    def check_request(self, request: Request) -> None:
        """Raises ValueError: one of its inputs can never be encoded, or never run."""
        for index, each in enumerate(request.content.features):
            limits = [
                (self._budget, "a step's encoder budget", "--max-num-encoder-input-tokens"),
                (self._cache.capacity, "the encoder cache", "--encoder-cache-size"),
            ]
            num_rows = each.num_rows
            for limit, what, option in limits:
                if num_rows > limit:
                    raise ValueError(
                        f"input {index} ({each.modality}) takes {num_rows} tokens, {what} has "
                        f"{limit}; send a smaller one, or raise {option}"
                    )
            most = self._max_chunk // request.num_sequences
            if self._is_whole and each.stop - each.start > most:
                raise ValueError(
                    f"input {index} ({each.modality}) has {each.stop - each.start} positions, "
                    "which this model computes in one step, and a step has at most "
                    f"{most} tokens of a sequence of this request; raise --max-num-batched-tokens"
                )

    # ------------------------------------------------------------------ a step

    def begin_step(self, step_id: int = 0, now: float = 0.0) -> None:
        """What is computed, or has no row any more, is not held. Nothing is released within a plan,
        so what it encodes it does not evict."""
        self._num_left = self._budget
        for sequence in list(self._held):
            held = self._held[sequence]
            num_computed = sequence.num_computed_tokens
            for identifier, stop in list(held.items()):
                if sequence.row is None or stop <= num_computed:
                    self._cache.release(identifier)
                    del held[identifier]
            if not held:
                del self._held[sequence]

    def find_work(self, sequence: Sequence, num_computed: int, num_tokens: int) -> EncoderWork:
        """How many of that many tokens, from `num_computed` on, may run in this step. Changes
        nothing."""
        features = sequence.request.content.features
        if not features or features[-1].stop <= num_computed:
            return EncoderWork(num_tokens)
        stop, why = num_computed + num_tokens, None
        num_left, num_available = self._num_left, self._cache.num_available
        held, work = self._held.get(sequence, {}), dict[bytes, int]()
        for index, each in enumerate(features):
            if each.stop <= num_computed:
                continue
            if each.start >= stop:
                break
            if self._is_whole and stop < each.stop:
                stop, why = each.start, f"input {index} is computed in one step, which has no room"
                break
            name, num_rows = each.identifier, each.num_rows
            if name in work:
                work[name] = index  # held until the last of equal ones is computed
            if name in held or name in work:
                continue
            cost = 0 if name in self._cache else num_rows
            room = 0 if self._cache.is_needed(name) else num_rows
            if cost > num_left or room > num_available:
                stop = each.start
                why = (
                    f"input {index} takes {num_rows} tokens of an encoder's output; this step's "
                    f"budget has {num_left} of {self._budget} left, and the encoder cache "
                    f"{num_available} of {self._cache.capacity}"
                )
                break
            num_left, num_available = num_left - cost, num_available - room
            work[name] = index
        return EncoderWork(max(0, stop - num_computed), work, why)

    def schedule(self, sequence: Sequence, work: EncoderWork) -> None:
        """Hold these outputs, and encode what is not cached."""
        # what is cached first: it is not evicted for the others then
        for identifier in sorted(work.inputs, key=lambda name: name not in self._cache):
            index = work.inputs[identifier]
            each = sequence.request.content.features[index]
            self._held.setdefault(sequence, {})[identifier] = each.stop
            if not self._cache.acquire(identifier, each.num_rows):
                self._pool.counters.num_encoder_cache_hits += 1
                continue
            self._num_left -= each.num_rows
            self._scheduled.setdefault(_known_of(sequence).sequence_id, []).append(index)
            self._pool.counters.num_encoder_inputs += 1

    def limit(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of a running sequence's next tokens may run; what they need is scheduled."""
        work = self.find_work(sequence, sequence.num_computed_tokens, num_tokens)
        self.schedule(sequence, work)
        if not work.num_tokens and work.why_fewer is not None:
            self._explanations.skipped(sequence.request, WaitReason.ENCODER, work.why_fewer)
        return work.num_tokens

    def limit_columns(self, rows: Int64Array, counts: Int32Array, budget: int) -> Int32Array:
        """`counts` of running sequences in order, as `limit` has them; 0 for those that wait. The
        samples of a request share what is left of the budget."""
        batch = self._pool.batch
        if not self._budget:
            return counts
        is_pending = batch.num_computed_tokens[rows] < batch.encoder_stop[rows]
        if not np.count_nonzero(is_pending):
            return counts
        counts = np.minimum(counts, self._max_chunk)
        for index in np.flatnonzero(is_pending).tolist():
            sequence, stop = self._pool.sequence_in(rows[index]), index + 1
            while stop < len(rows) and self._is_of(sequence.request, rows[stop]):
                stop += 1
            share = (budget - int(counts[:index].sum())) // (stop - index)
            counts[index] = self.limit(sequence, min(int(counts[index]), share)) if share > 0 else 0
        return counts

    def _is_of(self, request: Request, row: np.int64) -> bool:
        return self._pool.sequence_in(int(row)).request is request

    def on_plan(self, plan: SchedulerOutput) -> None:
        if self._scheduled or self._cache.evicted:
            plan.scheduled_encoder_inputs, self._scheduled = self._scheduled, {}
            plan.free_encoder_mm_hashes, self._cache.evicted = self._cache.evicted, []

    # ------------------------------------------------------------------ around the steps

    def on_discard(self, steps: list[InFlightStep], detail: str) -> None:
        """What the steps should have encoded is not there; what they should have dropped may be."""
        self.begin_step()
        self._cache.evict_all()
        self._cache.evicted += [name for each in steps for name in each.plan.free_encoder_mm_hashes]

    def on_new_runner(self) -> None:
        self.begin_step()
        self._cache.evict_all()
        self._cache.evicted.clear()

    def statistics(self) -> Mapping[str, int]:
        return {"num_encoder_cache_tokens": self._cache.num_kept}

    def check(self) -> None:
        """Assert that the cache adds up, and that exactly what is held is referenced."""
        self._cache.check()
        assert not self._scheduled, "a plan was not taken"
        held: dict[bytes, int] = {}
        for names in self._held.values():
            for name in names:
                held[name] = held.get(name, 0) + 1
        assert held == self._cache._references


def _known_of(sequence: Sequence) -> Sequence:
    """One of the request's sequences that the model runner knows: a new one may still leave the
    plan."""
    known = (each for each in sequence.request.unfinished if each.is_known_to_runner)
    return sequence if sequence.is_known_to_runner else next(known, sequence)
