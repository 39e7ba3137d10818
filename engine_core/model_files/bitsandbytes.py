"""Linear layers of a folder that bitsandbytes has quantised (Dettmers et al., 2022 and 2023).

4 bits   weight uint8 [N * E / 2, 1]: places in weight.quant_map, the first of two inputs in the
         high bits; a scale in weight.absmax for so many numbers as weight.quant_state says.
         Nested: absmax is uint8, places in weight.nested_quant_map, with weight.nested_absmax
         and an offset
8 bits   weight int8 [N, E]; W = weight * SCB / 127
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from engine_core.model_files.errors import BrokenModelFile
from engine_core.model_files.quantised_layers import (
    GROUP_INPUTS,
    Fields,
    LayerTensors,
    NotRead,
    unpacked,
)

if TYPE_CHECKING:
    import torch

    from kernels.interface.weights import GroupedCodes, QuantisedTensor, WeightPart

    Arrays = Mapping[str, torch.Tensor]

_LARGEST = 127


def read_bitsandbytes(fields: Fields) -> LayerTensors:
    """What config.json says. Raises NotRead: neither 8 bits nor nf4 or fp4."""
    if fields.get("load_in_8bit"):
        needed = frozenset({"weight", "SCB"})
        return LayerTensors("bnb-int8", needed, _int8, unused=frozenset({"weight_format"}))
    kind = fields.get("bnb_4bit_quant_type", "fp4")
    if not fields.get("load_in_4bit") or kind not in ("nf4", "fp4"):
        raise NotRead(f"in the type {kind}, not nf4, fp4 or 8 bits")
    state = f"weight.quant_state.bitsandbytes__{kind}"
    return LayerTensors(
        type_name=f"bnb-{kind}",
        needed=frozenset({"weight", "weight.absmax", "weight.quant_map", state}),
        as_one=partial(_four_bits, f"bnb-{kind}", state),
        allowed=frozenset({"weight.nested_absmax", "weight.nested_quant_map"}),
    )


def _int8(prefix: str, arrays: Arrays) -> QuantisedTensor:
    import torch

    from kernels.interface.weights import GroupedCodes, QuantisedTensor

    codes_NE, largest_N = arrays["weight"], arrays["SCB"].float().flatten()
    if codes_NE.dtype != torch.int8 or codes_NE.ndim != 2 or len(codes_NE) != len(largest_N):
        raise BrokenModelFile(
            f"{prefix}: weight is {codes_NE.dtype} {list(codes_NE.shape)} and SCB has "
            f"{len(largest_N)} numbers; int8 [N, E] and N belong together: download them again"
        )
    num_inputs = codes_NE.shape[1]
    is_whole = not num_inputs % GROUP_INPUTS
    return QuantisedTensor(
        type_name="bnb-int8",
        shape=(len(codes_NE), num_inputs),
        arrays={"codes": codes_NE, "scales": largest_N[:, None] / _LARGEST},
        decode=lambda given: GroupedCodes(given["codes"], given["scales"]),
        block_inputs=GROUP_INPUTS * is_whole,
        blocks="Q8_0" * is_whole,
    )


def _four_bits(type_name: str, state_name: str, prefix: str, arrays: Arrays) -> WeightPart:
    from kernels.interface.weights import GroupedCodes, QuantisedTensor

    octets, table = arrays["weight"].flatten(), arrays["weight.quant_map"].float()
    try:
        state = json.loads(bytes(arrays[state_name].tolist()))
        (num_outputs, num_inputs), size = state["shape"], int(state["blocksize"])
        scales = _scales(arrays, state)
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenModelFile(
            f"{prefix}: {state_name} says not how its weight is quantised ({error!r}); download "
            "the weights again"
        ) from error
    num_weights = num_outputs * num_inputs
    if len(octets) != -(-num_weights // 2) or len(scales) != -(-num_weights // size):
        raise BrokenModelFile(
            f"{prefix}: {len(octets)} bytes and {len(scales)} scales, not those of {num_outputs} "
            f"x {num_inputs} weights by {size}: download them again"
        )
    if num_inputs % size:  # blocks go on in the next row
        codes = _codes(octets[:, None]).flatten()[:num_weights].int()
        floats = table[codes].mul_(scales.repeat_interleave(size)[:num_weights])
        return floats.view(num_outputs, num_inputs)

    def decode(given: Arrays) -> GroupedCodes:
        return GroupedCodes(_codes(given["codes"]), given["scales"], table=table)

    return QuantisedTensor(
        type_name=type_name,
        shape=(num_outputs, num_inputs),
        arrays={
            "codes": octets.view(num_outputs, -1),
            "scales": scales.view(num_outputs, -1),
        },
        decode=decode,
        block_inputs=size,
        blocks="Q8_0",
    )


def _codes(octets: torch.Tensor) -> torch.Tensor:
    """uint8 [A, C] -> [A, 2 * C], the high halves first."""
    swapped = (octets >> 4) | (octets << 4)
    return unpacked(swapped, 4)


def _scales(arrays: Arrays, state: Mapping[str, float]) -> torch.Tensor:
    largest = arrays["weight.absmax"]
    if "nested_blocksize" not in state:
        return largest.float()
    of_blocks = arrays["weight.nested_absmax"].float()
    values = arrays["weight.nested_quant_map"].float()[largest.int()]
    each = of_blocks.repeat_interleave(int(state["nested_blocksize"]))[: len(largest)]
    return values.mul_(each).add_(state["nested_offset"])
