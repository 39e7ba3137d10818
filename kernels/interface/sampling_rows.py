"""Sampling parameters of each running sequence, on the device, and the results of sampling.

N rows of the persistent batch, V tokens of the vocabulary, W = ceil(V / 32) mask words.

    state of a row   | 16 words: see StateWord | W mask words, if flag MASKED | padding |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch

NUM_STATE_WORDS = 16
MAX_LISTED_TOKENS = 1024
"""Biases, and tokens that min_tokens forbids, that a row can have."""
MAX_DEVICE_LOGPROBS = 128
"""Likeliest tokens that the device reports of a row; a request for more is served on the host."""
WORD_BITS = 32


class StateWord(enum.IntEnum):
    """Words of a row's state: float32 up to FREQUENCY, int32 behind it."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    REPETITION = 3
    PRESENCE = 4
    FREQUENCY = 5
    TOP_K = 6
    SEED_LOW = 7
    SEED_HIGH = 8
    NUM_LOGPROBS = 9
    """-1: the device reports nothing of this row."""
    MIN_LENGTH = 10
    """Tokens of the list are impossible at positions below this."""
    NUM_MIN_TOKENS_IDS = 11
    NUM_BIASES = 12
    FLAGS = 13


class StateFlag(enum.IntFlag):
    """Bits of StateWord.FLAGS."""

    GREEDY = 1
    COUNTED = 2
    """Has penalties: its output is counted."""
    MASKED = 4
    """Has a mask of allowed tokens."""


class TokenList(enum.IntEnum):
    """Tables of `SamplingRows.lists`. Values are float32 in the words of an int32."""

    MIN_TOKENS_IDS = 0
    BIAS_IDS = 1
    BIAS_VALUES = 2


def num_mask_words(vocab_size: int) -> int:
    """int32 words of a token mask."""
    return -(-vocab_size // WORD_BITS)


def pack_token_mask(mask_V: torch.Tensor) -> torch.Tensor:
    """bool [V] as int32 [ceil(V / 32)], on the same device; bits past V are 0."""
    words, device = num_mask_words(len(mask_V)), mask_V.device
    bits_B = torch.zeros(words * WORD_BITS, dtype=torch.int64, device=device)
    bits_B[: len(mask_V)] = mask_V
    place_B = torch.arange(WORD_BITS, device=device)
    words_W = (bits_B.view(words, WORD_BITS) << place_B).sum(dim=1)
    # the 32nd bit is an int32's sign
    return (words_W - ((words_W >> 31) << WORD_BITS)).int()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Sampling state of the running sequences, a row each, kept from step to step.

    Attributes:
        vocab_size: V.
        state_NX: int32, see the module; a row's stride is a multiple of 16 words.
        lists_3NM: int32 [3, N, MAX_LISTED_TOKENS], a table a TokenList.
        prompt_bits_NW: int32, bit t % 32 of word t // 32: token t is in the prompt. Of rows with
            penalties; of others anything.
        output_counts_NV: int32, likewise: occurrences in the output.
    """

    vocab_size: int
    state_NX: torch.Tensor
    lists_3NM: torch.Tensor
    prompt_bits_NW: torch.Tensor
    output_counts_NV: torch.Tensor

    @staticmethod
    def allocate(*, num_rows: int, vocab_size: int, device: torch.device) -> SamplingRows:
        """About 4 V + 13 KiB a row, so that a penalty never needs memory while serving.

        A row without a sequence is greedy and has no options."""

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        words = num_mask_words(vocab_size)
        state_NX = zeros(num_rows, NUM_STATE_WORDS + -(-words // 16) * 16)
        state_NX[:, StateWord.FLAGS] = int(StateFlag.GREEDY)
        state_NX[:, StateWord.NUM_LOGPROBS] = -1
        for word in (StateWord.TEMPERATURE, StateWord.TOP_P, StateWord.REPETITION):
            state_NX.view(torch.float32)[:, word] = 1.0
        return SamplingRows(
            vocab_size=vocab_size,
            state_NX=state_NX,
            lists_3NM=zeros(len(TokenList), num_rows, MAX_LISTED_TOKENS),
            prompt_bits_NW=zeros(num_rows, words),
            output_counts_NV=zeros(num_rows, vocab_size),
        )

    @property
    def mask_words(self) -> slice:
        """Columns of a state that hold the mask of allowed tokens."""
        return slice(NUM_STATE_WORDS, NUM_STATE_WORDS + num_mask_words(self.vocab_size))

    def write_history(self, row: int, prompt_ids: torch.Tensor, output_ids: torch.Tensor) -> None:
        """Replace the row's history of tokens, which penalties read.

        Args:
            prompt_ids, output_ids: int32 [any], on the device, each in [0, V).
        """
        seen_V = torch.zeros(self.vocab_size, dtype=torch.bool, device=prompt_ids.device)
        self.prompt_bits_NW[row] = pack_token_mask(seen_V.index_fill_(0, prompt_ids.long(), True))
        counts_V = self.output_counts_NV[row].zero_()
        counts_V.index_add_(0, output_ids.long(), torch.ones_like(output_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResults:
    """What sampling gives back, all in one int32 buffer, on the device or on the host.

    Attributes:
        words: the buffer. Its first `num_plain_words` hold what every step gives, the rest
            log-probabilities.
        token_ids_C: int64, the chosen tokens.
        best_logits_C: float32, the largest logit that was left to choose from; not finite if none
            was, or if there are NaNs.
        raw_best_logits_C: float32, the largest before anything was changed; written in
            SamplingMode.FULL only.
        ranks_C: int32, logprob_ids_CN int32, logprobs_CN float32: see `StepSampler.sample`.
        num_plain_words: words of all but the last two.
    """

    words: torch.Tensor
    token_ids_C: torch.Tensor
    best_logits_C: torch.Tensor
    raw_best_logits_C: torch.Tensor
    ranks_C: torch.Tensor
    logprob_ids_CN: torch.Tensor
    logprobs_CN: torch.Tensor
    num_plain_words: int

    @staticmethod
    def num_words(capacity: int, vocab_size: int) -> int:
        """Words of a buffer for so many rows of logits."""
        return _rounded(capacity) * (5 + 2 * _report_width(vocab_size))

    @staticmethod
    def over(words: torch.Tensor, *, capacity: int, vocab_size: int) -> StepResults:
        """Views of a buffer of `num_words`."""
        padded, width = _rounded(capacity), _report_width(vocab_size)
        ids_at, logprobs_at = 5 * padded, (5 + width) * padded
        return StepResults(
            words=words,
            token_ids_C=words[: 2 * padded].view(torch.int64)[:capacity],
            best_logits_C=words[2 * padded :][:capacity].view(torch.float32),
            raw_best_logits_C=words[3 * padded :][:capacity].view(torch.float32),
            ranks_C=words[4 * padded :][:capacity],
            logprob_ids_CN=words[ids_at:logprobs_at].view(padded, width)[:capacity],
            logprobs_CN=words[logprobs_at:]
            .view(torch.float32)[: padded * width]
            .view(padded, width)[:capacity],
            num_plain_words=ids_at,
        )


def _rounded(capacity: int) -> int:
    """Columns begin at 16 bytes, whatever the capacity."""
    return -(-capacity // 4) * 4


def _report_width(vocab_size: int) -> int:
    return 1 + min(MAX_DEVICE_LOGPROBS, vocab_size)
