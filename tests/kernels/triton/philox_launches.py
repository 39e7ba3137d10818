"""The noise that the kernels add, of whole rows, and the CPU's."""

import torch
import triton
import triton.language as tl

from kernels.torch import sampling as reference
from kernels.triton.sampling.philox import gumbel_noise


def reference_noise(
    seeds_R: torch.Tensor, positions_R: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """Of every token, float32 [R, V] on the CPU."""
    ids_RV = torch.arange(vocab_size, device="cpu").expand(len(seeds_R), -1)
    return reference.gumbel_noise(seeds_R.cpu(), positions_R.cpu(), ids_RV)


@triton.jit
def _noise_kernel(
    seeds_ptr,  # int64 [R]
    positions_ptr,  # int64 [R]
    out_ptr,  # float32 [R, V]
    V,
    TILE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * TILE
    ids = first + tl.arange(0, TILE)  # [TILE]
    noise = gumbel_noise(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), first, TILE)
    tl.store(out_ptr + row * V + ids, noise, ids < V)


def noise_of_rows(
    seeds_R: torch.Tensor, positions_R: torch.Tensor, vocab_size: int
) -> torch.Tensor:
    """`gumbel_noise` of every token on the tensors' device, float32 [R, V]."""
    rows = seeds_R.shape[0]
    out_RV = torch.empty(rows, vocab_size, dtype=torch.float32, device=seeds_R.device)
    _noise_kernel[triton.cdiv(vocab_size, 1024), rows](
        seeds_R, positions_R, out_RV, vocab_size, TILE=1024
    )
    return out_RV
