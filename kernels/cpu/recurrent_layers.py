"""What the native library knows of recurrent layers and gated norms: the mirror of
`src/recurrence.h`."""

import ctypes

import torch

from kernels.cpu.library import FLOAT, INT64, POINTER, members
from kernels.interface.recurrence import (
    ConvolutionParams,
    GatedNormParams,
    RecurrenceParams,
    RecurrentCache,
)

_FLOAT32 = torch.float32
_MOST_TAPS = 16
_RULES = ("plain", "delta", "discretised")
"""What is written of a value, in the order of `Rule` in src/recurrence.h."""


class RecurrentLayer(ctypes.Structure):
    """Mirrors `RecurrentLayer` of src/recurrence.h."""

    _fields_ = [
        *members(INT64, "num_key_heads", "num_heads", "key_size", "value_size", "decay_size"),
        *members(INT64, "num_channels", "width"),
        *members(POINTER, "states", "tails", "keys", "updates", "decays", "inputs"),
        *members(INT64, "block_stride", "num_blocks"),
        *members(POINTER, "weight", "bias"),
        ("silu", INT64),
        *members(POINTER, "rates", "rate_biases", "skips"),
        *members(INT64, "rule", "normed", "q_start", "k_start", "v_start"),
        ("q_scale", FLOAT),
        *members(INT64, "stride", "a_stride", "b_stride"),
        *members(POINTER, "qkv", "a", "b"),
    ]


class GatedNorm(ctypes.Structure):
    """Mirrors `GatedNorm` of src/recurrence.h."""

    _fields_ = [
        *members(POINTER, "gate", "weight"),
        *members(INT64, "gate_stride", "size", "weight_size", "transposed", "sigmoid"),
        ("gate_first", INT64),
        ("eps", FLOAT),
    ]


def layer_of(
    cache: RecurrentCache,
    convolution: ConvolutionParams | None = None,
    params: RecurrenceParams | None = None,
) -> RecurrentLayer:
    """A layer, which points into the tensors of its arguments; what is of a step is left."""
    given = convolution or params
    assert given is not None
    shape = given.shape
    layer = RecurrentLayer(
        num_key_heads=shape.num_key_heads,
        num_heads=shape.num_heads,
        key_size=shape.key_size,
        value_size=shape.value_size,
        decay_size=shape.decay_size,
        num_channels=shape.num_channels,
        width=shape.width,
        states=cache.states_BHNP.data_ptr(),
        tails=cache.tails_BVC.data_ptr(),
        keys=cache.keys_BSKN.data_ptr(),
        updates=cache.updates_BSHP.data_ptr(),
        decays=cache.decays_BSHD.data_ptr(),
        inputs=cache.inputs_BSC.data_ptr(),
        block_stride=(cache.inputs_BSC if shape.num_channels else cache.states_BHNP).stride(0) * 4,
        num_blocks=len(cache.states_BHNP),
    )
    if convolution is not None:
        layer.weight = _weight(convolution.weight_WC, shape.width * shape.num_channels)
        layer.bias = _weight(convolution.bias_C, shape.num_channels)
        layer.silu = convolution.silu
    if params is not None:
        layer.rates = _weight(params.rate_H, shape.num_heads)
        layer.rate_biases = _weight(params.bias_HD, shape.num_heads * shape.decay_size)
        layer.skips = _weight(params.skip_H, shape.num_heads)
        layer.rule, layer.normed = _RULES.index(params.rule), params.normed
        layer.q_start, layer.k_start, layer.v_start = params.starts
        layer.q_scale = params.q_scale
    return layer


def norm_of(params: GatedNormParams) -> GatedNorm:
    """A gated norm, whose gate is left."""
    return GatedNorm(
        weight=_weight(params.weight_N, params.weight_N.numel()),
        size=params.size,
        weight_size=params.weight_N.numel(),
        transposed=params.transposed,
        sigmoid=params.activation == "sigmoid",
        gate_first=params.gate_first,
        eps=params.eps,
    )


def takes(cache: RecurrentCache, width: int = 1) -> bool:
    """Whether the library reads such a cache and convolution."""
    dtypes = {cache.inputs_BSC.dtype, cache.states_BHNP.dtype}
    return dtypes == {_FLOAT32} and 1 <= width <= _MOST_TAPS


def check_gated(width: int, gate_width: int, params: GatedNormParams) -> None:
    """Raises ValueError: widths that do not fit each other."""
    weight_size, unit = params.weight_N.numel(), params.size * params.transposed
    if width != gate_width or width % weight_size or weight_size % params.size or width % unit:
        raise ValueError(
            f"rows of {width} and gates of {gate_width} are normed by {params.size}, with a weight "
            f"of {weight_size}; each must be a multiple of the next, rows of {unit}, gates as wide"
        )


def _weight(weight: torch.Tensor | None, size: int) -> int | None:
    if weight is None:
        return None
    if weight.dtype is not _FLOAT32 or weight.numel() != size or not weight.is_contiguous():
        raise ValueError(
            f"a recurrent layer's weight is {weight.dtype} {tuple(weight.shape)}, not contiguous "
            f"float32 of {size}"
        )
    return weight.data_ptr()
