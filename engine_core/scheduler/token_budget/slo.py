"""The token budget that keeps SLOs: so many seconds per output token (TPOT), and until the first
one (TTFT)."""

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from engine_core.scheduler.config import SchedulerConfig
from engine_core.scheduler.token_budget.base import (
    RunningSequences,
    StepLoad,
    TokenBudget,
    WaitingRequests,
)
from engine_core.scheduler.token_budget.cost_model import CostModel

Floats = npt.NDArray[np.floating]

_MIN_STEPS_WITH_CHUNKS = 6
"""Steps with chunks that are observed before the cost model is used."""
_FIRST_CHUNK = 32
"""First chunk beside running decodes; it doubles each step: the cost model sees several sizes."""
_MIN_HORIZON = 16
"""Tokens within which a new request may catch up, and expected output of a new request."""
_CHUNK_RATIO = math.sqrt(2.0)
"""Largest ratio of successive chunk lengths that are weighed against each other."""
_MAX_WAITING = 64
"""Waiting requests that are weighed: the first tokens of the others are far away."""
_TPOT_SPREAD = 0.1
"""How far off a predicted end may be, as a part of the time allowed for the remaining tokens."""
_TTFT_SPREAD = 0.3
"""How far off a predicted first token may be, as a part of the time allowed until it."""
_MIN_CHUNK = 4
"""Prefill tokens of every step, so that no prompt waits for ever."""
_FEW_TOKENS = 2
"""Tokens added to the remaining ones: the end of an output is not certain either."""


@dataclasses.dataclass(frozen=True, slots=True)
class SLOTargets:
    """The SLOs in seconds."""

    tpot_s: float
    ttft_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class DecodeOutlook:
    """Running decodes whose first token was in time, [n]."""

    num_left: Floats
    """Tokens that are expected, at least 1."""
    allowed_s: Floats
    """Seconds from now in which the `num_left` tokens are due."""


@dataclasses.dataclass(frozen=True, slots=True)
class PromptOutlook:
    """Prompts to be computed, in order, [j]."""

    num_tokens_until: Floats
    """Tokens left to compute of this prompt and all before it."""
    allowed_s: Floats
    """Seconds from now until the prompt's first token is due; below 0 it is late."""
    num_output_tokens: float
    """Output tokens expected of each prompt."""


class SLOTokenBudget(TokenBudget):
    """The SLO per output token is about a request's mean, as load tests measure it: k tokens after
    its first one, k * target_tpot_s may have passed. What is left of that is its slack, which can
    be spent on a prefill chunk. A step that violates nothing may take

        min over running decodes of  target * k - (now - first_token_s)    k: tokens after this step

    seconds, and the longest chunk for which the cost model predicts no more is what every step
    gets: in light load slack builds up and chunks are large; in heavy load the smallest slack is
    about one target, and the chunk is what a decode step leaves of it. Requests whose SLO can no
    longer be met, even if all steps were decode-only for max(num_outputs, 16) tokens more, are
    ignored. With a TPOT target alone that is the whole rule.

    With a TTFT target too, such chunks can be too small: prompts queue up and are late, one after
    the other. Then chunks from that length upwards are compared, and the one with the fewest
    expected violations is taken (`expected_violations`).

    Args:
        max_num_batched_tokens: never more.
        target_tpot_s: mean seconds per output token after the first.
        target_ttft_s: seconds from arrival to the first token; None: no target.
        margin: part of target_tpot_s that is reserved for what the model does not see.
    """

    looks_at_load = True

    def __init__(
        self,
        max_num_batched_tokens: int,
        target_tpot_s: float,
        target_ttft_s: float | None = None,
        *,
        margin: float = 0.03,
        cost_model: CostModel | None = None,
    ) -> None:
        super().__init__(max_num_batched_tokens)
        self._target_tpot_s = target_tpot_s * (1 - margin)
        self._target_ttft_s = target_ttft_s
        self.cost_model = CostModel() if cost_model is None else cost_model

    def observe(self, load: StepLoad, duration_s: float) -> None:
        self.cost_model.observe(load, duration_s)

    def num_tokens(
        self, now: float, running: RunningSequences, waiting: WaitingRequests | None
    ) -> int:
        """One token for each running decode, and a chunk."""
        if not len(running.num_tokens):
            return self.max_num_tokens
        num_left = running.num_tokens - running.num_computed_tokens
        is_prefill = num_left > 1
        """Whether more than the last token is to be computed: also after a preemption."""
        prefills = is_prefill.nonzero()[0]
        num_decodes = len(is_prefill) - len(prefills)
        if num_decodes == 0 or (waiting is None and not len(prefills)):
            return self.max_num_tokens
        chunk = self._chunk(now, running, waiting, prefills)
        return min(self.max_num_tokens, num_decodes + max(_MIN_CHUNK, chunk))

    def _chunk(
        self,
        now: float,
        running: RunningSequences,
        waiting: WaitingRequests | None,
        prefills: npt.NDArray[np.intp],
    ) -> int:
        model, tpot_s = self.cost_model, self._target_tpot_s
        if model.num_observed_with_chunks < _MIN_STEPS_WITH_CHUNKS:
            return _FIRST_CHUNK << model.num_observed_with_chunks
        num_decodes = len(running.num_tokens) - len(prefills)
        num_context = int(running.num_tokens.sum()) - int(running.num_tokens[prefills].sum())
        decodes = StepLoad(num_decodes, num_decodes, num_context, num_context)
        decode_s = model.predict(decodes)
        min_slack_s = _min_slack_s(now, running, prefills, tpot_s, decode_s)
        most = 2 * model.most_chunk_tokens
        if math.isnan(min_slack_s):
            # no SLO can be met; only a batch too large for the target gets no more
            is_too_large = decode_s >= tpot_s and model.predict(StepLoad(1, 1, 0, 0)) <= tpot_s
            num_within_slo = 0 if is_too_large else self.max_num_tokens
        else:
            num_computed = int(running.num_computed_tokens[prefills[0]]) if len(prefills) else 0
            num_within_slo = model.num_chunk_tokens(
                min_slack_s - decode_s, num_computed, num_decodes
            )
            num_within_slo = min(num_within_slo, most)
        if self._target_ttft_s is None:
            return num_within_slo
        targets = SLOTargets(tpot_s, self._target_ttft_s)
        prompts = _prompt_outlook(now, running, waiting, prefills, targets)
        if prompts is None:
            return num_within_slo
        num_prompt_tokens = float(prompts.num_tokens_until[-1])
        longest = min(num_prompt_tokens, most, self.max_num_tokens - num_decodes)
        shortest = max(num_within_slo, _MIN_CHUNK)
        if shortest >= longest:
            return shortest
        num_lengths = 1 + math.ceil(math.log(longest / shortest) / math.log(_CHUNK_RATIO))
        chunks = np.geomspace(longest, shortest, num_lengths)
        """Lengths of chunks, falling: of equals the longest is taken."""
        num_prompts = len(prompts.allowed_s)
        step_s = model.predict_chunks(decodes, chunks, num_prompt_tokens / num_prompts / 2)
        num_later = num_decodes + num_prompts
        num_context += int(num_prompt_tokens)
        decode_s = model.predict(StepLoad(num_later, num_later, num_context, num_context))
        running_decodes = _decode_outlook(now, running, prefills, targets)
        violations = expected_violations(
            chunks, step_s, decode_s, running_decodes, prompts, targets
        )
        return int(chunks[violations.argmin()])


def make_token_budget(config: SchedulerConfig) -> TokenBudget:
    """A budget that keeps the SLOs, or a fixed one where none is set."""
    if config.slo_tpot_ms is None:
        return TokenBudget(config.max_num_batched_tokens, config.max_num_shared_tokens)
    return SLOTokenBudget(
        config.max_num_batched_tokens,
        target_tpot_s=config.slo_tpot_ms / 1000,
        target_ttft_s=None if config.slo_ttft_ms is None else config.slo_ttft_ms / 1000,
    )


def _min_slack_s(
    now: float,
    running: RunningSequences,
    prefills: npt.NDArray[np.intp],
    tpot_s: float,
    decode_s: float,
) -> float:
    """Seconds that the next step may take; NaN if no running decode has an SLO that can be met."""
    num_outputs = running.num_tokens - running.num_prompt_tokens
    """Output tokens so far; the next one is the num_outputs-th after the first."""
    allowed_s = num_outputs * tpot_s
    allowed_s += running.first_token_s
    allowed_s -= now
    allowed_s[prefills] = np.nan
    gain_s = max(0.0, tpot_s - decode_s)
    """Seconds caught up in each decode-only step."""
    min_s = float(np.fmin.reduce(allowed_s))
    if min_s + _MIN_HORIZON * gain_s < decode_s:
        reachable_s = allowed_s + np.maximum(num_outputs, _MIN_HORIZON) * gain_s
        allowed_s[reachable_s < decode_s] = np.nan
        min_s = float(np.fmin.reduce(allowed_s))
    return min_s


def _decode_outlook(
    now: float, running: RunningSequences, prefills: npt.NDArray[np.intp], targets: SLOTargets
) -> DecodeOutlook:
    """An output is expected to become twice as long as it is, if it may."""
    is_in_time = running.first_token_s - running.arrival_s <= targets.ttft_s
    is_in_time[prefills] = False
    num_tokens = running.num_tokens[is_in_time]
    num_outputs = num_tokens - running.num_prompt_tokens[is_in_time]
    num_left = np.minimum(
        running.max_len[is_in_time] - num_tokens, np.maximum(num_outputs, _MIN_HORIZON)
    )
    num_left = np.maximum(num_left, 1).astype(np.float64)
    since_s = now - running.first_token_s[is_in_time]
    return DecodeOutlook(num_left, targets.tpot_s * (num_outputs - 1 + num_left) - since_s)


def _prompt_outlook(
    now: float,
    running: RunningSequences,
    waiting: WaitingRequests | None,
    prefills: npt.NDArray[np.intp],
    targets: SLOTargets,
) -> PromptOutlook | None:
    """Running prompts, then waiting ones that can be admitted: as if these were of equal length and
    had arrived evenly since the first of them."""
    num_left = (running.num_tokens - running.num_computed_tokens)[prefills].astype(np.float64)
    arrival_s = running.arrival_s[prefills]
    num_waiting = min(waiting.num_admissible, _MAX_WAITING) if waiting is not None else 0
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
    return PromptOutlook(
        num_tokens_until=num_left.cumsum(),
        allowed_s=arrival_s + targets.ttft_s - now,
        num_output_tokens=2.0 * max(_MIN_HORIZON, float(num_outputs.mean())),
    )


def expected_violations(
    chunks: Floats,
    step_s: Floats,
    decode_step_s: float,
    decodes: DecodeOutlook,
    prompts: PromptOutlook,
    targets: SLOTargets,
) -> Floats:
    """The expected number of requests that violate an SLO, [C], with the same chunk in every step
    until the queue of prompts is computed, and decode-only steps behind it:

        now |-- m steps with a chunk, D(c) each --|-- decode-only steps, d each --> last output

        prompt j     first token after ceil(tokens up to its end / c) steps; its output behind that
        decode i     min(R_i, m) tokens at D(c), the others at d

    A small chunk makes prompts late, a large one decodes slow; neither is certain, as more prompts
    will come. So each SLO counts with a probability, a logistic function of its margin. A request
    counts once. What is violated or met with every chunk decides nothing.

    Args:
        chunks: [C] tokens.
        step_s: [C] of a step with that chunk.
        decode_step_s: of a step behind all prompts.
    """
    chunks_C1, step_s_C1 = chunks[:, None], step_s[:, None]
    num_steps_CJ = np.ceil(prompts.num_tokens_until / chunks_C1)
    num_steps_C1 = num_steps_CJ[:, -1:]

    def p_slow(num_left: Floats | float, until_C: Floats, allowed_s: Floats | float) -> Floats:
        """Probability that outputs are late that take steps with a chunk for `until_C` tokens."""
        num_mixed = np.minimum(num_left, until_C)
        end_s = num_mixed * step_s_C1 + (num_left - num_mixed) * decode_step_s
        spread_s = _TPOT_SPREAD * targets.tpot_s * (num_left + _FEW_TOKENS)
        return _logistic((end_s - allowed_s) / spread_s)

    slow = p_slow(decodes.num_left, num_steps_C1, decodes.allowed_s)
    first_s_CJ = num_steps_CJ * step_s_C1
    late_CJ = _logistic((first_s_CJ - prompts.allowed_s) / (_TTFT_SPREAD * targets.ttft_s))
    num_new = prompts.num_output_tokens
    slow_CJ = p_slow(num_new, num_steps_C1 - num_steps_CJ, targets.tpot_s * num_new)
    violations_C: Floats = slow.sum(axis=1) + (late_CJ + slow_CJ * (1 - late_CJ)).sum(axis=1)
    return violations_C


def _logistic(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(np.clip(-x, -40.0, 40.0)))
