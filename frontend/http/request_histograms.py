"""Histograms of the requests of one model, as this server saw them."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily

from frontend.request_state import RequestObserver, RequestState

_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_ITL_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5,
    7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_S = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480,
    960, 1920, 7680,
)  # fmt: skip
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_NUM_SAMPLES = (1, 2, 5, 10, 20)
_NUM_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
"""vLLM's bounds, and some below the least of seconds."""


class Histogram:
    """
    Args:
        bounds: upper ones, included.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        add_histogram(family, labels, self._bounds, self._counts, self._sum)


def add_histogram(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
) -> None:
    """Prometheus counts up to each bound."""
    buckets, so_far = [], 0
    for bound, count in zip((*map(float, bounds), "+Inf"), counts, strict=True):
        so_far += count
        buckets.append((str(bound), so_far))
    family.add_metric(labels, buckets, total)


def _seconds(name: str, text: str, bounds: Sequence[float] = _REQUEST_S) -> Histogram:
    return Histogram(name, f"Histogram of seconds {text}.", bounds)


def _tokens(name: str, text: str) -> Histogram:
    return Histogram(name, f"Histogram of tokens of requests: {text}.", _TOKENS)


class RequestHistograms(RequestObserver):
    """Names are vLLM's, less the prefix."""

    def __init__(self) -> None:
        self._ttft = _seconds("time_to_first_token_seconds", "to the first token", _TTFT_S)
        self._itl = _seconds(
            "inter_token_latency_seconds", "between two tokens of a sequence", _ITL_S
        )
        self._tpot = _seconds(
            "request_time_per_output_token_seconds",
            "per output token after the first, the mean of each request",
            _ITL_S,
        )
        self._e2e = _seconds("e2e_request_latency_seconds", "from a request to its end")
        self._queue = _seconds("request_queue_time_seconds", "until a request ran first")
        self._inference = _seconds(
            "request_inference_time_seconds", "from a request's first step to its end"
        )
        self._prefill = _seconds(
            "request_prefill_time_seconds", "from a request's first step to its first token"
        )
        self._decode = _seconds(
            "request_decode_time_seconds", "from a request's first token to its end"
        )
        self._prompt = _tokens("request_prompt_tokens", "their prompts")
        self._computed = _tokens("request_prefill_kv_computed_tokens", "prompts, less cached ones")
        self._generated = _tokens("request_generation_tokens", "generated, by all samples")
        self._longest = _tokens("request_max_num_generation_tokens", "generated, by the longest")
        self._max_tokens = _tokens("request_params_max_tokens", "the limit max_tokens")
        self._n = Histogram("request_params_n", "Histogram of n, the samples.", _NUM_SAMPLES)
        self._preemptions = Histogram(
            "request_num_preemptions", "Histogram of a request's preemptions.", _NUM_PREEMPTIONS
        )

    def __iter__(self) -> Iterator[Histogram]:
        return (each for each in vars(self).values() if isinstance(each, Histogram))

    def on_first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def on_tokens(self, itl_s: float, count: int) -> None:
        self._itl.observe(itl_s, count)

    def on_finished(self, request: RequestState) -> None:
        metrics, asked = request.metrics, request.wire
        lengths = [len(sequence.token_ids) for sequence in request.sequences]
        num_prompt = len(asked.prompt_token_ids)
        self._prompt.observe(num_prompt)
        if request.num_cached_tokens is not None:
            self._computed.observe(num_prompt - request.num_cached_tokens)
        self._generated.observe(sum(lengths))
        self._longest.observe(max(lengths))
        self._max_tokens.observe(asked.sampling_params.max_tokens)
        self._n.observe(asked.num_sequences)
        if metrics.finished_s is not None:
            self._e2e.observe(metrics.finished_s)
        if metrics.first_token_s is not None and metrics.last_token_s is not None:
            decode_s = metrics.last_token_s - metrics.first_token_s
            if max(lengths) > 1:
                self._tpot.observe(decode_s / (max(lengths) - 1))
        engine = metrics.engine
        if engine is None:
            return
        self._preemptions.observe(engine.num_preemptions)
        if engine.first_scheduled_s is not None:
            self._queue.observe(engine.first_scheduled_s)
            self._inference.observe(engine.finished_s - engine.first_scheduled_s)
            if engine.first_token_s is not None:
                self._prefill.observe(engine.first_token_s - engine.first_scheduled_s)
                self._decode.observe(engine.finished_s - engine.first_token_s)
