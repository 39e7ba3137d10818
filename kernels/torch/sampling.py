"""Choosing tokens in torch: Gumbel noise from Philox, truncation, penalties. Also the reference.

Shapes: R rows, V vocabulary, C candidates. Logits are float32."""

import numpy as np
import numpy.typing as npt
import torch

from kernels.interface.sampling import Penalties, SamplingLimits, TokenLogprobs

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10

STREAM = 0x73616D70
"""The counter's last word, so that other uses of the same seed draw other numbers."""

LARGEST_NOISE = 16.64
"""Just above -log(-log(1 - 2**-24)), the noise of the largest random number."""

_PIECE = 4096

FIRST_CANDIDATES = 256
"""Truncated distributions nearly always lie within so many of the likeliest tokens."""

_WORTH_SINGLING_OUT = 6
"""Noise of single tokens costs four times as much a token, and finding them a little more."""

UInt64 = npt.NDArray[np.uint64] | np.uint64
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox_4x32(
    counter: tuple[UInt64, UInt64, UInt64, UInt64], key: tuple[UInt64, UInt64]
) -> tuple[npt.NDArray[np.uint64], ...]:
    """Four random 32-bit words for each counter: Philox4x32-10.

    J. Salmon, M. Moraes, R. Dror, D. Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011). A
    counter-based generator has no state to carry from step to step: a token's noise depends on
    (seed, position, token id) alone, and any device can compute the same.

    Args:
        counter: four words, uint64 of values in [0, 2**32) that broadcast together.
        key: two words, likewise.

    Returns:
        Four arrays of values in [0, 2**32), of the broadcast shape.
    """
    c0, c1, c2, c3 = (np.array(word) for word in np.broadcast_arrays(*counter, *key)[:4])
    k0, k1 = key
    product0, product1 = np.empty_like(c0), np.empty_like(c0)
    for _ in range(NUM_ROUNDS):
        np.multiply(c0, np.uint64(MULTIPLIERS[0]), out=product0)
        np.multiply(c2, np.uint64(MULTIPLIERS[1]), out=product1)
        np.right_shift(product1, _HALF, out=c0)
        c0 ^= c1
        c0 ^= k0
        np.right_shift(product0, _HALF, out=c2)
        c2 ^= c3
        c2 ^= k1
        np.bitwise_and(product1, _LOW, out=c1)
        np.bitwise_and(product0, _LOW, out=c3)
        k0 = (k0 + np.uint64(KEY_INCREMENTS[0])) & _LOW
        k1 = (k1 + np.uint64(KEY_INCREMENTS[1])) & _LOW
    return c0, c1, c2, c3


def gumbel_noise(
    seeds_R: torch.Tensor, positions_R: torch.Tensor, token_ids_RC: torch.Tensor
) -> torch.Tensor:
    """Standard Gumbel noise of single tokens, float32 [R, C].

    `-log(-log(u))`, u from 23 random bits, in (0, 1) and never so near an end that the result is
    infinite. Token t of a request has word t % 4 of Philox at counter (t // 4, position, stream)
    under the request's seed.

    Args:
        seeds_R: the 64 bits of each seed as int64.
        positions_R: int64, index in the sequence of the token being chosen.
        token_ids_RC: int64.
    """
    ids_RC = token_ids_RC.numpy()
    seeds_R1, positions_R1 = (each.numpy()[:, None] for each in (seeds_R, positions_R))
    words = random_words(
        (ids_RC >> 2).astype(np.uint64), seeds_R1.astype(np.uint64), positions_R1.astype(np.uint64)
    )
    chosen_RC = np.choose(ids_RC & 3, words) >> np.uint64(9)
    return to_gumbel(torch.from_numpy(chosen_RC.astype(np.float32)))


def noise_of_vocabulary(
    seed: int, position: int, vocab_size: int, first_token: int = 0
) -> torch.Tensor:
    """`gumbel_noise` of every token of one row, float32 [V], at a quarter of the cost a token.

    A piece at a time keeps every temporary in the core's own cache.

    Args:
        seed: 64 bits, signed or not.
        position: index in the sequence of the token being chosen.
        first_token: the result is of the tokens from this one on.
    """
    quads = np.arange(first_token // 4, (first_token + vocab_size + 3) // 4, dtype=np.uint64)
    words_Q4 = np.empty((len(quads), 4), np.float32)
    for start in range(0, len(quads), _PIECE):
        piece = slice(start, start + _PIECE)
        words = random_words(quads[piece], np.uint64(seed % 2**64), np.uint64(position))
        for lane, word in enumerate(words):
            words_Q4[piece, lane] = word >> np.uint64(9)
    start = first_token % 4
    return to_gumbel(torch.from_numpy(words_Q4.reshape(-1)[start : start + vocab_size]))


def random_words(
    quads: UInt64, seed: UInt64, position: UInt64, stream: int = STREAM
) -> tuple[npt.NDArray[np.uint64], ...]:
    """Four random 32-bit words for each counter, see `philox_4x32`, of a seed and a position."""
    counter = (quads, position & _LOW, position >> _HALF, np.uint64(stream))
    return philox_4x32(counter, (seed & _LOW, seed >> _HALF))


def to_gumbel(upper: torch.Tensor) -> torch.Tensor:
    """From the upper 23 bits of random words, float32; overwritten."""
    uniform = upper.add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def best_of_rows(logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `SamplingOperations.best_of_rows`."""
    best_R, token_ids_R = logits_RV.max(dim=1)
    return token_ids_R, best_R


def sample_from_all(
    logits_RV: torch.Tensor,
    seeds_R: torch.Tensor,
    positions_R: torch.Tensor,
    first_token: int = 0,
) -> torch.Tensor:
    """One token a row, int64 [R], each with its softmax probability: the Gumbel-max trick.

    `argmax((logits - their maximum) + gumbel_noise)`; the maximum goes first so that the noise
    keeps its digits beside large logits. Noise is bounded, so tokens that the largest noise could
    not lift over the likeliest token's own sum need none."""
    vocab_size = logits_RV.shape[1]
    best_R, best_id_R = logits_RV.max(dim=1)
    best_noise_R = gumbel_noise(seeds_R, positions_R, first_token + best_id_R[:, None])[:, 0]
    hopeless_R = best_noise_R - (LARGEST_NOISE + 0.01)
    chosen = []
    for row, (seed, position) in enumerate(
        zip(seeds_R.tolist(), positions_R.tolist(), strict=True)
    ):
        logits_V = logits_RV[row] - best_R[row]
        token_ids = np.flatnonzero(logits_V.numpy() >= float(hopeless_R[row]))
        if not len(token_ids):  # every token of this part of the vocabulary is impossible
            chosen.append(int(best_id_R[row]))
        elif len(token_ids) > vocab_size // _WORTH_SINGLING_OUT:
            noise_V = noise_of_vocabulary(seed, position, vocab_size, first_token)
            chosen.append(int(noise_V.add_(logits_V).argmax()))
        else:
            ids_C, one = torch.from_numpy(token_ids), slice(row, row + 1)
            noise_C = gumbel_noise(seeds_R[one], positions_R[one], first_token + ids_C[None])[0]
            chosen.append(int(ids_C[(noise_C + logits_V[ids_C]).argmax()]))
    return torch.tensor(chosen, dtype=torch.int64)


def sample_truncated(
    logits_RV: torch.Tensor,
    seeds_R: torch.Tensor,
    positions_R: torch.Tensor,
    limits: SamplingLimits,
) -> torch.Tensor:
    """One token a row, int64 [R], from what min_p, top_k and top_p leave, in that order.

    Equal to masking the rest with -inf and `sample_from_all`."""
    # The same width for every row, so that a row's arithmetic does not depend on its neighbours.
    width = min(logits_RV.shape[1], FIRST_CANDIDATES)
    values_RC, token_ids_RC = logits_RV.topk(width, dim=1)
    chosen_R, complete_R = sample_candidates(
        values_RC, token_ids_RC, logits_RV.logsumexp(dim=1), seeds_R, positions_R, limits
    )
    for row in (~complete_R).nonzero()[:, 0].tolist():
        kept_V = truncate_by_sorting(
            logits_RV[row],
            top_k=int(limits.top_k_R[row]),
            top_p=float(limits.top_p_R[row]),
            min_p=float(limits.min_p_R[row]),
        )
        chosen_R[row] = sample_from_all(
            kept_V[None], seeds_R[row : row + 1], positions_R[row : row + 1]
        )[0]
    return chosen_R


def sample_candidates(
    values_RC: torch.Tensor,
    token_ids_RC: torch.Tensor,
    log_total_R: torch.Tensor,
    seeds_R: torch.Tensor,
    positions_R: torch.Tensor,
    limits: SamplingLimits,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sample_truncated` from the likeliest tokens alone -> (int64 [R], bool [R]: whether the row
    needed no others; else its token is not meant).

    Args:
        values_RC: the C largest logits, falling.
        log_total_R: logarithm of the sum over the whole vocabulary.
    """
    chosen_R = torch.empty(len(values_RC), dtype=torch.int64)
    keep_RC, complete_R = _truncate(values_RC, log_total_R, limits)
    done = complete_R.nonzero()[:, 0]
    if done.numel():
        num_kept = int(keep_RC[done].sum(dim=1).max())
        kept_values = values_RC[done, :num_kept] - values_RC[done, :1]
        kept_values.masked_fill_(~keep_RC[done, :num_kept], -torch.inf)
        kept_ids = token_ids_RC[done, :num_kept]
        noise = gumbel_noise(seeds_R[done], positions_R[done], kept_ids)
        best = (kept_values + noise).argmax(dim=1, keepdim=True)
        chosen_R[done] = kept_ids.gather(1, best)[:, 0]
    return chosen_R, complete_R


def truncate_by_sorting(
    logits_V: torch.Tensor, *, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """A copy of one row with -inf where min_p, top_k and top_p, in that order, leave nothing.

    Among tokens that tie where top_p ends, those with the lowest ids stay."""
    logits = logits_V.numpy()
    falling = np.sort(logits)[::-1]
    num_kept = len(falling) if not top_k else int(np.count_nonzero(falling >= falling[top_k - 1]))
    if min_p > 0:
        num_kept = min(num_kept, int(np.count_nonzero(falling >= falling[0] + np.log(min_p))))
    if top_p < 1:
        weights = np.exp(falling[:num_kept].astype(np.float64) - falling[0])
        before = np.cumsum(weights) - weights
        num_kept = max(1, int(np.count_nonzero(before < top_p * weights.sum())))
    last = falling[num_kept - 1]
    keep = logits > last
    ties = np.flatnonzero(logits == last)
    keep[ties[: num_kept - np.count_nonzero(keep)]] = True
    return logits_V.masked_fill(torch.from_numpy(~keep), -torch.inf)


def _truncate(
    values_RC: torch.Tensor, log_total_R: torch.Tensor, limits: SamplingLimits
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the C largest logits, in falling order, survive; and whether nothing beyond them
    could. `log_total_R` is the logarithm of the sum over the whole vocabulary."""
    top_k_R, top_p_R, min_p_R = limits.top_k_R, limits.top_p_R, limits.min_p_R
    lowest_R = values_RC[:, 0] + min_p_R.log()
    limited_by_k_R = top_k_R > 0
    kth = (top_k_R - 1).clamp(0, values_RC.shape[1] - 1)
    kth_value_R = values_RC.gather(1, kth[:, None])[:, 0]
    lowest_R = torch.where(limited_by_k_R, torch.maximum(lowest_R, kth_value_R), lowest_R)
    keep_RC = values_RC >= lowest_R[:, None]
    complete_R = ~keep_RC[:, -1]
    # top_p works on what is left, renormalised; as long as that reaches beyond the candidates,
    # nothing was cut and the whole vocabulary is the total
    kept_total_R = values_RC.masked_fill(~keep_RC, -torch.inf).logsumexp(dim=1)
    total_R = torch.where(complete_R, kept_total_R, log_total_R)
    exact_R = complete_R | (~limited_by_k_R & (min_p_R == 0))
    probability_RC = (values_RC - total_R[:, None]).exp().mul_(keep_RC)
    before_RC = probability_RC.cumsum(dim=1) - probability_RC
    by_p_RC = (before_RC < top_p_R[:, None]) | (top_p_R[:, None] >= 1)
    by_p_RC[:, 0] = True
    complete_R = complete_R | (exact_R & ~by_p_RC[:, -1])
    return keep_RC & by_p_RC, complete_R


def best_of_masked_rows(
    logits_RV: torch.Tensor, index_M: torch.Tensor, bits_MW: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`best_of_rows` after tokens that a mask leaves out became impossible, in place; and what each
    row's largest logit was before.

    Args:
        index_M: int64, the row that each mask is for, none twice.
        bits_MW: int32, W = ceil(V / 32): bit t % 32 of word t // 32 is set where token t stays.
    """
    num_masks, vocab_size = len(index_M), logits_RV.shape[1]
    _, before_R = best_of_rows(logits_RV)
    stays_MWB = (bits_MW[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    stays_MV = stays_MWB.view(num_masks, -1)[:, :vocab_size].bool()
    logits_RV[index_M] = logits_RV[index_M].masked_fill(~stays_MV, -torch.inf)
    return *best_of_rows(logits_RV), before_R


def apply_penalties(
    logits_V: torch.Tensor,
    prompt_mask_V: torch.Tensor,
    output_counts_V: torch.Tensor,
    penalties: Penalties,
) -> None:
    """Penalise, in place, tokens of one row that were there before.

    Repetition (Keskar et al., CTRL, 2019) over prompt and output: positive logits are divided,
    negative ones multiplied. Frequency and presence over the output: subtracted once an
    occurrence, and once at all.

    Args:
        prompt_mask_V: bool, tokens of the prompt: they count for repetition only.
        output_counts_V: float32, occurrences in the output.
    """
    in_output_V = output_counts_V > 0
    repetition_penalty = penalties.repetition_penalty
    if repetition_penalty != 1.0:
        seen = (prompt_mask_V | in_output_V).nonzero()[:, 0]
        values = logits_V[seen]
        logits_V[seen] = torch.where(
            values > 0, values / repetition_penalty, values * repetition_penalty
        )
    if penalties.frequency_penalty != 0.0:
        logits_V -= penalties.frequency_penalty * output_counts_V
    if penalties.presence_penalty != 0.0:
        logits_V -= penalties.presence_penalty * in_output_V


def token_logprobs(
    logits_RV: torch.Tensor, token_ids_RN: torch.Tensor, num_top: int
) -> TokenLogprobs:
    """See `SamplingOperations.token_logprobs`."""
    logprobs_RV = logits_RV.log_softmax(dim=1)
    own_RN = logprobs_RV.gather(1, token_ids_RN)
    ranks_R = (logprobs_RV > own_RN[:, :1]).sum(dim=1) + 1
    top_RK, top_ids_RK = logprobs_RV.topk(num_top, dim=1)
    return TokenLogprobs(own_RN=own_RN, ranks_R=ranks_R, top_ids_RK=top_ids_RK, top_RK=top_RK)
