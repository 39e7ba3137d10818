"""For which numbers of sequences decode steps are recorded as CUDA graphs. Pure.

    sequences   1  2  4  8  16  24  32  48  64  96  128  192  256  384  512 ... max_num_seqs
    (a step takes the smallest bucket that holds it; the rest of the bucket is padding)

Owns the list and the choice. Must not know graphs or the device.
"""

from bisect import bisect_left
from collections.abc import Sequence


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Rising sizes from 1 to exactly `max_num_seqs`: powers of two, from 16 on also their halves
    between, so that padding is less than half of a bucket and from 16 on at most a third.

    Raises:
        ValueError: fewer than one sequence.
    """
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs is {max_num_seqs}, it must be at least 1; raise it")
    sizes, power = [], 1
    while power < max_num_seqs:
        sizes.append(power)
        if power >= 16:
            sizes.append(power + power // 2)
        power *= 2
    return (*[size for size in sizes if size < max_num_seqs], max_num_seqs)


def choose_bucket(buckets: Sequence[int], num_sequences: int) -> int | None:
    """The smallest that holds so many sequences, or None if none does (or there is nothing)."""
    if num_sequences < 1:
        return None
    index = bisect_left(buckets, num_sequences)
    return buckets[index] if index < len(buckets) else None
