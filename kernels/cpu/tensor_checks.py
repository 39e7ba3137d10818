"""What an operation of the native library asks of a tensor before it takes its address."""

import torch


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> None:
    """Raises ValueError: another dtype or shape, or gaps."""
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}; it "
            f"must be contiguous {dtype} of {tuple(shape)}"
        )


def optional_address(name: str, values: torch.Tensor | None, size: int) -> int | None:
    """Address of so many contiguous float32, checked; None for None."""
    if values is None:
        return None
    check_tensor(name, values, (size,))
    return values.data_ptr()
