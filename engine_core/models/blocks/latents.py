"""What families with latent attention have alike: its sizes, its cache and its mixer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine_core.layers.config import InterleavedRows, LatentConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.layer_cache import Latent
from engine_core.models.rotary_config import read_rotary, score_factor

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder

_NORM_EPS = 1e-6
"""Of norms of latents, whatever rms_norm_eps says of the others."""


def latent_fields(fields: ConfigFields) -> ConfigFields:
    """The config with heads as large as what turns of one."""
    values: dict[str, Any] = {"head_dim": fields.positive_int("qk_rope_head_dim")}
    heads = fields.positive_int("num_attention_heads")
    return fields.with_values({**values, "num_key_value_heads": heads})


def with_latents(config: ModelConfig, fields: ConfigFields, *, pairs: bool) -> ModelConfig:
    """The config with latent attention in every layer, and its angles.
    `pairs`: neighbours turn together; else halves."""
    if fields.flag("attention_bias", False):
        raise UnsupportedArchitecture("attention_bias with latent attention is not supported")
    num_layers, num_heads = config.spec.num_layers, config.spec.num_query_heads
    ranked = fields.get("q_lora_rank") is not None
    sizes = LatentConfig(
        num_heads=num_heads,
        query_rank=fields.positive_int("q_lora_rank") if ranked else None,
        rank=fields.positive_int("kv_lora_rank"),
        nope_size=fields.positive_int("qk_nope_head_dim"),
        rope_size=fields.positive_int("qk_rope_head_dim"),
        value_size=fields.positive_int("v_head_dim"),
        pairs=pairs,
    )
    latent = Latent(1, sizes.rope_size + sizes.rank, sizes.rank)
    rotary = read_rotary(fields, head_size=sizes.rope_size)
    scale = (sizes.nope_size + sizes.rope_size) ** -0.5
    return replace(
        config,
        spec=replace(config.spec, layers=(latent,) * num_layers),
        rotary=(rotary,) * num_layers,
        attention_scale=scale * score_factor(fields),
        block=LatentBlock(sizes),
        interleaved=_rows_of(sizes),
        latent=sizes,
    )


def with_indexer(
    config: ModelConfig, fields: ConfigFields, kinds: Sequence[str], *, pairs: bool
) -> ModelConfig:
    """The config, of latent attention, with keys that an indexer chooses.

    Args:
        kinds: of each layer "full", it has an indexer, or "shared": it attends the keys that the
            last one before it chose.
        pairs: of the indexer neighbours turn together; else halves.
    """
    sizes, num_layers = config.latent, config.spec.num_layers
    assert sizes is not None, "an indexer without latents"
    heads, size, top_k = (
        fields.positive_int(f"index_{name}") for name in ("n_heads", "head_dim", "topk")
    )
    if len(kinds) != num_layers or not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        raise ModelConfigError(
            f'config: indexer_types is {[*kinds]!r}, it must say "full" or "shared" of each of '
            f'{num_layers} layers, and "full" of the first one'
        )
    if sizes.query_rank is None or size < sizes.rope_size:
        raise UnsupportedArchitecture(
            f"an indexer with q_lora_rank {sizes.query_rank} and index_head_dim {size} is not "
            f"supported; it needs the first, and {sizes.rope_size} elements that turn"
        )
    sizes = replace(sizes, index_heads=heads, index_size=size, top_k=top_k)
    latent = Latent(1, sizes.rope_size + sizes.rank, sizes.rank)
    kept = {"full": replace(latent, index_size=size), "shared": latent}
    pieces = sizes.rope_size, size - sizes.rope_size
    rows = tuple(
        InterleavedRows(name, 1, ((name, pieces * number),), tuple(range(0, 2 * number, 2)))
        for part, number in (("wq_b", heads), ("wk", 1), ("k_norm", 1))
        for name in (f"self_attn.indexer.{part}",)
    )
    return replace(
        config,
        spec=replace(config.spec, layers=tuple([kept[kind] for kind in kinds])),
        block=LatentBlock(sizes),
        interleaved=(*config.interleaved, *(rows if pairs else ())),
        latent=sizes,
    )


def _rows_of(sizes: LatentConfig) -> tuple[InterleavedRows, ...]:
    """Rows of checkpoints: heads lie side by side, and of each what stays and what turns, or what
    keys and values are made with."""
    name = "self_attn.q_proj" if sizes.query_rank is None else "self_attn.q_b_proj"
    own = "self_attn.kv_a_proj_with_mqa"
    k_b, v_b = (
        ("self_attn.k_b_proj", (sizes.nope_size,)),
        ("self_attn.v_b_proj", (sizes.value_size,)),
    )
    of_query = ((name, (sizes.nope_size, sizes.rope_size)),)
    pairs = (1,) if sizes.pairs else ()
    return (
        InterleavedRows(name, sizes.num_heads, of_query, pairs),
        InterleavedRows(own, 1, ((own, (sizes.rank, sizes.rope_size)),), pairs),
        InterleavedRows(
            "self_attn.kv_b_proj", sizes.num_heads, (k_b, v_b), transposed=frozenset({k_b[0]})
        ),
    )


@dataclass(frozen=True, slots=True)
class LatentBlock:
    """A layer with latent attention and a feed-forward."""

    sizes: LatentConfig

    def __call__(self, build: BlockBuilder, layer: int) -> Block:
        from engine_core.layers.indexer import Indexer
        from engine_core.layers.latent_attention import LatentAttention
        from engine_core.layers.linear import FusedLinear
        from engine_core.layers.norm import RMSNorm
        from kernels.interface.operations import AttentionParams, RotaryParams

        config, num_heads = build.config, build.config.spec.num_query_heads
        sizes = replace(self.sizes, num_heads=num_heads)  # of a rank its own
        name = f"model.layers.{layer}.self_attn"
        scale = config.attention_scale
        assert scale is not None, "of latent attention it is not that of a key's size"
        normed = {"q_a_layernorm": sizes.query_rank, "kv_a_layernorm": sizes.rank}
        norms = [
            RMSNorm(f"{name}.{norm}", size, _NORM_EPS, dtype=build.dtype, ops=build.ops)
            for norm, size in normed.items()
            if size is not None
        ]
        cos_sin_PD = build.table(config.rotary[layer]).cos_sin_PD
        kept = config.spec.layers[layer]
        chooses = isinstance(kept, Latent) and kept.index_size > 0
        if chooses:
            build.indexer = Indexer(
                build.place(layer),
                f"{name}.indexer",
                sizes,
                config.spec.hidden_size,
                cos_sin_PD=cos_sin_PD,
                dtype=build.dtype,
                ops=build.ops,
            )
        mixer = LatentAttention(
            build.place(layer),
            name,
            sizes,
            config.spec.hidden_size,
            norms=norms,
            output=FusedLinear(
                [(f"{name}.o_proj", config.spec.hidden_size)],
                num_heads * sizes.value_size,
                bias=False,
                dtype=build.dtype,
                ops=build.ops,
                all_reduce=build.all_reduce("attention"),
            ),
            rotary=RotaryParams(
                num_query_heads=num_heads,
                head_size=config.spec.keys_of(layer).key_size,
                cos_sin_PD=cos_sin_PD,
            ),
            params=AttentionParams(scale=scale),
            query_scale=config.query_scale,
            dtype=build.dtype,
            ops=build.ops,
            indexer=build.indexer,
            chooses=chooses,
        )
        return build.block(layer, mixer)
