"""The head for multi-token prediction that checkpoints of Qwen3-Next, 3.5 and 3.6, DeepSeek V3 and
GLM-4.7-Flash bring along: a layer of the model's own kind behind its last norm (arXiv:2412.19437,
2.2)."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from engine_core.layers.linear import FusedLinear
from engine_core.layers.parameters import Placements, merge
from engine_core.models.blocks.block import Begun, BlockBuilder
from engine_core.models.config import ModelConfig
from engine_core.models.decoder import Decoder
from engine_core.models.errors import ModelWeightsError, UnsupportedArchitecture
from engine_core.models.heads.head import DraftHead
from engine_core.models.layer_cache import PagedKeys
from kernels.interface.operations import ForwardContext, Operations
from kernels.interface.weights import WeightPart

_PREFIX = "mtp."
_OF_LAYER = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
}
"""Names of DeepSeek's, whose head is a layer behind the last one, to Qwen's."""
_OF_TARGET = ("embed_tokens.", "shared_head.head.")


def mtp_tensors(
    tensors: Iterable[tuple[str, WeightPart]], num_layers: int
) -> dict[str, WeightPart]:
    """The head's tensors in the checkpoint of a model of so many layers, by its own names.
    Raises ModelWeightsError: there are none."""
    layer, own = f"model.layers.{num_layers}.", dict[str, WeightPart]()
    for name, tensor in tensors:
        if name.startswith(_PREFIX):
            own[f"model.{name.removeprefix(_PREFIX)}"] = tensor
        rest = name.removeprefix(layer)
        if rest == name or rest.startswith(_OF_TARGET):
            continue
        part, _, kind = rest.rpartition(".")
        renamed = f"{_OF_LAYER[part]}.{kind}" if part in _OF_LAYER else f"layers.0.{rest}"
        own[f"model.{renamed}"] = tensor
    if not own:
        raise ModelWeightsError(f"it has no tensors {_PREFIX}* and no {layer}*")
    return own


def mtp_config(target: ModelConfig) -> ModelConfig:
    """A model of the one layer that the head has: the target's last one with full attention.
    Raises UnsupportedArchitecture: there is none."""
    spec = target.spec
    full = [
        layer
        for layer, kept in enumerate(spec.layers)
        if isinstance(kept, PagedKeys) and kept.window is None and kept.shares is None
    ]
    if not full:
        raise UnsupportedArchitecture("multi-token prediction needs a layer with full attention")
    # of an indexer a layer that has one
    last = max(full, key=lambda layer: (getattr(spec.layers[layer], "index_size", 0), layer))
    return replace(
        target,
        spec=replace(spec, layers=(spec.layers[last],)),
        experts=(target.experts[last],),
        rotary=(replace(target.rotary[last], sections=()),),  # prompts are text
    )


class MTPHead(DraftHead):
    """At position i, from token i + 1 and the target's hidden state h behind its last norm:

        x      = fc(pre_fc_norm_embedding(embedding(token i + 1)) || pre_fc_norm_hidden(h))
        h      = norm(layer(x));  logits = lm_head(h)

    with the target's embedding and lm_head; the next pass takes this h.

    Args:
        num_positions: see `BlockBuilder`.
    """

    def __init__(
        self, target: Decoder, *, dtype: torch.dtype, ops: Operations, num_positions: int
    ) -> None:
        config = mtp_config(target.config)
        build = BlockBuilder(config, dtype=dtype, ops=ops, num_positions=num_positions)
        size = config.spec.hidden_size
        self._hidden_norm = build.norm("model.pre_fc_norm_hidden")
        self._combine = FusedLinear(
            [("model.fc", size)], 2 * size, bias=False, dtype=dtype, ops=ops
        )
        self._block = config.block(build, 0)
        self._final_norm = build.norm("model.norm")
        super().__init__(
            build,
            (target.spec.num_layers + 1,),
            vocabulary=target.vocabulary,
            embedding_norm=build.norm("model.pre_fc_norm_embedding"),
            passes_normed=True,
        )

    def placements(self) -> Placements:
        parts = [self._embedding_norm, self._hidden_norm, self._final_norm]
        return merge([part.placements() for part in (*parts, self._combine, self._block)])

    def combine(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        (hidden_TE,) = states
        return hidden_TE

    def _begin(
        self,
        normed_TE: torch.Tensor,
        hidden_TE: torch.Tensor,
        positions_T: torch.Tensor,
        context: ForwardContext,
    ) -> tuple[Begun, torch.Tensor]:
        x_TE = self._combine(torch.cat([normed_TE, self._hidden_norm(hidden_TE)], 1))
        entered_TE, residual_TE = self._block.enter(None, x_TE)
        return self._block.mixer.begin(entered_TE, positions_T, context), residual_TE

    def _finish(
        self, begun: Begun, residual_RE: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out_RE, residual_RE = self._block.finish(begun, residual_RE, context)
        return self._final_norm.add(out_RE, residual_RE)

    def _logits(self, x_RE: torch.Tensor) -> torch.Tensor:
        return self._vocabulary.logits(x_RE)
