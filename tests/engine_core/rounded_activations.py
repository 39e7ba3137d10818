"""Transformers' products with inputs as a CPU's quantised products see them. Not a test."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F


def in_bytes(x: torch.Tensor) -> torch.Tensor:
    """Rounded to signed bytes, with a scale for each 32 of the last dimension."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    scales = groups.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
    return (torch.round(groups / scales) * scales).reshape(x.shape)


@contextmanager
def inputs_in_bytes(weights: Iterable[torch.Tensor]) -> Iterator[None]:
    """Of products with these weights, or parts of them; other products are exact."""
    chosen, exact = {each.untyped_storage().data_ptr() for each in weights}, F.linear

    def linear(x, weight, bias=None):
        is_chosen = weight.untyped_storage().data_ptr() in chosen
        return exact(in_bytes(x) if is_chosen else x, weight, bias)

    with patch.object(F, "linear", linear):
        yield
