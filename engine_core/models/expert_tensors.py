"""How checkpoints hold the experts of a layer; fused tensors become views of their experts.

published   model.layers.0.mlp.experts.3.gate_proj.weight     a tensor a projection and expert
fused       model.layers.0.mlp.experts.gate_up_proj           what transformers 5 has in memory;
                                                              Qwen3-VL's files: inputs first
            model.layers.0.block_sparse_moe.input_linear.weight   Granite's files
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernels.interface.weights import WeightPart

_LAYER = re.compile(r"(?P<layer>model\.layers\.\d+)\.(?P<rest>.+)")


@dataclass(frozen=True, slots=True)
class ExpertNaming:
    """How a family publishes its experts.

    Attributes:
        block: the part of a layer that holds router and experts.
        projections: an expert's gate, up and down; without a gate, up and down.
    """

    block: str
    projections: tuple[str, ...]

    def published(self, name: str, tensor: WeightPart) -> Iterator[tuple[str, WeightPart]]:
        """A tensor of a checkpoint as the tensors that it would be published as.
        `tensor`: fused ones are [X, 2F, E], gate's outputs before up's, and [X, E, F]. Blocks come
        from files that publish them one by one."""
        from kernels.interface.weights import QuantisedTensor

        if isinstance(tensor, QuantisedTensor):
            yield name, tensor
            return
        if name.endswith("e_score_correction_bias"):
            yield name, tensor.flatten()  # ERNIE's is one row
            return
        match = _LAYER.fullmatch(name)
        part = None if match is None else _FUSED.get(match["rest"])
        is_odd = part == "shared" and len(tensor) % 2  # an adapter of another model
        if match is None or part is None or tensor.ndim != _DIMENSIONS[part] or is_odd:
            yield name, tensor
            return
        if part == "shared":
            for name, half in zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True):
                yield f"{match['layer']}.mlp.{name}.weight", half
            return
        block = f"{match['layer']}.{self.block}"
        if part == "router":
            yield f"{block}.gate.weight", tensor
            return
        *first, down = self.projections
        names = [down] if part == "down" else first
        for expert, weight in enumerate(tensor):
            for name, piece in zip(names, weight.chunk(len(names)), strict=True):
                yield f"{block}.experts.{expert}.{name}.weight", piece


_DIMENSIONS = {"router": 2, "shared": 2, "gate_up": 3, "down": 3}
_FUSED = {
    "mlp.gate.weight": "router",
    "mlp.experts.gate_up_proj": "gate_up",
    "mlp.experts.down_proj": "down",
    "mixer.experts.up_proj": "gate_up",
    "mixer.experts.down_proj": "down",
    "feed_forward.experts.gate_up_proj": "gate_up",
    "feed_forward.experts.down_proj": "down",
    "router.proj.weight": "router",
    "experts.gate_up_proj": "gate_up",
    "experts.down_proj": "down",
    "block_sparse_moe.router.weight": "router",
    "block_sparse_moe.router.layer.weight": "router",
    "block_sparse_moe.experts.gate_up_proj": "gate_up",
    "block_sparse_moe.experts.down_proj": "down",
    "block_sparse_moe.input_linear.weight": "gate_up",
    "block_sparse_moe.output_linear.weight": "down",
    "shared_mlp.input_linear.weight": "shared",
}
"""Names within a layer, of transformers 5 and of Granite's files."""
_WIDTH_AXIS = {"mlp.experts.gate_up_proj": 2, "mlp.experts.down_proj": 1}
"""Which dimension of a fused tensor in memory is the model's width."""


def outputs_first(name: str, tensor: WeightPart, hidden_size: int) -> WeightPart:
    """A fused tensor as transformers 5 has it in memory, of a file that may have it transposed;
    any other tensor as it is."""
    from kernels.interface.weights import QuantisedTensor

    axis = next((axis for end, axis in _WIDTH_AXIS.items() if name.endswith(end)), None)
    if axis is None or isinstance(tensor, QuantisedTensor) or tensor.shape[axis] == hidden_size:
        return tensor
    return tensor.transpose(1, 2)


MIXTRAL_EXPERTS = ExpertNaming("block_sparse_moe", ("w1", "w3", "w2"))
GEMMA_EXPERTS = ExpertNaming("moe", ("gate_proj", "up_proj", "down_proj"))
LFM2_EXPERTS = ExpertNaming("feed_forward", ("w1", "w3", "w2"))
NEMOTRON_EXPERTS = ExpertNaming("mixer", ("up_proj", "down_proj"))
QWEN_EXPERTS = ExpertNaming("mlp", ("gate_proj", "up_proj", "down_proj"))


_ROUTER = re.compile(r"(?P<block>.+\.mlp)\.router\.(?P<kind>\w+)")
_EXPERTS = re.compile(
    r"(?P<experts>.+\.experts)(?P<expert>\.\d+)?\.(?P<part>gate_up|down)_proj\W?(?P<kind>\w*)"
)


@dataclass(frozen=True, slots=True)
class GptOssNaming(ExpertNaming):
    """Stacks of experts in the files:

    experts.gate_up_proj, down_proj    [X, E, 2F], [X, F, E]; their biases [X, 2F], [X, E]
    experts.3.gate_up_proj.weight, ... [2F, E], [E, F], of MXFP4; rows gate 0, up 0, gate 1, ...
    """

    def published(self, name: str, tensor: WeightPart) -> Iterator[tuple[str, WeightPart]]:
        if (router := _ROUTER.fullmatch(name)) is not None:
            yield f"{router['block']}.gate.{router['kind']}", tensor
        elif (match := _EXPERTS.fullmatch(name)) is None:
            yield name, tensor
        elif match["expert"] is not None:
            yield from _of_one(f"{match['experts']}{match['expert']}", match, tensor)
        else:
            import torch

            assert isinstance(tensor, torch.Tensor)
            for expert, one in enumerate(tensor if match["kind"] else tensor.transpose(1, 2)):
                yield from _of_one(f"{match['experts']}.{expert}", match, one)


def _of_one(
    expert: str, match: re.Match[str], tensor: WeightPart
) -> Iterator[tuple[str, WeightPart]]:
    """One expert's weight or bias, that of gate and up in two."""
    import torch

    kind = "bias" if "bias" in match["kind"] else "weight"
    if match["part"] == "down":
        yield f"{expert}.down_proj.{kind}", tensor
        return
    for first, projection in enumerate(("gate_proj", "up_proj")):
        rows = torch.arange(first, tensor.shape[0], 2)
        half = tensor[rows] if isinstance(tensor, torch.Tensor) else tensor.rows(rows)
        yield f"{expert}.{projection}.{kind}", half


GPT_OSS_EXPERTS = GptOssNaming("mlp", ("gate_proj", "up_proj", "down_proj"))
