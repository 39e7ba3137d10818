"""What recurrent kernels ask of a step's requests, on the device."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels.interface.operations import AttentionMetadata
from kernels.interface.recurrence import Part
from kernels.triton.tensor_checks import check_tensor


@triton.jit
def follows(
    query_start_loc_R1,  # int32 [R + 1]
    seq_lens_R,  # int32 [R]
    block_table_RM,  # int32 [R, M]
    num_requests,
    table_stride,
    request,  # a number, or a tensor of them
    S: tl.constexpr,
):
    """Whether a request goes on behind the one before it in the batch, in whose block, a token
    each: so drafts of a sequence lie. Whatever computes the first of them computes them all, in
    their order. Their tables are alike as far as each one's tokens reach, and no further."""
    inside = (request > 0) & (request < num_requests)
    before = tl.where(inside, request - 1, 0)
    start = tl.load(query_start_loc_R1 + before)
    middle = tl.load(query_start_loc_R1 + before + 1)
    stop = tl.load(query_start_loc_R1 + before + 2, mask=inside, other=0)
    length = tl.load(seq_lens_R + before + 1, mask=inside, other=0)
    follows = inside & (middle - start == 1) & (stop - middle == 1)
    follows = follows & (length == tl.load(seq_lens_R + before) + 1)
    entry = block_table_RM + before.to(tl.int64) * table_stride + (length - 2) // S
    own = tl.load(entry + table_stride, mask=follows, other=0)
    return follows & (own != 0) & (own == tl.load(entry, mask=follows, other=0))


def step_tensors(metadata: AttentionMetadata) -> tuple[torch.Tensor, ...]:
    """The first three arguments of `follows`."""
    return metadata.query_start_loc_R1, metadata.seq_lens_R, metadata.block_table_RM


def check_step(metadata: AttentionMetadata, device: torch.device) -> None:
    """Raises ValueError: tables of another shape, dtype or device."""
    (num_requests,), table_RM = metadata.seq_lens_R.shape, metadata.block_table_RM
    check_tensor("seq_lens_R", metadata.seq_lens_R, (num_requests,), torch.int32, device)
    starts_R1 = metadata.query_start_loc_R1
    check_tensor("query_start_loc_R1", starts_R1, (num_requests + 1,), torch.int32, device)
    shape = (num_requests, table_RM.shape[-1])
    check_tensor("block_table_RM", table_RM, shape, torch.int32, device, contiguous_dims=1)


def check_cache(parts: Sequence[tuple[str, torch.Tensor, Part]], device: torch.device) -> None:
    """Raises ValueError: parts of a cache that are not so, or not side by side in its blocks."""
    stride = parts[0][1].stride(0)
    for name, part, (shape, dtype) in parts:
        wanted = (len(part), *shape)
        check_tensor(name, part, wanted, dtype, device, contiguous_dims=len(shape))
        if part.stride(0) != stride:
            raise ValueError(
                f"blocks of {name} are {part.stride(0)} numbers apart, those of {parts[0][0]} "
                f"{stride}; make all views of the same blocks"
            )
