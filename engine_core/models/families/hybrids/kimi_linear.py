"""Kimi Linear: Kimi delta attention, now and then latent attention without positions, and experts
as DeepSeek V3 chooses them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine_core.layers.config import DeltaNetConfig, InterleavedRows, RotaryConfig
from engine_core.models.blocks.hybrids import read_kinds, with_kept
from engine_core.models.blocks.latents import LatentBlock, latent_fields, with_latents
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.expert_config import read_deepseek_experts
from engine_core.models.expert_tensors import MIXTRAL_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.experts.deepseek_v2 import heads_below_each_other
from engine_core.models.families.experts.mixtral import GGUF_EXPERTS
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata
from engine_core.models.layer_cache import PagedKeys, recurrent_state

if TYPE_CHECKING:
    from engine_core.models.blocks.block import Block, BlockBuilder

_DEFAULTS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 1_048_576,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
}
_OWN_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_local_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
}
"""Kimi's names of fields, to DeepSeek's."""
_ONLY = {"moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "mla_use_nope": True}
_SIZES = {  # of the delta attention: beside the others, and in a field of their own
    "linear_num_heads": ("num_heads", 32),
    "linear_head_dim": ("head_dim", 128),
    "linear_conv_kernel_dim": ("short_conv_kernel_size", 4),
}


def read(fields: ConfigFields) -> ModelConfig:
    from engine_core.layers.kimi_delta import kimi_delta_shape  # torch: not for `--help`

    for name, allowed in _ONLY.items():
        if fields.get(name) not in (None, allowed):
            raise UnsupportedArchitecture(
                f"{name} {fields.get(name)!r} of Kimi Linear is not supported, only {allowed!r}"
            )
    given = {name: fields.get(theirs) for theirs, name in _OWN_NAMES.items()}
    given = {name: value for name, value in given.items() if value is not None}
    fields = fields.with_defaults(_DEFAULTS | given)
    fields = latent_fields(fields.with_values({"rope_scaling": None, "rope_parameters": None}))
    own = ConfigFields(fields.mapping("linear_attn_config") or {})
    num_heads, size, width = (
        own.positive_int(name, fields.positive_int(ours, default))
        for ours, (name, default) in _SIZES.items()
    )
    config = read_decoder(
        fields,
        default_max_position=1,
        default_norm_eps=1e-5,
        experts=read_deepseek_experts(fields, MIXTRAL_EXPERTS),
    )
    if fields.get("layer_types") is None:
        fields = fields.with_values({"layer_types": _kinds(own, config.spec.num_layers)})
    kinds = read_kinds(fields, "layer_types", ("linear_attention", "full_attention"))
    config = with_latents(config, fields, pairs=False)
    sizes = DeltaNetConfig(
        num_key_heads=num_heads, num_heads=num_heads, key_size=size, value_size=size, width=width
    )
    state = recurrent_state(kimi_delta_shape(sizes))
    assert isinstance(config.block, LatentBlock)
    still = RotaryConfig((0.0,) * (config.block.sizes.rope_size // 2))
    attends = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    return replace(
        with_kept(config, [None if layer in attends else state for layer in range(len(kinds))]),
        rotary=(still,) * config.spec.num_layers,
        # a layer of another kind has a q_proj, too, which may be as long
        interleaved=tuple(
            _of_layer(layer, each) for layer in attends for each in config.interleaved
        ),
        block=_Block(config.block, sizes),
    )


def _kinds(own: ConfigFields, num_layers: int) -> list[str]:
    """Kinds of layers by `linear_attn_config`, which counts them from one."""
    attends = own.get("full_attn_layers")
    if attends is None:
        attends = list(range(5, num_layers + 1, 4))
    if not isinstance(attends, list) or not all(isinstance(layer, int) for layer in attends):
        raise ModelConfigError(f"config: full_attn_layers is {attends!r}, it must list layers")
    return [
        "full_attention" if layer + 1 in attends else "linear_attention"
        for layer in range(num_layers)
    ]


def _of_layer(layer: int, rows: InterleavedRows) -> InterleavedRows:
    prefix = f"layers.{layer}."
    parts = tuple([(prefix + name, pieces) for name, pieces in rows.parts])
    transposed = frozenset(prefix + name for name in rows.transposed)
    return replace(rows, name=prefix + rows.name, parts=parts, transposed=transposed)


@dataclass(frozen=True, slots=True)
class _Block:
    latent: LatentBlock
    delta: DeltaNetConfig

    def __call__(self, build: BlockBuilder, layer: int) -> Block:
        from engine_core.layers.kimi_delta import KimiDeltaAttention

        if isinstance(build.config.spec.layers[layer], PagedKeys):
            return self.latent(build, layer)
        mixer = KimiDeltaAttention(
            f"model.layers.{layer}.self_attn",
            build.place(layer),
            self.delta,
            build.config.spec.hidden_size,
            norm_eps=build.config.norm_eps,
            dtype=build.dtype,
            ops=build.ops,
        )
        return build.block(layer, mixer)


_SHARED = {f"ffn_{part}_shexp": f"shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_GGUF_LAYER = {
    **(gguf.PROJECTIONS | gguf.LATENTS | gguf.GATED | gguf.TWO_NORMS),
    **(gguf.KIMI_DELTA | GGUF_EXPERTS),
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    **{ours: f"block_sparse_moe.{name}" for ours, name in _SHARED.items()},
}


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    kinds = {"ssm_f_a": "linear_attention", "attn_kv_a_mqa": "full_attention"}
    meta.refuse_unless("expert_gating_func", 2)  # sigmoid
    return {
        "hidden_act": "silu",
        **gguf.latent_sizes(meta, config, 0),
        "layer_types": gguf.layer_kinds(meta, config["num_hidden_layers"], kinds),
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": int(meta.number("kda.head_dim")),
        "linear_conv_kernel_dim": int(meta.number("ssm.conv_kernel")),
        "num_experts": int(meta.number("expert_count")),
        "num_experts_per_tok": int(meta.number("expert_used_count")),
        "num_shared_experts": int(meta.number("expert_shared_count", 0)),
        "moe_intermediate_size": int(meta.number("expert_feed_forward_length")),
        "first_k_dense_replace": int(meta.number("leading_dense_block_count", 0)),
        "routed_scaling_factor": float(meta.number("expert_weights_scale", 1.0)),
    }


def _as_published(name: str, part: Any, config: Fields) -> Any:
    if name.endswith("_conv1d.weight"):
        return part.reshape(-1, 1, part.shape[-1])
    if name.endswith(".A_log"):
        return part.view(1, 1, -1, 1)
    return heads_below_each_other(name, part, config)


FAMILIES = (
    Family(
        names=("KimiLinearForCausalLM", "KimiLinearModel"),
        model_type="kimi_linear",
        read=read,
        tensor_suffixes=(
            ("forget_gate.f_a_proj.weight", "f_a_proj.weight"),  # of adapters
            ("forget_gate.f_b_proj.weight", "f_b_proj.weight"),
            *(  # so transformers writes dense layers
                (f"block_sparse_moe.{part}_proj.weight", f"mlp.{part}_proj.weight")
                for part in ("gate", "up", "down")
            ),
        ),
        experts=MIXTRAL_EXPERTS,
        gguf=Gguf(
            architecture="kimi-linear",
            layer=_GGUF_LAYER,
            fields=_gguf_fields,
            has_kinds=True,
            has_latents=True,
            reordered=_as_published,
        ),
    ),
)
