"""How many promises each length of a prefill chunk would break: what a choice between them weighs.

Looked at is the time until the queue of prompts is computed, with the same chunk in every step, and
the running requests' remaining tokens behind it in steps of decodes only:

    now |-- m steps with a chunk, D(c) each --|-- decode-only steps, d each --> last answer's end

    prompt j        first token after ceil(tokens up to its end / c) steps; its answer behind that
    decode i        min(R_i, m) tokens at D(c), the others at d

A small chunk makes prompts late, a large one answers slow; neither is known for certain, as more
prompts will come. So each promise counts with a probability, a logistic function of its margin. A
request counts once: if its first token was late, its later ones break nothing more. What can no
longer be kept or broken weighs the same for every chunk, and so decides nothing.

Knows numbers only: no queue, no rows, no clock.
"""

import dataclasses

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]

_TPOT_SPREAD = 0.1
"""Of the time promised for the remaining tokens: how far off the predicted end may be."""
_TTFT_SPREAD = 0.3
"""Of the promised time to the first token, likewise."""
_FEW_TOKENS = 2
"""Added to the remaining tokens: the last ones are not certain either."""


@dataclasses.dataclass(frozen=True, slots=True)
class Targets:
    """Seconds."""

    tpot_s: float
    ttft_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Answers:
    """Running decodes whose first token was in time."""

    num_left: Floats
    """[n] tokens that are expected, at least 1."""
    allowed_s: Floats
    """[n] from now, for all of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prompts:
    """To be computed, in order."""

    num_tokens_until: Floats
    """[j] left to compute of this one and all before it."""
    allowed_s: Floats
    """[j] from now until its first token; below 0 it is late."""
    num_answer_tokens: float
    """Expected of each."""


def expected_broken(
    chunks: Floats,
    step_s: Floats,
    decode_step_s: float,
    answers: Answers,
    prompts: Prompts,
    targets: Targets,
) -> Floats:
    """The expected number of requests that break a promise, [C].

    Args:
        chunks: [C] tokens.
        step_s: [C] of a step with that chunk.
        decode_step_s: of a step behind all prompts.
    """
    chunks_C1, step_s_C1 = chunks[:, None], step_s[:, None]
    num_steps_CJ = np.ceil(prompts.num_tokens_until / chunks_C1)
    num_steps_C1 = num_steps_CJ[:, -1:]

    def share_slow(num_left: Floats | float, until_C: Floats, allowed_s: Floats | float) -> Floats:
        """Of answers whose first `until_C` tokens take a step with a chunk each."""
        num_mixed = np.minimum(num_left, until_C)
        end_s = num_mixed * step_s_C1 + (num_left - num_mixed) * decode_step_s
        spread_s = _TPOT_SPREAD * targets.tpot_s * (num_left + _FEW_TOKENS)
        return _logistic((end_s - allowed_s) / spread_s)

    slow = share_slow(answers.num_left, num_steps_C1, answers.allowed_s)
    first_s_CJ = num_steps_CJ * step_s_C1
    late_CJ = _logistic((first_s_CJ - prompts.allowed_s) / (_TTFT_SPREAD * targets.ttft_s))
    num_new = prompts.num_answer_tokens
    slow_CJ = share_slow(num_new, num_steps_C1 - num_steps_CJ, targets.tpot_s * num_new)
    broken_C: Floats = slow.sum(axis=1) + (late_CJ + slow_CJ * (1 - late_CJ)).sum(axis=1)
    return broken_C


def _logistic(x: Floats) -> Floats:
    return 1.0 / (1.0 + np.exp(np.clip(-x, -40.0, 40.0)))
