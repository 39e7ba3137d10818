"""Choosing tokens with the native library; the noise is that of `kernels.torch.sampling`."""

import torch

from kernels.cpu.library import FLOAT, INT64, POINTER, NativeLibrary, check
from kernels.cpu.tensor_checks import check_tensor
from kernels.interface.sampling import Penalties, SamplingLimits, TokenLogprobs


class NativeSampling:
    """The methods of `Operations` that choose tokens. Each raises ValueError for a tensor of
    another dtype or shape than it says."""

    def __init__(self, library: NativeLibrary) -> None:
        self._sample = library.function(
            "ec_sample", POINTER, *[INT64] * 3, *[POINTER] * 5, INT64, POINTER
        )
        self._best_of_rows = library.function(
            "ec_best_of_rows", POINTER, *[INT64] * 3, *[POINTER] * 5
        )
        self._token_logprobs = library.function(
            "ec_token_logprobs", POINTER, *[INT64] * 3, POINTER, *[INT64] * 2, *[POINTER] * 4
        )
        self._penalise = library.function("ec_penalise", *[POINTER] * 3, INT64, *[FLOAT] * 3)

    def token_logprobs(
        self, logits_RV: torch.Tensor, token_ids_RN: torch.Tensor, num_top: int
    ) -> TokenLogprobs:
        logits_RV = _rows(logits_RV)
        num_rows, vocab_size = logits_RV.shape
        token_ids_RN = token_ids_RN.contiguous()
        num_ids = token_ids_RN.shape[1]
        check_tensor("token_ids", token_ids_RN, (num_rows, num_ids), torch.int64)
        found = TokenLogprobs(
            own_RN=torch.empty(num_rows, num_ids),
            ranks_R=torch.empty(num_rows, dtype=torch.int64),
            top_ids_RK=torch.empty(num_rows, num_top, dtype=torch.int64),
            top_RK=torch.empty(num_rows, num_top),
        )
        check(
            self._token_logprobs(
                logits_RV.data_ptr(),
                logits_RV.stride(0),
                num_rows,
                vocab_size,
                token_ids_RN.data_ptr(),
                num_ids,
                num_top,
                found.own_RN.data_ptr(),
                found.ranks_R.data_ptr(),
                found.top_ids_RK.data_ptr(),
                found.top_RK.data_ptr(),
            )
        )
        return found

    def best_of_rows(self, logits_RV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_RV = _rows(logits_RV)
        num_rows, vocab_size = logits_RV.shape
        ids_R = torch.empty(num_rows, dtype=torch.int64)
        best_R = torch.empty(num_rows, dtype=torch.float32)
        check(
            self._best_of_rows(
                logits_RV.data_ptr(),
                logits_RV.stride(0),
                num_rows,
                vocab_size,
                ids_R.data_ptr(),
                best_R.data_ptr(),
                None,
                None,
                None,
            )
        )
        return ids_R, best_R

    def sample(
        self,
        logits_RV: torch.Tensor,
        seeds_R: torch.Tensor,
        positions_R: torch.Tensor,
        limits: SamplingLimits | None = None,
        first_token: int = 0,
    ) -> torch.Tensor:
        logits_RV = _rows(logits_RV)
        num_rows, vocab_size = logits_RV.shape
        seeds_R = _column("seeds", seeds_R, num_rows, torch.int64)
        positions_R = _column("positions", positions_R, num_rows, torch.int64)
        kept: list[torch.Tensor] = []
        if limits is not None:
            kept = [
                _column("top_k", limits.top_k_R, num_rows, torch.int64),
                _column("top_p", limits.top_p_R, num_rows, torch.float32),
                _column("min_p", limits.min_p_R, num_rows, torch.float32),
            ]
        chosen_R = torch.empty(num_rows, dtype=torch.int64)
        check(
            self._sample(
                logits_RV.data_ptr(),
                logits_RV.stride(0),
                num_rows,
                vocab_size,
                seeds_R.data_ptr(),
                positions_R.data_ptr(),
                *([tensor.data_ptr() for tensor in kept] or (None, None, None)),
                first_token,
                chosen_R.data_ptr(),
            )
        )
        return chosen_R

    def best_of_masked_rows(
        self, logits_RV: torch.Tensor, index_M: torch.Tensor, bits_MW: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if logits_RV.dtype is not torch.float32 or logits_RV.stride(1) != 1:
            raise ValueError("logits must be float32 with contiguous rows, to be changed in place")
        num_rows, vocab_size = logits_RV.shape
        shape = (len(index_M), -(-vocab_size // 32))
        check_tensor("index", index_M, shape[:1], torch.int64)
        check_tensor("bits", bits_MW, shape, torch.int32)
        mask_of_R = torch.full((num_rows,), -1, dtype=torch.int64)
        mask_of_R[index_M] = torch.arange(len(index_M))
        ids_R = torch.empty(num_rows, dtype=torch.int64)
        best_R, before_R = torch.empty(num_rows), torch.empty(num_rows)
        check(
            self._best_of_rows(
                logits_RV.data_ptr(),
                logits_RV.stride(0),
                num_rows,
                vocab_size,
                ids_R.data_ptr(),
                best_R.data_ptr(),
                mask_of_R.data_ptr(),
                bits_MW.data_ptr(),
                before_R.data_ptr(),
            )
        )
        return ids_R, best_R, before_R

    def apply_penalties(
        self,
        logits_V: torch.Tensor,
        prompt_mask_V: torch.Tensor,
        output_counts_V: torch.Tensor,
        penalties: Penalties,
    ) -> None:
        size = logits_V.shape[0]
        check_tensor("logits", logits_V, (size,))
        check_tensor("prompt_mask", prompt_mask_V, (size,), torch.bool)
        check_tensor("output_counts", output_counts_V, (size,))
        check(
            self._penalise(
                logits_V.data_ptr(),
                prompt_mask_V.data_ptr(),
                output_counts_V.data_ptr(),
                size,
                penalties.repetition_penalty,
                penalties.presence_penalty,
                penalties.frequency_penalty,
            )
        )


def _rows(logits_RV: torch.Tensor) -> torch.Tensor:
    if logits_RV.dtype is not torch.float32:
        raise ValueError(f"logits are {logits_RV.dtype}, they must be float32")
    if logits_RV.stride(1) != 1 and logits_RV.shape[1] > 1:
        return logits_RV.contiguous()
    return logits_RV


def _column(name: str, values_R: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    values_R = values_R.contiguous()
    check_tensor(name, values_R, (size,), dtype)
    return values_R
