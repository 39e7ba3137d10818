"""Random weights as a folder of some `quantization_config` holds them, to measure speed where no
weights are at hand: the tensors of a layer are drawn, and what reads such folders joins them."""

from __future__ import annotations

import dataclasses
import math
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine_core.model_files.errors import UnsupportedModelFile
from engine_core.model_files.float8 import Float8
from engine_core.model_files.quantised_layers import Fields, QuantisedLayers

if TYPE_CHECKING:
    import torch

    from kernels.interface.weights import WeightPart

_BLOCK = 128
_DEVIATION = 0.02
"""Standard deviation of weights, as models are initialised."""
_CODES = 100.0
"""Deviation of float8 numbers, of which the largest is 448."""
_INPUT_SCALE = 0.05
_NOT_QUANTISED = ("modules_to_not_convert", "ignore", "ignored_layers")
"""Fields that name layers which stay floating."""


class RandomLayers:
    """Draws layers as `fields`, the quantization_config of `file`, say and `how` reads them.
    Raises UnsupportedModelFile: of a kind that is not drawn."""

    def __init__(self, fields: Fields, how: QuantisedLayers, file: Path) -> None:
        self.type_name = how.type_name
        self._fields, self._how, self._file = fields, how, file
        kind = next((each for each in _DRAWN if re.fullmatch(each, self.type_name)), None)
        if kind is None:
            raise UnsupportedModelFile(
                f"{file}: --load-format dummy draws no weights of {how.type_name}, only FP8, GPTQ, "
                "AWQ and integers of compressed-tensors; name one of these in its "
                "quantization_config, or leave that out"
            )
        self._arrays = _DRAWN[kind]
        names = [str(name) for field in _NOT_QUANTISED for name in fields.get(field) or ()]
        self._floating = [
            re.compile(name[3:] if name.startswith("re:") else f"(.+\\.)?{re.escape(name)}(\\..+)?")
            for name in names
        ]

    def draw(self, name: str, shape: tuple[int, ...], device: torch.device) -> WeightPart | None:
        """The tensor "….weight" of a layer, made on `device`; equal names give equal weights on a
        kind of device. None: it stays floating, as such files have it, or has no whole groups."""
        import torch

        prefix = name.removesuffix(".weight")
        if len(shape) != 2 or any(each.fullmatch(prefix) for each in self._floating):
            return None
        num_outputs, num_inputs = shape
        bits = 4 if re.search("int4|w4", self.type_name) else 8
        layer = _Layer(
            {**self._fields, **_of_group(self._fields)},
            self._how,
            num_outputs,
            num_inputs,
            bits,
            torch.Generator(device).manual_seed(zlib.crc32(f"0 {name}".encode())),
        )
        a_word = 1 if self.type_name.startswith("fp8") else 32 // bits
        if num_inputs % layer.group or num_inputs % a_word or num_outputs % a_word:
            return None
        arrays = self._arrays(layer)
        tensors = {f"{prefix}.{suffix}": array for suffix, array in arrays.items()}
        [(_, part)] = self._how.joining(tensors, self._file)(tensors.items())
        return part


def _of_group(fields: Fields) -> Fields:
    """What compressed-tensors says of the weights of its only group of layers."""
    groups = list((fields.get("config_groups") or {}).values())
    return dict(groups[0].get("weights") or {}) if groups else {}


@dataclasses.dataclass(frozen=True, slots=True)
class _Layer:
    """One that is drawn, and the fields that hold for it."""

    fields: Fields
    how: QuantisedLayers
    num_outputs: int
    num_inputs: int
    bits: int
    generator: torch.Generator

    @property
    def group(self) -> int:
        """Inputs that share a scale; float8 in blocks may have a rest."""
        size = self.fields.get("group_size") or -1
        return self.num_inputs if size == -1 else int(size)

    @property
    def num_groups(self) -> int:
        return self.num_inputs // self.group

    def words(self, *shape: int) -> torch.Tensor:
        """int32 of random bits."""
        import torch

        new = torch.empty(shape, dtype=torch.int32, device=self.generator.device)
        return new.random_(-(1 << 31), 1 << 31, generator=self.generator)

    def zeros(self, *shape: int, centre: int, varies: bool) -> torch.Tensor:
        """int32 of as many zero points as a word holds: the centre, or up to two beside it."""
        every = sum(1 << shift for shift in range(0, 32, self.bits))
        words = (self.words(*shape) & (3 * every)) + (centre - 2) * every
        return words if varies else words.fill_(_signed(centre * every))

    def scales(self, *shape: int, deviation: float) -> torch.Tensor:
        """float32, within a quarter of what makes weights of codes with this deviation."""
        import torch

        new = torch.empty(shape, device=self.generator.device)
        return new.uniform_(0.75, 1.25, generator=self.generator).mul_(_DEVIATION / deviation)

    def scales_of_codes(self, *shape: int) -> torch.Tensor:
        """float16, for whole numbers of so many bits that are all as likely."""
        return self.scales(*shape, deviation=2**self.bits / math.sqrt(12)).half()


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


Arrays = Mapping[str, "torch.Tensor"]


def _float8(layer: _Layer) -> Arrays:
    """One scale a block, an output, or all."""
    import torch

    how = layer.how
    assert isinstance(how, Float8)
    of_tensor = "channel" if layer.fields.get("quant_method") == "fbgemm_fp8" else "tensor"
    shape, device = (layer.num_outputs, layer.num_inputs), layer.generator.device
    codes = torch.empty(shape, dtype=torch.bfloat16, device=device)
    codes.normal_(0.0, _CODES, generator=layer.generator).clamp_(-448, 448)
    of_scales: tuple[int, ...] = (layer.num_outputs, 1)
    if how.in_blocks:
        of_scales = (-(-shape[0] // _BLOCK), -(-shape[1] // _BLOCK))
    elif layer.fields.get("strategy", of_tensor) == "tensor":
        of_scales = (1,)
    arrays = {"weight": codes.to(torch.float8_e4m3fn)}
    arrays["weight_scale"] = layer.scales(*of_scales, deviation=_CODES)
    if how.activations == "static":
        arrays["input_scale"] = torch.full((1,), _INPUT_SCALE, device=device)
    return arrays


def _gptq(layer: _Layer) -> Arrays:
    a_word = 32 // layer.bits
    is_v2 = "gptq_v2" in (layer.fields.get("checkpoint_format"), layer.fields.get("format"))
    return {
        "qweight": layer.words(layer.num_inputs // a_word, layer.num_outputs),
        "qzeros": layer.zeros(
            layer.num_groups,
            layer.num_outputs // a_word,
            centre=2 ** (layer.bits - 1) - (not is_v2),
            varies=layer.fields.get("sym") is False,
        ),
        "scales": layer.scales_of_codes(layer.num_groups, layer.num_outputs),
    }


def _awq(layer: _Layer) -> Arrays:
    columns = layer.num_outputs // 8
    return {
        "qweight": layer.words(layer.num_inputs, columns),
        "qzeros": layer.zeros(layer.num_groups, columns, centre=8, varies=True),
        "scales": layer.scales_of_codes(layer.num_groups, layer.num_outputs),
    }


def _packed_integers(layer: _Layer) -> Arrays:
    import torch

    a_word, half = 32 // layer.bits, 2 ** (layer.bits - 1)
    arrays = {
        "weight_packed": layer.words(layer.num_outputs, layer.num_inputs // a_word),
        "weight_shape": torch.tensor([layer.num_outputs, layer.num_inputs]),
        "weight_scale": layer.scales_of_codes(layer.num_outputs, layer.num_groups),
    }
    if layer.fields.get("symmetric") is False:
        shape = layer.num_outputs // a_word, layer.num_groups
        arrays["weight_zero_point"] = layer.zeros(*shape, centre=half, varies=True)
    return arrays


def _integers(layer: _Layer) -> Arrays:
    import torch

    words = layer.words(layer.num_outputs, layer.num_inputs // 4)
    return {
        "weight": words.view(torch.int8),
        "weight_scale": layer.scales_of_codes(layer.num_outputs, layer.num_groups),
    }


_DRAWN: Mapping[str, Callable[[_Layer], Arrays]] = {
    "fp8(-block)?(-w8a16)?": _float8,
    "gptq(_v2)?-int[48]": _gptq,
    "awq-int4": _awq,
    "w[48]a16": _packed_integers,
    "w8a8": _integers,
}
"""By the type's name: what a layer's tensors hold, by their suffixes."""
