"""Layers of a folder whose weight is several tensors (codes, scales ...): found by their names,
joined when the last has come."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engine_core.model_files.errors import BrokenModelFile, UnsupportedModelFile

if TYPE_CHECKING:
    import torch

    from kernels.interface.weights import WeightPart

logger = logging.getLogger(__name__)

Fields = Mapping[str, Any]
"""The fields of `quantization_config`."""
Tensors = Iterable[tuple[str, "torch.Tensor"]]
Parts = Iterator[tuple[str, "WeightPart"]]

INSTEAD = "use the unquantised model, or a .gguf of it"
GROUP_INPUTS = 32
"""Inputs that share a scale, or a whole fraction of those that do, in what is computed with."""
CACHE_SCALE = re.compile(r".+\.(?:kv?_scale|[vq]_scale|prob_scale|output_scale)")


class NotRead(Exception):
    """A variant that is not read. The text follows the method's name; `instead`: what to do."""

    def __init__(self, what: str, instead: str = INSTEAD) -> None:
        super().__init__(what)
        self.instead = instead


class QuantisedLayers(Protocol):
    """How a folder's layers are quantised."""

    @property
    def type_name(self) -> str:
        """See `QuantisedTensor.type_name`."""

    def joining(self, names: Collection[str], folder: Path) -> Callable[[Tensors], Parts]:
        """What makes weights of the tensors of a folder that has these.
        Raises UnsupportedModelFile, BrokenModelFile: it has not what it should have."""


def note_unused(names: Iterable[str], folder: Path) -> None:
    """Log that scales of these names are not used."""
    unused = sorted(names)
    if unused:
        logger.warning(
            "%s: %d scales of keys, values or activations are not used (%s): the KV cache is kept "
            "as --kv-cache-dtype says, without scales, and activations are not rounded by them",
            folder,
            len(unused),
            ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else ""),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class LayerTensors:
    """Implements `QuantisedLayers` for layers that are told by the names of their tensors.

    Attributes:
        type_name: see `QuantisedTensor`.
        needed: suffixes of the tensors that every quantised layer has.
        as_one: (name of the layer, its tensors by suffix) -> its weight [N, E].
        allowed: suffixes of those that it may have.
        unused: suffixes of those that are not read.
    """

    type_name: str
    needed: frozenset[str]
    as_one: Callable[[str, Mapping[str, torch.Tensor]], WeightPart]
    allowed: frozenset[str] = frozenset()
    unused: frozenset[str] = frozenset()

    def joining(self, names: Collection[str], folder: Path) -> Callable[[Tensors], Parts]:
        found: dict[str, set[str]] = {}
        for name in names:
            prefix, suffix = self._apart(name)
            if suffix:
                found.setdefault(prefix, set()).add(suffix)
        layers = {
            prefix: frozenset(suffixes)
            for prefix, suffixes in found.items()
            if suffixes & self.needed != {"weight"}  # that is a layer of its own
        }
        if not layers:
            wanted = " or ".join(sorted(self.needed - {"weight"}))
            raise UnsupportedModelFile(
                f"{folder} is quantised by its config.json, but no tensor is called {wanted}; it "
                f"is of another layout: {INSTEAD}"
            )
        for prefix, suffixes in layers.items():
            if missing := self.needed - suffixes:
                raise BrokenModelFile(
                    f"{folder} lacks {', '.join(sorted(missing))} of the quantised layer {prefix}; "
                    f"download its weight files again"
                )
        note_unused((name for name in names if self._is_unused(name)), folder)
        return partial(self._join, layers=layers)

    def _apart(self, name: str) -> tuple[str, str]:
        """(layer, suffix) of one of its tensors; ("", "") of others."""
        for suffix in self.needed | self.allowed:
            if name.endswith(f".{suffix}"):
                return name[: -len(suffix) - 1], suffix
        return "", ""

    def _is_unused(self, name: str) -> bool:
        is_input = name.rpartition(".")[2] in self.unused
        return is_input or CACHE_SCALE.fullmatch(name) is not None

    def _join(self, tensors: Tensors, layers: Mapping[str, frozenset[str]]) -> Parts:
        waiting: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors:
            if self._is_unused(name):
                continue
            prefix, suffix = self._apart(name)
            if suffix not in layers.get(prefix, ()):
                yield name, tensor
                continue
            arrays = waiting.setdefault(prefix, {})
            arrays[suffix] = tensor
            if arrays.keys() == layers[prefix]:
                yield f"{prefix}.weight", self.as_one(prefix, waiting.pop(prefix))


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 or uint8 [A, C], of several values each, the first in the low bits -> uint8 [A, C']:
    the values, of 4 or 8 bits."""
    import torch

    if words.stride(-1) != 1 or not words.is_contiguous():  # of a dimension of one any stride is
        words = torch.empty(words.shape, dtype=words.dtype).copy_(words)
    octets = words.view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(1)


def dequantised(part: WeightPart) -> torch.Tensor:
    """A tensor as it is, a quantised one in float32."""
    from kernels.interface.weights import QuantisedTensor

    return part.dequantise() if isinstance(part, QuantisedTensor) else part
