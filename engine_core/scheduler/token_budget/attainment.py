"""Whether finished requests met the SLOs that the token budget keeps."""

import math

from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.counters import Counters
from engine_core.scheduler.part import SchedulerPart
from engine_core.scheduler.request import Request, RequestStatus

_MEASURED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH,
    RequestStatus.FINISHED_TIMEOUT,
)


class SLOAttainment(SchedulerPart):
    """Counts requests with an answer, as load tests measure them: TTFT from arrival to the first
    token, TPOT as the mean over the tokens behind it, of the longest sample. One that ran out of
    time without a token violates the TTFT's SLO. Beams report once, and have no TPOT."""

    def __init__(self, config: SchedulerConfig, counters: Counters) -> None:
        self._counters = counters
        self._is_on = config.slo_tpot_ms is not None
        self._tpot_s = math.inf if config.slo_tpot_ms is None else config.slo_tpot_ms / 1000
        self._ttft_s = math.inf if config.slo_ttft_ms is None else config.slo_ttft_ms / 1000

    def on_finish(self, request: Request, detail: str | None, now: float) -> None:
        if not self._is_on or request.status not in _MEASURED:
            return
        started = [seq for seq in request.sequences if not math.isnan(seq.first_token_s)]
        first_s = min((seq.first_token_s for seq in started), default=now)
        is_slow = False
        if started and request.beam_search is None:
            longest = max(started, key=lambda seq: seq.num_output_tokens)
            allowed_s = self._tpot_s * (longest.num_output_tokens - 1)
            is_slow = longest.num_output_tokens > 1 and now - longest.first_token_s > allowed_s
        is_late = first_s - request.arrival_time > self._ttft_s
        if not started:
            is_late = request.status is RequestStatus.FINISHED_TIMEOUT
        counters = self._counters
        counters.num_slo_requests += 1
        counters.num_slo_met += not (is_late or is_slow)
        counters.num_slo_ttft_violations += is_late
        counters.num_slo_tpot_violations += is_slow
