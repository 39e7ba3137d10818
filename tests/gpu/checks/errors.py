"""How far a kernel's result is from its reference, as one number."""

from collections.abc import Callable, Sequence

import torch

INVARIANT_ROWS = (1, 2, 17, 64, 65, 127, 128, 129, 300, 1024)
"""Sizes of batches in which a row must have the same bits."""


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill in place with what no result may contain, so that what is not written shows."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(torch.iinfo(tensor.dtype).min)


def scaled_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest difference over the largest magnitude of the reference (or 1 if that is 0).

    NaN where either has one. Minus infinity at the same place in both counts as equal.
    """
    if out.shape != reference.shape:
        raise ValueError(f"shape {tuple(out.shape)}, the reference has {tuple(reference.shape)}")
    ours, theirs = out.double(), reference.double()
    difference = torch.where(ours == theirs, 0.0, (ours - theirs).abs())
    if difference.numel() == 0:
        return 0.0
    finite = theirs[theirs.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    # max() of torch passes NaN on
    return float(difference.max()) / (scale or 1.0)


def row_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """`scaled_error` row by row (last dimension); the worst."""
    if out.shape != reference.shape:
        raise ValueError(f"shape {tuple(out.shape)}, the reference has {tuple(reference.shape)}")
    if out.numel() == 0:
        return 0.0
    ours, theirs = out.double(), reference.double()
    scale = theirs.abs().amax(-1)
    difference = (ours - theirs).abs().amax(-1)
    return float((difference / torch.where(scale == 0, 1.0, scale)).max())


def num_different(out: torch.Tensor, reference: torch.Tensor) -> float:
    """How many elements differ, for results that must be the same bit for bit."""
    if out.shape != reference.shape or out.dtype != reference.dtype:
        raise ValueError(
            f"{out.dtype} {tuple(out.shape)}, the reference is {reference.dtype} "
            f"{tuple(reference.shape)}"
        )
    return float((out != reference).sum())


def num_different_in_batches(
    product: Callable[[slice], torch.Tensor], rows: Sequence[int] = INVARIANT_ROWS
) -> float:
    """Elements of the first and last rows of a batch that are not what the largest batch has.
    `product`: the results of some of its rows, computed by themselves."""
    most = max(rows)
    whole_TN = product(slice(most))
    different = 0.0
    for number in rows:
        for some in (slice(number), slice(most - number, most)):
            different += num_different(product(some), whole_TN[some])
    return different


def worst(*errors: float) -> float:
    """The largest; NaN if one is."""
    return float(torch.tensor(errors, dtype=torch.float64).max())
