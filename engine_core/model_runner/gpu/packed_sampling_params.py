"""What a request asked for, as the words of its row's sampling state on the device.

Owns the encoding. Must not know rows, steps or when anything is written.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kernels.interface.sampling_rows import (
    MAX_DEVICE_LOGPROBS,
    MAX_LISTED_TOKENS,
    NUM_STATE_WORDS,
    WORD_BITS,
    StateFlag,
    StateWord,
    num_mask_words,
)
from protocol.sampling import SamplingParams

Int32Array = npt.NDArray[np.int32]
_NONE = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedSamplingParams:
    """
    Attributes:
        state: [16], or with a mask of allowed tokens behind it.
        held_back_ids, bias_ids, bias_values: lists; the values are float32 as words.
        is_truncated: top_k, top_p or min_p leave something out.
        needs_full: something that only SamplingMode.FULL carries out, in every step.
        has_penalties: the device needs the sequence's history.
        held_back_until: tokens of the sequence at which min_tokens are there; 0 if none are asked.
        num_logprobs: -1 for none; above `num_device_logprobs` the host reports.
        refusal: why the device cannot serve this request.
    """

    state: Int32Array
    held_back_ids: Int32Array
    bias_ids: Int32Array
    bias_values: Int32Array
    is_truncated: bool
    needs_full: bool
    has_penalties: bool
    held_back_until: int
    num_logprobs: int
    refusal: str | None


def num_device_logprobs(vocab_size: int) -> int:
    """Most log-probabilities a token that the device reports."""
    return min(MAX_DEVICE_LOGPROBS, vocab_size)


def encode_sampling(
    params: SamplingParams,
    *,
    num_prompt_tokens: int,
    eos_token_ids: Iterable[int],
    vocab_size: int,
) -> PackedSamplingParams:
    """`params.seed` is given unless the request is greedy."""
    assert params.is_greedy or params.seed is not None
    top_k = params.top_k if params.top_k < vocab_size else 0
    num_logprobs = _num_logprobs(params.logprobs, vocab_size)
    on_device = 0 <= num_logprobs <= num_device_logprobs(vocab_size)
    held_back = sorted({*eos_token_ids, *params.stop_token_ids}) if params.min_tokens else []
    has_mask = params.allowed_token_ids is not None
    refusal = None
    for name, number in (
        ("logit_bias", len(params.logit_bias)),
        ("stop_token_ids with min_tokens", len(held_back)),
    ):
        if number > MAX_LISTED_TOKENS:
            refusal = (
                f"{name} names {number} tokens, the device takes {MAX_LISTED_TOKENS}; name fewer"
            )
    if refusal is not None:
        held_back = []
    biases = {} if refusal is not None else params.logit_bias

    state = np.zeros(NUM_STATE_WORDS, np.int32)
    reals = state.view(np.float32)
    reals[StateWord.TEMPERATURE] = 1.0 if params.is_greedy else params.temperature
    reals[StateWord.TOP_P] = params.top_p
    reals[StateWord.MIN_P] = params.min_p
    reals[StateWord.REPETITION] = params.repetition_penalty
    reals[StateWord.PRESENCE] = params.presence_penalty
    reals[StateWord.FREQUENCY] = params.frequency_penalty
    seed = np.array([params.seed or 0], np.uint64).view(np.int32)
    state[StateWord.TOP_K] = top_k
    state[StateWord.SEED_LOW], state[StateWord.SEED_HIGH] = seed
    state[StateWord.NUM_LOGPROBS] = num_logprobs if on_device else -1
    held_back_until = num_prompt_tokens + params.min_tokens if held_back else 0
    state[StateWord.HELD_BACK_UNTIL] = held_back_until
    state[StateWord.NUM_HELD_BACK] = len(held_back)
    state[StateWord.NUM_BIASES] = len(biases)
    state[StateWord.FLAGS] = (
        StateFlag.GREEDY * params.is_greedy
        | StateFlag.COUNTED * params.has_penalties
        | StateFlag.MASKED * has_mask
    )
    if params.allowed_token_ids is not None:
        state = np.concatenate([state, _mask(params.allowed_token_ids, vocab_size)])
    return PackedSamplingParams(
        state=state,
        held_back_ids=np.array(held_back, np.int32),
        bias_ids=np.array(list(biases), np.int32),
        bias_values=np.array(list(biases.values()), np.float32).view(np.int32),
        is_truncated=top_k > 0 or params.top_p < 1 or params.min_p > 0,
        needs_full=bool(params.has_penalties or biases or has_mask or on_device),
        has_penalties=params.has_penalties,
        held_back_until=held_back_until,
        num_logprobs=num_logprobs,
        refusal=refusal,
    )


def _num_logprobs(asked: int | None, vocab_size: int) -> int:
    if asked is None:
        return -1
    return vocab_size if asked < 0 or asked > vocab_size else asked


def _mask(token_ids: Iterable[int], vocab_size: int) -> Int32Array:
    """Bit t % 32 of word t // 32 for each token."""
    bits = np.zeros(num_mask_words(vocab_size) * WORD_BITS, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
