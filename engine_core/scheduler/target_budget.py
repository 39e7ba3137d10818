"""The step's token budget that keeps promises: so many seconds per output token, so many until the
first one. Knows columns of numbers and the cost model; no queue, no clock.

The promise per output token is about a request's mean, as load tests measure it: after k tokens
behind its first, k * target_tpot_s may have passed. What is left of that is its slack, which it can
lend to a prefill chunk; one that is behind has none. So the next step may take

    min over running decodes of  target * k - (now - first_token_s)      k: tokens after this step

seconds, and the budget is the most tokens with which the cost model predicts no more. In light load
slack builds up, and prompts are computed in large chunks; in heavy load the smallest slack is about
one target, and the chunk is what a decode step leaves of it, whatever the batch.

The least slack rules, not a quantile: on six bursty traces quantiles up to 0.3 broke as many
promises or more, as those that they give up are new requests with most of their output ahead. Nor
may requests go into debt to be paid back later, not even for a prompt whose deadline is near: while
it is urgent for one, it is so for the next, the debt stays, and both promises are broken. For the
same reason the chunk that every step has, so that no prompt waits for ever, is a few tokens. What
never counts is a promise broken for good: one that decode-only steps would not mend within as many
tokens as the request has behind it (its expected remainder, if nothing is known of its length).
"""

import math

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.cost_model import CostModel
from engine_core.scheduler.step_budget import RunningSequences, StepLoad

_LEAST_STEPS_WITH_CHUNKS = 6
"""Seen, before the model is believed."""
_FIRST_CHUNK = 32
"""With running decodes, of the first steps; it doubles, so that the model sees several sizes."""
_LEAST_HORIZON = 16
"""Tokens within which a new request may catch up."""
_URGENT = 0.5
"""Of target_ttft_s, waited."""


class TargetBudget:
    """
    Args:
        max_num_batched_tokens: never more.
        target_tpot_s: mean seconds per output token after the first; None: no promise, and every
            step may have all tokens.
        target_ttft_s: seconds from arrival to the first token; None: no promise. Decides when the
            other promise cannot be kept by the running requests anyway.
        min_chunk: prefill tokens of every step, so that no prompt waits for ever.
        margin: part of target_tpot_s that is kept back for what the model does not see.

    Raises:
        ValueError: a number outside its limits.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        target_tpot_s: float | None = None,
        target_ttft_s: float | None = None,
        *,
        min_chunk: int = 4,
        margin: float = 0.03,
        cost_model: CostModel | None = None,
    ) -> None:
        for name, target in (("tpot", target_tpot_s), ("ttft", target_ttft_s)):
            if target is not None and not target > 0:
                raise ValueError(
                    f"target_{name}_s is {target}, it must be above 0 seconds; omit it for no "
                    f"promise"
                )
        if not 0 <= margin < 1:
            raise ValueError(f"margin is {margin}, it must be from 0 to below 1; 0.03 is usual")
        if min_chunk < 1:
            raise ValueError(f"min_chunk is {min_chunk}, it must be at least 1; 4 is usual")
        self._max_num_tokens = max_num_batched_tokens
        self._target_tpot_s = None if target_tpot_s is None else target_tpot_s * (1 - margin)
        self._target_ttft_s = target_ttft_s
        self._min_chunk = min_chunk
        self._cost_model = CostModel() if cost_model is None else cost_model

    @property
    def cost_model(self) -> CostModel:
        """What it has learnt of step times."""
        return self._cost_model

    def observe(self, load: StepLoad, duration_s: float) -> None:
        """Learn from it."""
        self._cost_model.observe(load, duration_s)

    def num_tokens(
        self, now: float, running: RunningSequences, waiting_arrival_s: float | None
    ) -> int:
        """One token for each running decode, and the longest chunk that keeps the promises."""
        if self._target_tpot_s is None or not len(running.num_tokens):
            return self._max_num_tokens
        is_prefill = running.num_tokens - running.num_computed_tokens > 1
        """Also one that is computed again after a preemption."""
        prefills = is_prefill.nonzero()[0]
        num_decodes = len(is_prefill) - len(prefills)
        if num_decodes == 0:
            return self._max_num_tokens
        chunk = self._chunk(now, running, waiting_arrival_s, prefills, self._target_tpot_s)
        return min(self._max_num_tokens, num_decodes + max(self._min_chunk, chunk))

    def _chunk(
        self,
        now: float,
        running: RunningSequences,
        waiting_arrival_s: float | None,
        prefills: npt.NDArray[np.intp],
        target_s: float,
    ) -> int:
        model = self._cost_model
        if model.num_observed_with_chunks < _LEAST_STEPS_WITH_CHUNKS:
            return _FIRST_CHUNK << model.num_observed_with_chunks
        num_decodes = len(running.num_tokens) - len(prefills)
        num_context = int(running.num_tokens.sum()) - int(running.num_tokens[prefills].sum())
        decode_s = model.predict(StepLoad(num_decodes, num_decodes, num_context, num_context))
        num_outputs = running.num_tokens - running.num_prompt_tokens
        """Now; the next one is the num_outputs-th after the first."""
        allowed_s = num_outputs * target_s
        allowed_s += running.first_token_s
        allowed_s -= now
        allowed_s[prefills] = np.nan
        gain_s = max(0.0, target_s - decode_s)
        """Caught up in each decode-only step."""
        least_s = float(np.fmin.reduce(allowed_s))
        if least_s + _LEAST_HORIZON * gain_s < decode_s:
            mended_s = allowed_s + np.maximum(num_outputs, _LEAST_HORIZON) * gain_s
            allowed_s[mended_s < decode_s] = np.nan
            least_s = float(np.fmin.reduce(allowed_s))
        if math.isnan(least_s):
            arrivals_s = running.arrival_s[prefills[:1]].tolist()
            if waiting_arrival_s is not None:
                arrivals_s.append(waiting_arrival_s)
            is_too_large = gain_s == 0 and model.predict(StepLoad(1, 1, 0, 0)) <= target_s
            if is_too_large and not self._is_urgent(now, arrivals_s):
                return 0
            return self._max_num_tokens
        num_computed = int(running.num_computed_tokens[prefills[0]]) if len(prefills) else 0
        chunk = model.num_chunk_tokens(least_s - decode_s, num_computed)
        return min(chunk, 2 * model.most_chunk_tokens)

    def _is_urgent(self, now: float, arrivals_s: list[float]) -> bool:
        target_s = self._target_ttft_s
        return target_s is not None and any(now - a > _URGENT * target_s for a in arrivals_s)
