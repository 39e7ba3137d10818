"""Sizes of steps that CUDA graphs are made for: a step takes the smallest that holds it, and the
rest of that is padding."""

from bisect import bisect_left
from typing import NamedTuple

MAX_MIXED_TOKENS = 1024
"""Most tokens of a graph of mixed steps: larger ones compute for longer than their launch takes."""
_LEAST_MIXED_TOKENS = 16
_FEW_SEQUENCES = 16
MAX_LONG_PREFILLS = 2
"""Long prefills of a step that a mixed graph serves: its launches have programs for no more."""


class StepBucket(NamedTuple):
    """Tokens and sequences that a graph is made for; with equal numbers all sequences decode.
    Otherwise which of them do, and where the tokens of each lie, is found on the device."""

    num_tokens: int
    num_sequences: int


class StepBuckets(NamedTuple):
    """Each rising. The default: there are none."""

    decodes: tuple[StepBucket, ...] = ()
    mixed: tuple[StepBucket, ...] = ()

    @staticmethod
    def up_to(max_num_sequences: int, max_num_tokens: int) -> "StepBuckets":
        """Mixed steps of 16 to 1024 tokens have room for few sequences, or for all that there can
        be: the head computes a row for each."""
        sizes = bucket_sizes(min(MAX_MIXED_TOKENS, max_num_tokens))
        return StepBuckets(
            tuple(StepBucket(size, size) for size in bucket_sizes(max_num_sequences)),
            tuple(
                StepBucket(size, number)
                for size in sizes
                if size >= min(_LEAST_MIXED_TOKENS, sizes[-1])
                for number in sorted(
                    {min(limit, max_num_sequences, size - 1) for limit in (_FEW_SEQUENCES, size)}
                )
                if number
            ),
        )

    def choose(self, num_sequences: int, num_tokens: int) -> StepBucket | None:
        """The one of fewest tokens, then sequences, that holds so many; None: none does."""
        buckets = self.decodes if num_tokens == num_sequences else self.mixed
        index = bisect_left(buckets, (num_tokens, num_sequences))
        while index < len(buckets) and buckets[index].num_sequences < num_sequences:
            index += 1
        return buckets[index] if index < len(buckets) else None


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Rising sizes from 1 to exactly `most`: powers of two, from 16 on also their halves
    between, so that padding is less than half of a bucket and from 16 on at most a third.

        1  2  4  8  16  24  32  48  64  96  128  192  256  384  512 ... most

    Raises ValueError: fewer than one sequence."""
    if most < 1:
        raise ValueError(f"most is {most}, it must be at least 1")
    sizes, power = [], 1
    while power < most:
        sizes.append(power)
        if power >= 16:
            sizes.append(power + power // 2)
        power *= 2
    return (*[size for size in sizes if size < most], most)
