"""What families of hybrids have alike: which layers keep a state, of what size, and Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.layers.config import Mamba2Config, RecurrentConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.layer_cache import LayerCache, PagedKeys, recurrent_state

if TYPE_CHECKING:
    import torch

    from engine_core.layers.linear import FusedLinear
    from engine_core.layers.mamba2 import Mamba2
    from engine_core.layers.norm import NoNorm
    from engine_core.layers.parameters import Placements
    from engine_core.models.blocks.block import Begun, Block, BlockBuilder
    from engine_core.models.blocks.mixers import Mixer
    from kernels.interface.operations import Activations, ForwardContext

_OLD_KINDS = {"mamba": "linear_attention", "attention": "full_attention"}


def read_kinds(fields: ConfigFields, name: str, allowed: Collection[str]) -> list[str]:
    """What each layer is, by the names of transformers 5. `name`: of the field."""
    kinds = fields.get(name)
    if not isinstance(kinds, list) or not kinds:
        raise ModelConfigError(f"config: {name} is {kinds!r}, it must say what each layer is")
    kinds = [_OLD_KINDS.get(str(kind), str(kind)) for kind in kinds]
    for kind in kinds:
        if kind not in allowed:
            raise UnsupportedArchitecture(
                f'layers of type "{kind}" are not supported; supported: {", ".join(allowed)}'
            )
    return kinds


def with_kept(
    config: ModelConfig,
    kept: Sequence[LayerCache | None],
    recurrent: RecurrentConfig | None = None,
) -> ModelConfig:
    """The config with layers that keep something else than keys. None: that one keeps keys.
    `recurrent`: sizes of all that keep a state; None: ranks cannot share them.
    Raises ModelConfigError: not all layers are there."""
    layers = config.spec.layers
    if len(kept) != len(layers):
        raise ModelConfigError(
            f"config: {len(kept)} layers have a type, num_hidden_layers is {len(layers)}"
        )
    layers = tuple(own or keys for own, keys in zip(kept, layers, strict=True))
    spec, can_be_shared = replace(config.spec, layers=layers), recurrent is not None
    return replace(config, spec=spec, recurrent=recurrent, can_be_shared=can_be_shared)


def read_mamba2(fields: ConfigFields, inner: int | None = None) -> Mamba2Config:
    """Sizes as Bamba and Granite spell them. `inner`: columns of all heads; None: `mamba_expand`
    times the hidden state's."""
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedArchitecture(
            f'Mamba-2 with activation "{fields.get("hidden_act")}" is not supported, only silu'
        )
    num_heads = fields.positive_int("mamba_n_heads", 128)
    if inner is None:
        inner = fields.positive_int("mamba_expand", 2) * fields.positive_int("hidden_size")
    by_width = fields.get("mamba_d_head") in (None, "auto")
    head_size = inner // num_heads if by_width else fields.positive_int("mamba_d_head")
    if head_size * num_heads != inner:
        raise ModelConfigError(
            f"config: {num_heads} Mamba heads of {head_size} do not make the {inner} columns of "
            "mamba_d_ssm, or of mamba_expand * hidden_size"
        )
    return read_mamba2_rest(fields, num_heads, head_size)


def read_mamba2_rest(fields: ConfigFields, num_heads: int, head_size: int) -> Mamba2Config:
    """What does not depend on the width; groups must divide the heads."""
    num_groups = fields.positive_int("mamba_n_groups", 1)
    if num_heads % num_groups:
        raise ModelConfigError(
            f"config: {num_groups} groups cannot share {num_heads} Mamba heads evenly"
        )
    limit = fields.get("time_step_limit")
    if limit is not None and [_number(end) for end in limit] != [0.0, math.inf]:
        raise UnsupportedArchitecture(f"time_step_limit {limit} is not supported, only (0, inf)")
    return Mamba2Config(
        num_heads=num_heads,
        head_size=head_size,
        state_size=fields.positive_int("mamba_d_state", 256),
        num_groups=num_groups,
        width=fields.positive_int("mamba_d_conv", 4),
        bias=(biased := fields.flag("mamba_proj_bias", False)),
        output_bias=biased,
        convolution_bias=fields.flag("mamba_conv_bias", True),
    )


def _number(end: object) -> float:
    """A JSON has no infinity: transformers writes {"__float__": "Infinity"}."""
    if isinstance(end, dict):
        end = end.get("__float__")
    return float(end) if isinstance(end, int | float | str) else math.nan


def mamba2_state(config: Mamba2Config) -> LayerCache:
    """The cache of a Mamba-2 layer."""
    return recurrent_state(config.shape)


def mamba2(build: BlockBuilder, layer: int, name: str, *, place: int | None = None) -> Mamba2:
    """The mixer of one layer. `name`: of it, within the layer. `place`: of its state, where keys
    have the layer's."""
    from engine_core.layers.mamba2 import Mamba2

    config = build.config.recurrent
    assert isinstance(config, Mamba2Config), f"no sizes of Mamba-2: {config}"
    return Mamba2(
        f"model.layers.{layer}.{name}",
        build.place(layer) if place is None else place,
        config,
        build.config.spec.hidden_size,
        norm_eps=build.config.norm_eps,
        dtype=build.dtype,
        ops=build.ops,
        all_reduce=build.all_reduce("recurrent"),
        place=build.collectives.parallel,
    )


class SideBySide:
    """Two mixers of one input, whose outputs are added. `no_norm`: adds."""

    first = None  # a product of each reads the inputs

    def __init__(self, one: Mixer, other: Mixer, no_norm: NoNorm) -> None:
        self._mixers, self._no_norm = (one, other), no_norm

    @property
    def linears(self) -> list[FusedLinear]:
        """Products that adapters may add to."""
        return [linear for mixer in self._mixers for linear in mixer.linears]

    def placements(self) -> Placements:
        one, other = self._mixers
        return {**one.placements(), **other.placements()}

    def begin(
        self, x_TE: Activations, positions_T: torch.Tensor, context: ForwardContext
    ) -> tuple[Begun, ...]:
        """[T, E] -> what each has begun; writes what both keep."""
        return tuple([mixer.begin(x_TE, positions_T, context) for mixer in self._mixers])

    def finish(self, begun: tuple[Begun, ...], context: ForwardContext) -> torch.Tensor:
        """The sum of both outputs, [T, E], from what both have begun."""
        one, other = self._mixers
        added = (one.finish(begun[0], context), other.finish(begun[1], context))
        return self._no_norm.add_before(None, *added)[1]


def mamba2_block(build: BlockBuilder, layer: int) -> Block:
    """A layer that attends or has Mamba-2 in the place of attention, and a feed-forward."""
    attends = isinstance(build.config.spec.layers[layer], PagedKeys)
    mixer = build.attention(layer) if attends else mamba2(build, layer, "mamba")
    return build.block(layer, mixer)
