"""When requests arrive. Pure: the same seed, the same schedule. Must not know clocks."""

import math
import random


def poisson_arrivals(
    rate: float, *, seed: int, num_requests: int | None = None, duration_s: float | None = None
) -> list[float]:
    """Arrival times of a Poisson process, in seconds from the start, in order.

    Args:
        rate: mean arrivals a second.
        num_requests: end with so many arrivals.
        duration_s: end before this time. At least one of the two must be given.

    Raises:
        ValueError: a rate that is not above 0, or no end.
    """
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"rate is {rate}, it must be a number above 0")
    if num_requests is None and duration_s is None:
        raise ValueError("the schedule has no end; give a number of requests or a duration")
    rng = random.Random(f"arrivals-{seed}")
    arrivals: list[float] = []
    now_s = rng.expovariate(rate)
    while (num_requests is None or len(arrivals) < num_requests) and (
        duration_s is None or now_s < duration_s
    ):
        arrivals.append(now_s)
        now_s += rng.expovariate(rate)
    return arrivals


def share_of(total: int, *, part: int, num_parts: int) -> int:
    """How many of `total` fall to one part, the first parts taking what does not divide."""
    return total // num_parts + (part < total % num_parts)
