"""How checkpoints hold the experts of a layer; fused tensors become views of their experts.

published   model.layers.0.mlp.experts.3.gate_proj.weight     a tensor a projection and expert
fused       model.layers.0.mlp.experts.gate_up_proj           what transformers 5 has in memory
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
        projections: an expert's gate, up and down.
    """

    block: str
    projections: tuple[str, str, str]

    def published(self, name: str, tensor: WeightPart) -> Iterator[tuple[str, WeightPart]]:
        """A tensor of a checkpoint as the tensors that it would be published as.
        `tensor`: fused ones are [X, 2F, E], gate's outputs before up's, and [X, E, F]. Blocks come
        from files that publish them one by one."""
        from kernels.interface.weights import QuantisedTensor

        if isinstance(tensor, QuantisedTensor):
            yield name, tensor
            return
        match = _LAYER.fullmatch(name)
        rest = None if match is None else match["rest"]
        if match is None or rest not in _FUSED or tensor.ndim != _FUSED[rest]:
            yield name, tensor
            return
        block = f"{match['layer']}.{self.block}"
        if rest == _ROUTER:
            yield f"{block}.gate.weight", tensor
            return
        gate, up, down = self.projections
        for expert, weight in enumerate(tensor):
            prefix = f"{block}.experts.{expert}"
            if rest == _DOWN:
                yield f"{prefix}.{down}.weight", weight
                continue
            features = weight.shape[0] // 2
            yield f"{prefix}.{gate}.weight", weight[:features]
            yield f"{prefix}.{up}.weight", weight[features:]


_ROUTER = "mlp.gate.weight"
_GATE_UP = "mlp.experts.gate_up_proj"
_DOWN = "mlp.experts.down_proj"
_FUSED = {_ROUTER: 2, _GATE_UP: 3, _DOWN: 3}
"""Names within a layer of transformers 5, and their dimensions."""

MIXTRAL_EXPERTS = ExpertNaming("block_sparse_moe", ("w1", "w3", "w2"))
QWEN_EXPERTS = ExpertNaming("mlp", ("gate_proj", "up_proj", "down_proj"))
