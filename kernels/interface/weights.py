"""Weights that a backend keeps in a layout of its own, made of a file's quantised values or floats,
and how tokens find those of experts.

file -> QuantisedTensor or torch.Tensor, part by part -> WeightPacking.pack -> LinearWeight"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

import torch

ExpertActivation = Literal["silu", "relu2", "swiglu_oai", "gelu_tanh"]
"""What an expert does between its products: silu(gate) * up, relu(up)^2 without a gate,
(up + 1) * gate * sigmoid(1.702 gate) of gates up to 7 and ups from -7 to 7 (gpt-oss), or
gelu(gate, tanh approximation) * up."""

RouterScores = Literal["softmax", "sigmoid"]
"""What a router's logits become: softmax over all experts, or the sigmoid of each."""

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0

_LEAST_GROUP_INPUTS = 32
"""Of a scale, in the smallest groups that every backend computes with."""

ExpertBiases = tuple[torch.Tensor, torch.Tensor]
"""Of all experts' products: [X, 2F] (without a gate [X, F]) and [X, E]."""


class LinearWeight(Protocol):
    """A weight in the layout its backend computes with; made by `Operations.prepare_linear`
    or by `WeightPacking.pack`."""

    @property
    def num_inputs(self) -> int: ...

    @property
    def num_outputs(self) -> int: ...


class ExpertWeights(Protocol):
    """The experts of one layer in the layout of their backend; made by `prepare_experts`."""

    @property
    def num_experts(self) -> int: ...


def check_experts(
    gate_up: Sequence[int],
    down: Sequence[int],
    activation: ExpertActivation,
    biases: ExpertBiases | None = None,
) -> None:
    """Raises ValueError: experts of these shapes, [X, 2F, E] (without a gate [X, F, E]) and
    [X, E, F], or their biases, do not fit each other."""
    num_experts, width, features = down
    halves = 1 if activation == "relu2" else 2
    if tuple(gate_up) != (num_experts, halves * features, width):
        first = "[X, F, E]" if halves == 1 else "[X, 2F, E]"
        raise ValueError(
            f"gate_up weights are {tuple(gate_up)} and down weights {tuple(down)}; give {first} "
            "and [X, E, F]"
        )
    shapes = [tuple(each.shape) for each in biases or ()]
    if biases is not None and shapes != [tuple(gate_up[:2]), tuple(down[:2])]:
        raise ValueError(
            f"biases are {shapes[0]} and {shapes[1]}; give {tuple(gate_up[:2])} and "
            f"{tuple(down[:2])}"
        )


@dataclass(frozen=True, slots=True, eq=False)
class GroupedCodes:
    """A matrix [N, E] as codes with a scale for some inputs of a row, however its file packs them.

        W[n, k] = scales[n, g] * (codes[n, k] - zeros[n, g])     g = k // (E / G)
        W[n, k] = scales[n, g] * table[codes[n, k]]

    Attributes:
        codes_NE: uint8, int8 or float8_e4m3fn.
        scales_NG: float32.
        zeros_NG: of codes that count from 0: whole numbers of any type, or float32.
        table: float32 [16], what uint8 codes are places in.
    """

    codes_NE: torch.Tensor
    scales_NG: torch.Tensor
    zeros_NG: torch.Tensor | None = None
    table: torch.Tensor | None = None

    def dequantise(self) -> torch.Tensor:
        """float32 [N, E]."""
        codes_NGI = self.codes_NE.reshape(*self.scales_NG.shape, -1)
        w_NGI = codes_NGI.float() if self.table is None else self.table[codes_NGI.int()]
        if self.zeros_NG is not None:
            w_NGI -= self.zeros_NG.float()[..., None]
        return w_NGI.mul_(self.scales_NG[..., None]).view(self.codes_NE.shape)


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedTensor:
    """A matrix [N, E] in the quantised values that a file holds.

    Attributes:
        type_name: what `arrays` mean: GGUF's name of a block type, such as "Q4_1", or
            "gptq-int4", "gptq-int8", "gptq_v2-int4", "gptq_v2-int8", "awq-int4", "fp8",
            "fp8-block", and the last two with "-w8a16": activations are not rounded; "mxfp4"; and
            "w4a16", "w8a16", "w8a8", "nvfp4", "bnb-nf4", "bnb-fp4", "bnb-int8", which `decode`
            tells all of.
        shape: (N, E).
        arrays: by name. Of a GGUF type there is one: "blocks", uint8 [N, bytes a row], each row a
            whole number of blocks. Of GPTQ and AWQ there are "qweight", "qzeros" and "scales" as
            their libraries lay them out. Of float8 there are "weight", float8_e4m3fn [N, E],
            "weight_scale", float32 [N, G], one a row or one for each 128 inputs, and "input_scale",
            float32 [1], where activations have one scale. Of "mxfp4": "blocks", uint8 [N, 16 * G],
            and "scales", uint8 [N, G], one for 32 inputs. May be mapped from a file: they are read
            when asked for.
        decode: such arrays -> the values that the type defines, float32 [n, E] or as codes.
        row_order_N: int64; row i of the matrix is row `row_order_N[i]` of every array. None: as it
            is; always so where rows of the arrays are not the matrix's.
        block_inputs: of one block: columns are cut between two; 0: of types that are not cut.
        inputs_first: arrays have inputs in dimension 0 and outputs, packed or not, in dimension 1.
        blocks: the GGUF type whose blocks hold these numbers or the nearest, for a backend of such
            blocks; `decode` gives codes then, except of "mxfp4". Empty: none.
    """

    type_name: str
    shape: tuple[int, int]
    arrays: Mapping[str, torch.Tensor]
    decode: Callable[[Mapping[str, torch.Tensor]], torch.Tensor | GroupedCodes]
    row_order_N: torch.Tensor | None = None
    block_inputs: int = 0
    inputs_first: bool = False
    blocks: str = ""

    @property
    def has_rows(self) -> bool:
        """Whether `rows` can take some."""
        return not self.inputs_first

    def ordered(self) -> Mapping[str, torch.Tensor]:
        """The arrays, with the rows of the matrix in order; shares memory where it can."""
        if self.row_order_N is None:
            return self.arrays
        order = self.row_order_N
        return {name: a if a.ndim < 2 else a[order] for name, a in self.arrays.items()}

    def dequantise(self) -> torch.Tensor:
        """float32 [N, E]."""
        values = self.decode(self.ordered())
        return values if isinstance(values, torch.Tensor) else values.dequantise()

    def rows(self, rows_N: torch.Tensor) -> QuantisedTensor:
        """These rows, int64, in this order; where `has_rows`."""
        order = rows_N if self.row_order_N is None else self.row_order_N[rows_N]
        return replace(self, shape=(len(rows_N), self.shape[1]), row_order_N=order)

    def narrow(
        self, dim: int, start: int, stop: int, *, num_zeros: int = 0
    ) -> QuantisedTensor | None:
        """Rows (dim 0) or columns (dim 1) [start, stop), then rows of zeros; of mapped arrays
        nothing but these is ever read. None: the type or its blocks cannot be cut so."""
        if not self.block_inputs:
            return None
        if self.inputs_first:
            return None if num_zeros else self._narrow_inputs_first(dim, start, stop)
        order = self.row_order_N
        num_rows, num_inputs = self.shape
        rows, blocks = slice(None), slice(None)
        if dim == 1:
            if start % self.block_inputs or stop % self.block_inputs:
                return None
            blocks = slice(start // self.block_inputs, stop // self.block_inputs)
            num_inputs = stop - start
        else:
            num_rows = stop - start
            order, rows = (None, slice(start, stop)) if order is None else (order[start:stop], rows)

        def cut(array: torch.Tensor) -> torch.Tensor:
            if array.ndim < 2:  # of the whole matrix
                return array
            if dim == 1 and array.shape[1] > 1:  # one is that of a row
                num_blocks = self.shape[1] // self.block_inputs
                array = array.view(len(array), num_blocks, -1)[:, blocks].flatten(1)
            array = array[rows]
            if num_zeros:
                array = array if order is None else array[order]
                zeros = torch.zeros(num_zeros, *array.shape[1:], dtype=array.dtype)
                array = torch.cat([array, zeros])
            return array

        return replace(
            self,
            shape=(num_rows + num_zeros, num_inputs),
            arrays={name: cut(array) for name, array in self.arrays.items()},
            row_order_N=None if num_zeros else order,
        )

    def _narrow_inputs_first(self, dim: int, start: int, stop: int) -> QuantisedTensor | None:
        # outputs are cut between words of several; inputs that part a group make all groups smaller
        width = self.shape[dim]
        a_word = max(width // array.shape[1] for array in self.arrays.values())
        step = math.gcd(start, stop, self.block_inputs) if dim else a_word
        if start % step or stop % step or (dim and step < _LEAST_GROUP_INPUTS):
            return None

        def cut(array: torch.Tensor) -> torch.Tensor:
            if dim and len(array) == 1:  # that of a row
                return array
            if dim and len(array) == width // self.block_inputs:
                array = array.repeat_interleave(self.block_inputs // step, 0)
            size = array.shape[1 - dim]
            return array.narrow(1 - dim, start * size // width, (stop - start) * size // width)

        shape = (stop - start, self.shape[1]) if dim == 0 else (self.shape[0], stop - start)
        return replace(
            self,
            shape=shape,
            arrays={name: cut(each) for name, each in self.arrays.items()},
            block_inputs=step if dim else self.block_inputs,
        )


def mxfp4_as_gguf(arrays: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The arrays of "mxfp4" as the "blocks" of GGUF's MXFP4 -> uint8 [N, 17 * G].

    mxfp4   a scale apart; 16 bytes: inputs 0 and 1, 2 and 3, ...
    MXFP4   17 bytes: the scale; inputs 0 and 16, 1 and 17, ...
    """
    scales_NG = arrays["scales"]
    given = arrays["blocks"].reshape(*scales_NG.shape, 2, 8)
    low, high = given[:, :, 0], given[:, :, 1]
    blocks_NGB = torch.empty(*scales_NG.shape, 17, dtype=torch.uint8)
    blocks_NGB[:, :, 0] = scales_NG
    blocks_NGB[:, :, 1::2] = (low & 15) | (high << 4)
    blocks_NGB[:, :, 2::2] = (low >> 4) | (high & 0xF0)
    return blocks_NGB.flatten(1)


WeightPart = torch.Tensor | QuantisedTensor
"""[n, E]: outputs of a layer that follow one another, as a checkpoint holds them."""


class PackedFileError(Exception):
    """A file of packed weights is not there, broken, or of another version; the text says which."""


class WeightPacking(Protocol):
    """The packed weights of one model. `open` or `create` first, if at all; then every `pack`; then
    `save`."""

    def pack(
        self,
        name: str,
        parts: Sequence[WeightPart],
        bias_N: torch.Tensor | None = None,
        *,
        least_bits: int = 4,
    ) -> LinearWeight:
        """One weight for `Operations.linear`, of parts whose outputs stand side by side.

        A weight that `open` has found under this name is taken from there, and the parts are not
        read. The caller drops them. A weight of one part serves `Operations.embedding`, too.
        Raises ValueError: parts that do not fit each other, or values that the format cannot hold.

        Args:
            name: of the layer, unlike any other's.
            parts: floating, or quantised in any type, in host memory; all of equal inputs. Types
                that the backend does not run are dequantised.
            least_bits: floating parts are kept in no fewer bits than these: 32 for what must stay
                as it is, 8 for what suffers from 4.
        """

    def pack_experts(
        self,
        name: str,
        gate_up: Sequence[WeightPart],
        down: Sequence[WeightPart],
        activation: ExpertActivation = "silu",
        biases: ExpertBiases | None = None,
    ) -> ExpertWeights:
        """The experts of one layer for `Operations.mixture_of_experts`, as `pack`. If parts of a
        side (a backend may ask it of both) differ in their format, all of them count as floating.

        Args:
            gate_up: gate and up, each [F, E], of each expert in turn; up alone without a gate.
            down: [E, F] of each expert.
        """

    def open(self, file: Path) -> None:
        """Take weights from a file that `save` has written for the same model and format.
        Raises PackedFileError: nothing was taken."""

    def create(self, folder: Path, most_bytes: int) -> None:
        """Pack what is quantised into the pages of a file there, of which `save` makes one to open.
        When the disk is full or `most_bytes` are taken the rest goes to other memory, and `save`
        says why. Raises OSError: there can be no such file."""

    def num_bytes_to_save(self) -> int:
        """All that is quantised; 0 if none of it is new to the file that was opened."""

    def save(self, file: Path, made_of: Iterable[str] = ()) -> Callable[[], None]:
        """Let all that is quantised become `file`. The last call for this model.

        Returns what waits for the disk, for a thread: `file` gets its name when all is written.
        Both raise OSError: it cannot be. `made_of`: paths of the model's files."""

    def num_mapped_bytes(self) -> int:
        """Of the weights packed so far, those in pages of a file: the system may drop them."""

    def bytes_by_format(self) -> Mapping[str, int]:
        """What the weights packed so far take, by the name of their format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRouting:
    """How `Operations.mixture_of_experts` chooses and weighs the experts of a token.

    Attributes:
        top_k: experts a token, in [1, X].
        renormalise: a token's weights are divided by their sum plus `epsilon`.
        scores: of a token's logits: softmax, or the sigmoid of each.
        bias_X: float32, added to scores where experts are chosen, not where they are weighed
            (arXiv:2408.15664).
        num_groups: of as many experts that follow one another; a token's are of `top_groups`.
        top_groups: those with the largest sum of their two best, of softmaxes with the largest one
            (arXiv:2412.19437, 2405.04434).
        scale: on weights, last.
        scale_X: float32, on weights of each expert.
        weights_dtype: what they are rounded to: float32 (Mixtral), the model's (Qwen3-MoE).
        first_expert: of those whose weights are here; the others add nothing. On a CPU alone.
    """

    top_k: int
    renormalise: bool
    scores: RouterScores = "softmax"
    bias_X: torch.Tensor | None = None
    num_groups: int = 1
    top_groups: int = 1
    epsilon: float = 0.0
    scale: float = 1.0
    scale_X: torch.Tensor | None = None
    weights_dtype: torch.dtype = torch.float32
    first_expert: int = 0

    @property
    def best_of_group(self) -> int:
        """How many scores of a group, the largest ones, rank it."""
        return 2 if self.scores == "sigmoid" else 1

    def check(self, num_experts: int) -> None:
        """Raises ValueError: experts of that number cannot be routed to so."""
        size, rest = divmod(num_experts, self.num_groups)
        if rest or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"{self.top_groups} of {self.num_groups} groups of {num_experts} experts; groups "
                "must be of one size, and at most all of them are taken"
            )
        if not 1 <= self.top_k <= self.top_groups * size:
            raise ValueError(
                f"top_k is {self.top_k}; it must lie in [1, {self.top_groups * size}], the experts "
                "that a token may go to"
            )
