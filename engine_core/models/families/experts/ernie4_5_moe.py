"""ERNIE 4.5 with experts: they are chosen by softmax with a bias, beside some that all tokens go
through; rotary pairs lie side by side."""

from dataclasses import replace

from engine_core.layers.config import RouterConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.expert_config import read_deepseek_experts
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.dense import ernie4_5
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata

_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "moe_intermediate_size": 1536,
    "moe_num_experts": 64,
    "moe_k": 6,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
}
_SPELLED = {
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_k",
    "n_shared_experts": "moe_num_shared_experts",
}


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults(_DEFAULTS)
    if fields.flag("use_bias", False):
        raise UnsupportedArchitecture("use_bias of ERNIE 4.5 with experts: its head has one, too")
    config = ernie4_5.read(fields)
    first, last = (fields.get(f"moe_layer_{end}_index") for end in ("start", "end"))
    if not isinstance(first, int) or not isinstance(last, int):
        raise ModelConfigError(f"config: experts from layer {first!r} to {last!r}, not two numbers")
    every, layers = fields.positive_int("moe_layer_interval", 1), range(config.spec.num_layers)
    sparse = layers[first : None if last == -1 else last + 1]
    kinds = ["sparse" if each in sparse and not (each + 1) % every else "dense" for each in layers]
    fields = fields.with_values({ours: fields.get(name) for ours, name in _SPELLED.items()})
    router = RouterConfig(
        has_bias=True, epsilon=fields.positive_float("moe_norm_min", 1e-12), in_float32=True
    )
    experts = read_deepseek_experts(fields.with_values({"mlp_layer_types": kinds}))
    return replace(
        config,
        experts=tuple(
            each and replace(each, router=router, round_weights=True) for each in experts
        ),
    )


def _gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    return {
        "hidden_act": "silu",
        "moe_num_experts": int(meta.number("expert_count")),
        "moe_k": int(meta.number("expert_used_count")),
        "moe_intermediate_size": int(meta.number("expert_feed_forward_length")),
        "moe_num_shared_experts": int(meta.number("expert_shared_count", 0)),
        "moe_layer_start_index": int(meta.number("leading_dense_block_count", 0)),
        "moe_layer_interval": int(meta.number("interleave_moe_layer_step")),
    }


_BIAS = "mlp.gate.e_score_correction_bias"
FAMILIES = (
    Family(
        names=("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeModel"),
        model_type="ernie4_5_moe",
        read=read,
        tensor_suffixes=(
            ("mlp.moe_statics.e_score_correction_bias", _BIAS),
            ("mlp.gate.moe_statics.e_score_correction_bias", _BIAS),
        ),
        ignored_prefixes=("model.mtp_",),
        experts=QWEN_EXPERTS,
        gguf=Gguf(
            architecture="ernie4_5-moe",
            layer=gguf.LLAMA | gguf.QWEN_EXPERTS | gguf.SHARED_EXPERTS,
            fields=_gguf_fields,
        ),
    ),
)
