"""The layer of Gemma 3n, over N residual streams side by side, [T, N * E]: `layers/altup.py`."""

from dataclasses import dataclass

import torch

from engine_core.layers.altup import AltUp, Laurel, SparselyActivated, Streams
from engine_core.layers.config import AltUpConfig
from engine_core.layers.linear import FusedLinear
from engine_core.layers.norm import NoNorm, RMSNorm
from engine_core.layers.parameters import Placements, merge
from engine_core.layers.per_layer import LayerInputAdder
from engine_core.models.blocks.block import Block, BlockBuilder
from engine_core.models.blocks.gemma import NORMS, MixerWithInput, layer_input_adder
from engine_core.models.blocks.mixers import Begun, FeedForward
from kernels.interface.operations import Activations, ForwardContext


@dataclass(frozen=True, slots=True)
class Parts:
    """What a layer has beside attention, feed-forward and their norms. `first`, `last`: None: other
    layers come before it, or behind it."""

    altup: AltUp
    laurel: Laurel
    adder: LayerInputAdder
    first: Streams | None
    last: Streams | None


class AltUpBlock(Block):
    """See the module. `mixer`: hands on the layer's inputs. `norms`: see `Block`."""

    def __init__(
        self,
        mixer: MixerWithInput,
        feed_forward: FeedForward,
        norms: list[RMSNorm],
        parts: Parts,
        *,
        no_norm: NoNorm,
    ) -> None:
        super().__init__(mixer, feed_forward, norms, no_norm=no_norm)
        self._before, self._behind, self._before_feed, self._behind_own_feed = norms
        self._own = parts

    @property
    def linears(self) -> list[FusedLinear]:
        own = [each.linears for each in self._others]
        return super().linears + [linear for linears in own for linear in linears]

    @property
    def _others(self) -> list[AltUp | Laurel | LayerInputAdder | Streams]:
        own = self._own
        streams = [each for each in (own.first, own.last) if each is not None]
        return [own.altup, own.laurel, own.adder, *streams]

    def placements(self) -> Placements:
        return merge([super().placements(), *(each.placements() for each in self._others)])

    def enter(
        self, added_TE: torch.Tensor | None, residual_TE: torch.Tensor
    ) -> tuple[Activations, torch.Tensor]:
        """Streams, of the first layer the embeddings -> (the mixer's inputs, predicted streams)."""
        if self._own.first is not None:
            streams_TNE = self._own.first.widen(residual_TE)
        else:
            streams_TNE = self._streams(residual_TE)
        streams_TNE = self._own.altup.predict(streams_TNE)
        return self._before(self._own.altup.computed(streams_TNE)), streams_TNE.flatten(1)

    def finish(
        self, begun: Begun, residual_TE: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Predicted streams -> corrected ones, twice; of the last layer two halves of what the
        final norm gets."""
        altup = self._own.altup
        streams_TNE = self._streams(residual_TE)
        computed_TE = altup.computed(streams_TNE)
        laurel_TE = self._own.laurel(self._before(computed_TE))
        h_TE = computed_TE + self._behind(self.mixer.finish(begun, context)) + laurel_TE
        h_TE *= 2.0**-0.5
        assert self.feed_forward is not None
        h_TE += self._behind_own_feed(self.feed_forward(self._before_feed(h_TE), context))
        streams_TNE = altup.correct(streams_TNE, h_TE)
        added_TE = self._own.adder(altup.scaled(altup.computed(streams_TNE)), begun[1])
        streams_TNE[:, 1:] += added_TE[:, None]
        if self._own.last is not None:
            half_TE = self._own.last.narrow(streams_TNE) / 2
            return half_TE, half_TE.clone()
        flat_TN = streams_TNE.flatten(1)
        return flat_TN, flat_TN

    def _streams(self, flat_TN: torch.Tensor) -> torch.Tensor:
        return flat_TN.view(len(flat_TN), self._own.altup.num_streams, -1)


def altup_block(
    build: BlockBuilder, layer: int, config: AltUpConfig, *, width: int, deviations: float | None
) -> AltUpBlock:
    """The layer of this number. `width`: features of its feed-forward. `deviations`: of its
    gates that are cut; None: none is."""
    name, size = f"model.layers.{layer}", build.config.spec.hidden_size
    dtype, ops = build.dtype, build.ops
    norms = [build.norm(f"{name}.{norm}") for norm in NORMS]
    feed_forward = build.feed_forward(layer, size=width)
    if deviations is not None:
        feed_forward = SparselyActivated(
            f"{name}.mlp",
            size,
            width,
            deviations=deviations,
            activation=build.config.activation,
            dtype=dtype,
            ops=ops,
        )
    assert build.per_layer is not None
    attention = build.attention(layer, head_norms=True, norms_values=True)
    is_first, is_last = layer == 0, layer == build.config.spec.num_layers - 1
    parts = Parts(
        AltUp(
            f"{name}.altup",
            config,
            size,
            norm=build.norm(f"{name}.altup.router_norm"),
            dtype=dtype,
            ops=ops,
        ),
        Laurel(
            f"{name}.laurel",
            config.laurel_rank,
            size,
            norm=build.norm(f"{name}.laurel.post_laurel_norm"),
            dtype=dtype,
            ops=ops,
        ),
        layer_input_adder(build, layer),
        Streams("model.altup_projections", config, size, dtype=dtype, ops=ops)
        if is_first
        else None,
        Streams("model.altup_unembed_projections", config, size, dtype=dtype, ops=ops)
        if is_last
        else None,
    )
    return AltUpBlock(
        MixerWithInput(attention, build.per_layer, layer),
        feed_forward,
        norms,
        parts,
        no_norm=NoNorm(size, dtype=dtype, ops=ops),
    )
