"""The step's token budget that keeps promises: so many seconds per output token, so many until the
first one. Knows columns of numbers and the cost model; no queue, no clock.

The promise per output token is about a request's mean, as load tests measure it: after k tokens
behind its first, k * target_tpot_s may have passed. What is left of that is its slack, which it can
lend to a prefill chunk; one that is behind has none. A step that breaks nothing may take

    min over running decodes of  target * k - (now - first_token_s)      k: tokens after this step

seconds, and the longest chunk with which the cost model predicts no more is what every step gets:
in light load slack builds up, and prompts are computed in large chunks; in heavy load the smallest
slack is about one target, and the chunk is what a decode step leaves of it, whatever the batch.
What never counts is a promise broken for good: one that decode-only steps would not mend within as
many tokens as the request has behind it (its expected remainder, if nothing is known of its
length). With a target per token alone that is the whole rule.

With a target for the first token too, such chunks can be too small: prompts pile up and are late,
one after the other. Then some promise will be broken, and the question is how few: from that chunk
upwards the one is taken with which the fewest are expected to be (`promises`). Never a smaller one,
so that no prompt waits for requests that lose nothing.
"""

import math

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.token_budget.base import (
    FixedTokenBudget,
    RunningSequences,
    StepLoad,
    TokenBudget,
    WaitingRequests,
)
from engine_core.scheduler.token_budget.cost_model import CostModel
from engine_core.scheduler.token_budget.slo_targets import (
    Answers,
    Prompts,
    Targets,
    expected_broken,
)

_LEAST_STEPS_WITH_CHUNKS = 6
"""Seen, before the model is believed."""
_FIRST_CHUNK = 32
"""With running decodes, of the first steps; it doubles, so that the model sees several sizes."""
_LEAST_HORIZON = 16
"""Tokens within which a new request may catch up, and that its answer is expected to have."""
_CHUNK_RATIO = math.sqrt(2.0)
"""Between lengths that are weighed against each other."""
_MOST_WAITING = 64
"""Of the waiting requests that are weighed: the others' first tokens are far away."""


class SLOTokenBudget:
    """
    Args:
        max_num_batched_tokens: never more.
        target_tpot_s: mean seconds per output token after the first; None: no promise, and every
            step may have all tokens.
        target_ttft_s: seconds from arrival to the first token; None: no promise, prompts get what
            the other promise leaves.
        min_chunk: prefill tokens of every step, so that no prompt waits for ever.
        margin: part of target_tpot_s that is kept back for what the model does not see.

    Raises:
        ValueError: a number outside its limits.
    """

    looks_at_load = True

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
        self, now: float, running: RunningSequences, waiting: WaitingRequests | None
    ) -> int:
        """One token for each running decode, and a chunk as the module says."""
        if self._target_tpot_s is None or not len(running.num_tokens):
            return self._max_num_tokens
        num_left = running.num_tokens - running.num_computed_tokens
        is_prefill = num_left > 1
        """Also one that is computed again after a preemption."""
        prefills = is_prefill.nonzero()[0]
        num_decodes = len(is_prefill) - len(prefills)
        if num_decodes == 0 or (waiting is None and not len(prefills)):
            return self._max_num_tokens
        chunk = self._chunk(now, running, waiting, prefills, self._target_tpot_s)
        return min(self._max_num_tokens, num_decodes + max(self._min_chunk, chunk))

    def _chunk(
        self,
        now: float,
        running: RunningSequences,
        waiting: WaitingRequests | None,
        prefills: npt.NDArray[np.intp],
        tpot_s: float,
    ) -> int:
        model = self._cost_model
        if model.num_observed_with_chunks < _LEAST_STEPS_WITH_CHUNKS:
            return _FIRST_CHUNK << model.num_observed_with_chunks
        num_decodes = len(running.num_tokens) - len(prefills)
        num_context = int(running.num_tokens.sum()) - int(running.num_tokens[prefills].sum())
        decodes = StepLoad(num_decodes, num_decodes, num_context, num_context)
        decode_s = model.predict(decodes)
        least_s = _least_slack_s(now, running, prefills, tpot_s, decode_s)
        most = 2 * model.most_chunk_tokens
        if math.isnan(least_s):
            # no promise that could be kept; only a batch too large for the target gets no more
            is_too_large = decode_s >= tpot_s and model.predict(StepLoad(1, 1, 0, 0)) <= tpot_s
            harmless = 0 if is_too_large else self._max_num_tokens
        else:
            num_computed = int(running.num_computed_tokens[prefills[0]]) if len(prefills) else 0
            harmless = model.num_chunk_tokens(least_s - decode_s, num_computed, num_decodes)
            harmless = min(harmless, most)
        if self._target_ttft_s is None:
            return harmless
        targets = Targets(tpot_s, self._target_ttft_s)
        answers = _answers(now, running, prefills, targets)
        prompts = _prompts(now, running, waiting, prefills, targets)
        if prompts is None:
            return harmless
        num_prompt_tokens = float(prompts.num_tokens_until[-1])
        longest = min(num_prompt_tokens, most, self._max_num_tokens - num_decodes)
        shortest = max(harmless, self._min_chunk)
        if shortest >= longest:
            return shortest
        num_lengths = 1 + math.ceil(math.log(longest / shortest) / math.log(_CHUNK_RATIO))
        chunks = np.geomspace(longest, shortest, num_lengths)
        """Falling, so that of equals the longest is taken."""
        num_prompts = len(prompts.allowed_s)
        step_s = model.predict_chunks(decodes, chunks, num_prompt_tokens / num_prompts / 2)
        num_later = num_decodes + num_prompts
        num_context += int(num_prompt_tokens)
        decode_s = model.predict(StepLoad(num_later, num_later, num_context, num_context))
        broken = expected_broken(chunks, step_s, decode_s, answers, prompts, targets)
        return int(chunks[broken.argmin()])


def make_token_budget(config: SchedulerConfig) -> TokenBudget:
    """A budget that keeps the SLOs, or a fixed one where none is set."""
    if config.slo_tpot_ms is None:
        return FixedTokenBudget(config.max_num_batched_tokens)
    return SLOTokenBudget(
        config.max_num_batched_tokens,
        target_tpot_s=config.slo_tpot_ms / 1000,
        target_ttft_s=None if config.slo_ttft_ms is None else config.slo_ttft_ms / 1000,
    )


def _least_slack_s(
    now: float,
    running: RunningSequences,
    prefills: npt.NDArray[np.intp],
    tpot_s: float,
    decode_s: float,
) -> float:
    """What the next step may take; NaN if no running decode has a promise that can be kept."""
    num_outputs = running.num_tokens - running.num_prompt_tokens
    """Now; the next one is the num_outputs-th after the first."""
    allowed_s = num_outputs * tpot_s
    allowed_s += running.first_token_s
    allowed_s -= now
    allowed_s[prefills] = np.nan
    gain_s = max(0.0, tpot_s - decode_s)
    """Caught up in each decode-only step."""
    least_s = float(np.fmin.reduce(allowed_s))
    if least_s + _LEAST_HORIZON * gain_s < decode_s:
        mended_s = allowed_s + np.maximum(num_outputs, _LEAST_HORIZON) * gain_s
        allowed_s[mended_s < decode_s] = np.nan
        least_s = float(np.fmin.reduce(allowed_s))
    return least_s


def _answers(
    now: float, running: RunningSequences, prefills: npt.NDArray[np.intp], targets: Targets
) -> Answers:
    """An answer is expected to become twice as long as it is, if it may."""
    is_in_time = running.first_token_s - running.arrival_s <= targets.ttft_s
    is_in_time[prefills] = False
    num_tokens = running.num_tokens[is_in_time]
    num_outputs = num_tokens - running.num_prompt_tokens[is_in_time]
    num_left = np.minimum(
        running.max_num_tokens[is_in_time] - num_tokens, np.maximum(num_outputs, _LEAST_HORIZON)
    )
    num_left = np.maximum(num_left, 1).astype(np.float64)
    since_s = now - running.first_token_s[is_in_time]
    return Answers(num_left, targets.tpot_s * (num_outputs - 1 + num_left) - since_s)


def _prompts(
    now: float,
    running: RunningSequences,
    waiting: WaitingRequests | None,
    prefills: npt.NDArray[np.intp],
    targets: Targets,
) -> Prompts | None:
    """Those that run, then those that wait and can be admitted: as if they were of equal length
    and had arrived evenly since the first of them."""
    num_left = (running.num_tokens - running.num_computed_tokens)[prefills].astype(np.float64)
    arrival_s = running.arrival_s[prefills]
    num_waiting = min(waiting.num_admissible, _MOST_WAITING) if waiting is not None else 0
    if waiting is not None and num_waiting > 0:
        mean = waiting.num_tokens / waiting.num_requests
        num_left = np.append(num_left, np.full(num_waiting, mean))
        part = np.arange(num_waiting) / waiting.num_requests
        head_s = waiting.head_arrival_s
        arrival_s = np.append(arrival_s, head_s + (now - head_s) * part)
    if not len(num_left):
        return None
    is_decode = np.ones(len(running.num_tokens), np.bool_)
    is_decode[prefills] = False
    num_outputs = (running.num_tokens - running.num_prompt_tokens)[is_decode]
    return Prompts(
        num_tokens_until=num_left.cumsum(),
        allowed_s=arrival_s + targets.ttft_s - now,
        num_answer_tokens=2.0 * max(_LEAST_HORIZON, float(num_outputs.mean())),
    )
