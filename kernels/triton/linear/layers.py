"""Weights of dense layers on a GPU: in the model's dtype, or quantised, in parts side by side."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.interface.operations import Activation, RoundedRows
from kernels.interface.weights import (
    ExpertActivation,
    ExpertBiases,
    ExpertWeights,
    GroupedCodes,
    LinearWeight,
    PackedFileError,
    QuantisedTensor,
    WeightPart,
    mxfp4_as_gguf,
)
from kernels.triton.activation import gated_rounded
from kernels.triton.linear.dense import dense_linear
from kernels.triton.linear.experts import prepare_experts
from kernels.triton.linear.few_rows import FewRowsProducts
from kernels.triton.linear.fp8 import (
    Float8Weight,
    float8_linear,
    join_float8,
    multiply_rounded,
    prepare_float8,
)
from kernels.triton.linear.gguf_blocks import GGUF_TYPES, from_gguf
from kernels.triton.linear.grouped_codes import CODE_BITS, from_codes
from kernels.triton.linear.quantised import quantised_linear
from kernels.triton.linear.quantised_experts import QuantisedExperts
from kernels.triton.linear.quantised_weights import (
    INPUTS_A_SPAN,
    QuantisedWeight,
    dequantise,
    from_awq,
    from_float8,
    from_gptq,
    join_outputs,
    narrowed,
)
from kernels.triton.norm import add_rms_norm_rounded


@dataclass(frozen=True, slots=True)
class TritonLinearWeight:
    """[N, E] as it was loaded, and its bias."""

    weight_NE: torch.Tensor
    bias_N: torch.Tensor | None = None

    @property
    def num_inputs(self) -> int:
        return self.weight_NE.shape[1]

    @property
    def num_outputs(self) -> int:
        return self.weight_NE.shape[0]


@dataclass(frozen=True, slots=True)
class TritonQuantisedWeight:
    """A weight of 8 or 4 bits with its bias, for a model that computes in `dtype`; activations are
    rounded where it is a `Float8Weight`."""

    weight: QuantisedWeight | Float8Weight
    bias_N: torch.Tensor | None
    dtype: torch.dtype

    @property
    def num_inputs(self) -> int:
        return self.weight.num_inputs

    @property
    def num_outputs(self) -> int:
        return self.weight.num_outputs


@dataclass(frozen=True, slots=True)
class TritonWeightParts:
    """Weights of the same inputs, whose outputs stand side by side."""

    parts: tuple[TritonLinearWeight | TritonQuantisedWeight, ...]

    @property
    def num_inputs(self) -> int:
        return self.parts[0].num_inputs

    @property
    def num_outputs(self) -> int:
        return sum(part.num_outputs for part in self.parts)


def linear(
    x_TE: torch.Tensor,
    weight: LinearWeight,
    *,
    batch_invariant: bool,
    few_rows: FewRowsProducts | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias` -> [T, N], a new tensor.
    `batch_invariant`: a row has the same bits whatever stands beside it.
    `few_rows`: multiply what they take, in place of the library."""
    match weight:
        case TritonLinearWeight(weight_NE, bias_N):
            if few_rows is not None and few_rows.takes(x_TE, weight_NE):
                return few_rows.linear(x_TE, weight_NE, bias_N)
            product = dense_linear if batch_invariant else F.linear
            return product(x_TE, weight_NE, bias_N)
        case TritonQuantisedWeight(Float8Weight() as codes, bias_N):
            return float8_linear(x_TE, codes, bias_N, batch_invariant=batch_invariant)
        case TritonQuantisedWeight(QuantisedWeight() as codes, bias_N):
            return quantised_linear(x_TE, codes, bias_N, batch_invariant=batch_invariant)
        case TritonWeightParts():
            product = partial(linear, batch_invariant=batch_invariant, few_rows=few_rows)
            return torch.cat([product(x_TE, part) for part in weight.parts], dim=1)
    raise AssertionError(f"{type(weight).__name__} was prepared by another backend")


@dataclass(frozen=True, slots=True)
class Float8Inputs:
    """Implements `kernels.interface.operations.InputRounding` for a float8 weight."""

    weight: Float8Weight
    bias_N: torch.Tensor | None
    dtype: torch.dtype
    batch_invariant: bool

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[RoundedRows, torch.Tensor]:
        rows = add_rms_norm_rounded(x_TE, residual_TE, weight_E, eps, **self.weight.rounding)
        return RoundedRows(*rows), residual_TE

    def gated(self, gate_up_TF2: torch.Tensor, activation: Activation) -> RoundedRows:
        assert activation in ("silu", "gelu_tanh"), activation
        is_gelu = activation == "gelu_tanh"
        return RoundedRows(*gated_rounded(gate_up_TF2, is_gelu=is_gelu, **self.weight.rounding))

    def linear(self, rows: RoundedRows) -> torch.Tensor:
        return multiply_rounded(
            *rows, self.weight, self.bias_N, self.dtype, batch_invariant=self.batch_invariant
        )


def gather_rows(token_ids_T: torch.Tensor, weight_VE: torch.Tensor | LinearWeight) -> torch.Tensor:
    """Rows of an embedding for int64 ids in [0, V) -> [T, E], as `linear` multiplies with them.

    Few rows are widened by torch: its temporaries are float32 [T, E]."""
    match weight_VE:
        case torch.Tensor():
            return F.embedding(token_ids_T, weight_VE)
        case TritonLinearWeight():
            return F.embedding(token_ids_T, weight_VE.weight_NE)
        case TritonQuantisedWeight(QuantisedWeight() as table):
            return dequantise(table.rows(token_ids_T)).to(weight_VE.dtype)
    raise AssertionError(f"{type(weight_VE).__name__} is no embedding, or another backend's")


_NUMBERS_AT_ONCE = 1 << 26
"""Of blocks brought into the layout together: their temporaries take some bytes a number."""

_Arrays = Mapping[str, torch.Tensor]


def _gptq(arrays: _Arrays, *, num_bits: int, zeros_are_less_one: bool) -> QuantisedWeight:
    return from_gptq(
        arrays["qweight"],
        arrays["qzeros"],
        arrays["scales"],
        num_bits=num_bits,
        zeros_are_less_one=zeros_are_less_one,
    )


def _awq(arrays: _Arrays) -> QuantisedWeight:
    return from_awq(arrays["qweight"], arrays["qzeros"], arrays["scales"])


_BY_ARRAYS: Mapping[str, Callable[[_Arrays], QuantisedWeight]] = {
    "gptq-int4": partial(_gptq, num_bits=4, zeros_are_less_one=True),
    "gptq-int8": partial(_gptq, num_bits=8, zeros_are_less_one=True),
    "gptq_v2-int4": partial(_gptq, num_bits=4, zeros_are_less_one=False),
    "gptq_v2-int8": partial(_gptq, num_bits=8, zeros_are_less_one=False),
    "awq-int4": _awq,
}

_WEIGHT_ONLY = "-w8a16"
_FLOAT8 = frozenset({"fp8", "fp8-block", f"fp8{_WEIGHT_ONLY}", f"fp8-block{_WEIGHT_ONLY}"})

QUANTISED_TYPES = frozenset((*GGUF_TYPES, *_BY_ARRAYS, *CODE_BITS, "mxfp4")) | _FLOAT8
"""The types that stay quantised: GGUF's blocks, MXFP4's blocks and scales, the arrays of `GPTQ` and
`AWQ` checkpoints (qweight, qzeros, scales), float8 with its scales, and codes with scales."""

_Weight = torch.Tensor | QuantisedWeight | Float8Weight
"""[N, E] without a bias."""


class _Kind(NamedTuple):
    """What neighbouring parts must share to be one weight. Floating: ("", 0, 0). The name is that
    of the format that is reported."""

    type_name: str
    num_bits: int
    group_size: int


_FLOATING = _Kind("", 0, 0)


class TritonPacking:
    """
    Args:
        device: where the weights go.
        dtype: of the model: of everything that is not quantised here.
        rounds_to_float8: activations, where the files ask for it; else their weights are widened
            in registers: of devices whose tensor cores have no float8.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, rounds_to_float8: bool = True
    ) -> None:
        self._device = device
        self._rounds_to_float8 = rounds_to_float8
        self._dtype = dtype
        self._bytes: dict[str, int] = {}

    def pack(
        self,
        name: str,
        parts: Sequence[WeightPart],
        bias_N: torch.Tensor | None = None,
        *,
        least_bits: int = 4,  # floating parts stay floating
    ) -> LinearWeight:
        if len({part.shape[1] for part in parts}) != 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise ValueError(f"{name}: parts of shapes {shapes} do not take the same inputs")
        bias_N = None if bias_N is None else bias_N.to(self._device, self._dtype)
        loaded = [(*self._load(part), part.shape[0]) for part in parts]
        packed: list[TritonLinearWeight | TritonQuantisedWeight] = []
        start = 0
        for kind, group in groupby(loaded, lambda each: each[0]):
            _, weights, sizes = zip(*group, strict=True)
            stop = start + sum(sizes)
            bias = None if bias_N is None else bias_N[start:stop].contiguous()
            weight = self._join(kind, weights)
            packed.append(
                TritonLinearWeight(weight, bias)
                if isinstance(weight, torch.Tensor)
                else TritonQuantisedWeight(weight, bias, self._dtype)
            )
            start = stop
        return packed[0] if len(packed) == 1 else TritonWeightParts(tuple(packed))

    def pack_experts(
        self,
        name: str,
        gate_up: Sequence[WeightPart],
        down: Sequence[WeightPart],
        activation: ExpertActivation = "silu",
        biases: ExpertBiases | None = None,
    ) -> ExpertWeights:
        sides: list[QuantisedWeight | Float8Weight] = []
        for parts in (gate_up, down):
            kinds, weights = zip(*map(self._load, parts), strict=True)
            if len(set(kinds)) > 1 or kinds[0] == _FLOATING:
                stacks = [self._stacked(each, len(down)) for each in (gate_up, down)]
                return prepare_experts(stacks[0], stacks[1], activation, biases)
            weight = self._join(kinds[0], weights)
            assert not isinstance(weight, torch.Tensor)
            sides.append(weight)
        return QuantisedExperts(len(down), sides[0], sides[1], activation, biases)

    def _stacked(self, parts: Sequence[WeightPart], num_experts: int) -> torch.Tensor:
        """[X, N, E], floating."""
        num_rows, num_inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
        stack = torch.empty(num_rows, num_inputs, dtype=self._dtype, device=self._device)
        for place, part in zip(stack.split([part.shape[0] for part in parts]), parts, strict=True):
            place.copy_(part.dequantise() if isinstance(part, QuantisedTensor) else part)
        self._count(str(self._dtype).removeprefix("torch."), [stack])
        return stack.view(num_experts, -1, num_inputs)

    def open(self, file: Path) -> None:
        raise PackedFileError(f"{file}: a GPU's weights are not kept packed on disk")

    def create(self, folder: Path, most_bytes: int) -> None:
        raise OSError(f"{folder}: a GPU's weights are not kept packed on disk")

    def num_bytes_to_save(self) -> int:
        return 0

    def save(self, file: Path, made_of: Iterable[str] = ()) -> Callable[[], None]:
        raise OSError(f"{file}: a GPU's weights are not kept packed on disk")

    def num_mapped_bytes(self) -> int:
        return 0

    def bytes_by_format(self) -> Mapping[str, int]:
        return dict(self._bytes)

    def _load(self, part: WeightPart) -> tuple[_Kind, _Weight]:
        """The part on the device: in the layout, or floating."""
        if isinstance(part, torch.Tensor):
            return _FLOATING, part.to(self._device, self._dtype)
        is_float8 = part.type_name in _FLOAT8
        # float8 of fewer inputs than a span is what a cut for many ranks leaves
        if part.type_name not in QUANTISED_TYPES or (is_float8 and part.shape[1] % INPUTS_A_SPAN):
            return _FLOATING, part.dequantise().to(self._device, self._dtype)
        if is_float8:
            return self._float8(part)
        weight = self._codes(part) if part.type_name in CODE_BITS else self._quantised(part)
        if weight is None:
            return _FLOATING, part.dequantise().to(self._device, self._dtype)
        return _Kind(part.type_name, weight.num_bits, weight.group_size), weight

    def _float8(self, part: QuantisedTensor) -> tuple[_Kind, _Weight]:
        arrays = {name: each.to(self._device) for name, each in part.ordered().items()}
        codes, scales_NG = arrays["weight"], arrays["weight_scale"]
        name = part.type_name.removesuffix(_WEIGHT_ONLY)
        num_groups = scales_NG.shape[1]
        if name != part.type_name or not self._rounds_to_float8:
            return _Kind(name + _WEIGHT_ONLY, 8, num_groups), from_float8(codes, scales_NG)
        weight = prepare_float8(codes, scales_NG, arrays.get("input_scale"))
        return _Kind(name, 8, num_groups), weight

    def _codes(self, part: QuantisedTensor) -> QuantisedWeight | None:
        codes = part.decode(part.ordered())
        assert isinstance(codes, GroupedCodes), part.type_name
        zeros, table = codes.zeros_NG, codes.table
        there = GroupedCodes(
            codes.codes_NE.to(self._device),
            codes.scales_NG.to(self._device),
            None if zeros is None else zeros.to(self._device),
            None if table is None else table.to(self._device),
        )
        return from_codes(there, CODE_BITS[part.type_name])

    def _quantised(self, part: QuantisedTensor) -> QuantisedWeight:
        arrays = part.ordered()
        from_arrays = _BY_ARRAYS.get(part.type_name)
        if from_arrays is not None:
            return from_arrays({name: each.to(self._device) for name, each in arrays.items()})
        num_inputs, type_name = part.shape[1], part.type_name
        if type_name == "mxfp4":
            arrays, type_name = {"blocks": mxfp4_as_gguf(arrays)}, "MXFP4"
        rows_at_once = max(1, _NUMBERS_AT_ONCE // num_inputs)
        return join_outputs(
            [
                from_gguf(blocks.to(self._device), len(blocks), num_inputs, type_name)
                for blocks in arrays["blocks"].split(rows_at_once)
            ]
        )

    def _join(self, kind: _Kind, weights: Sequence[_Weight]) -> _Weight:
        floats = [each for each in weights if isinstance(each, torch.Tensor)]
        if floats:
            weight_NE = floats[0] if len(floats) == 1 else torch.cat(floats)
            self._count(str(self._dtype).removeprefix("torch."), [weight_NE])
            return weight_NE
        float8 = [each for each in weights if isinstance(each, Float8Weight)]
        if float8:
            weight = float8[0] if len(float8) == 1 else join_float8(float8)
            self._count(kind.type_name, [weight.weight_NE, weight.scales_NG])
            return weight
        quantised = [each for each in weights if isinstance(each, QuantisedWeight)]
        joined = narrowed(join_outputs(quantised))
        factors = (joined.scales_NG, joined.offsets_NG, joined.supers_NSC)
        self._count(kind.type_name, [joined.packed_NJ, *factors])
        return joined

    def _count(self, format_name: str, tensors: Sequence[torch.Tensor | None]) -> None:
        num_bytes = sum(each.nbytes for each in tensors if each is not None)
        self._bytes[format_name] = self._bytes.get(format_name, 0) + num_bytes
