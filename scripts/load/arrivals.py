"""When requests arrive: endless streams of rising times, in seconds. Same generator, same times."""

import itertools
import math
from collections.abc import Iterator

import numpy as np

_CHUNK = 4096


def poisson(rate: float, random: np.random.Generator) -> Iterator[float]:
    """Independent arrivals, `rate` a second on average."""
    return gamma(rate, 1.0, random)


def gamma(rate: float, cv: float, random: np.random.Generator) -> Iterator[float]:
    """Gaps from a gamma distribution with this coefficient of variation: 1 is Poisson, above it
    bursts, 0 a fixed gap. Raises ValueError: at the first arrival: a rate that is not above 0, or a
    negative CV."""
    _check_rate(rate)
    if not (cv >= 0 and math.isfinite(cv)):
        raise ValueError(f"the burstiness (CV) is {cv}, it must be at least 0; 1 is Poisson")
    now_s = 0.0
    while True:
        if cv:
            gaps = random.gamma(1 / cv**2, cv**2 / rate, _CHUNK)
        else:
            gaps = np.full(_CHUNK, 1 / rate)
        times = now_s + np.cumsum(gaps)
        now_s = float(times[-1])
        yield from times.tolist()


def diurnal(
    rate: float, swing: float, period_s: float, random: np.random.Generator
) -> Iterator[float]:
    """A Poisson process whose rate is rate * (1 + swing * sin(2 pi t / period_s)), by thinning.
    Raises ValueError: at the first arrival: a value outside its range."""
    _check_rate(rate)
    if not 0 <= swing <= 1:
        raise ValueError(f"the swing of the rate is {swing}, it must be from 0 to 1")
    if not period_s > 0:
        raise ValueError(f"the period is {period_s} s, it must be above 0")
    now_s, peak = 0.0, rate * (1 + swing)
    while True:
        times = now_s + np.cumsum(random.exponential(1 / peak, _CHUNK))
        now_s = float(times[-1])
        wanted = rate * (1 + swing * np.sin(2 * math.pi * times / period_s))
        yield from times[random.random(_CHUNK) * peak < wanted].tolist()


def first_arrivals(
    arrivals: Iterator[float], *, num_requests: int | None = None, duration_s: float | None = None
) -> tuple[float, ...]:
    """The first `num_requests` arrivals, those before `duration_s`, or both. Raises ValueError:
    neither is given."""
    if num_requests is None and duration_s is None:
        raise ValueError("the schedule has no end; give a number of requests or a duration")
    if duration_s is not None:
        end_s = duration_s
        arrivals = itertools.takewhile(lambda arrival_s: arrival_s < end_s, arrivals)
    return tuple(itertools.islice(arrivals, num_requests))


def _check_rate(rate: float) -> None:
    if not (rate > 0 and math.isfinite(rate)):
        raise ValueError(f"the rate is {rate} requests a second, it must be above 0")
