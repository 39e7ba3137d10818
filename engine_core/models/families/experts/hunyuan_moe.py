"""Hunyuan-A13B: Hunyuan with experts beside a feed-forward that all tokens go through."""

from dataclasses import replace

from engine_core.layers.config import RouterConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_experts
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.dense import hunyuan
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata


def read(fields: ConfigFields) -> ModelConfig:
    top_k, number = (_of_all_layers(fields, name) for name in ("moe_topk", "num_experts"))
    fields = fields.with_values({"num_experts_per_tok": top_k, "num_experts": number})
    size = fields.positive_int("intermediate_size")
    experts = read_experts(
        fields,
        intermediate_size=size,
        default_num_experts=1,
        default_top_k=1,
        renormalise=True,
        round_weights=False,
        naming=QWEN_EXPERTS,
        shared_size=size,
    )
    router, name = RouterConfig(in_float32=True), "mlp.shared_mlp"
    experts = replace(experts, shared_name=name, gates_shared=False, router=router)
    config = hunyuan.read(fields)
    return replace(config, experts=(experts,) * config.spec.num_layers)


def _of_all_layers(fields: ConfigFields, name: str) -> object:
    """A number that may be spelled out once a layer."""
    value = fields.get(name)
    if not isinstance(value, list):
        return value
    if len({*map(str, value)}) != 1:
        raise UnsupportedArchitecture(f"{name} of Hunyuan differs between layers: {value!r:.60}")
    return value[0]


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    experts = gguf.experts(meta)
    return {
        **hunyuan.gguf_fields(meta, config),
        "num_experts": experts["num_experts"],
        "moe_topk": experts["num_experts_per_tok"],
    }


_SHARED = {f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")}
FAMILIES = (
    Family(
        names=("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Model"),
        model_type="hunyuan_v1_moe",
        read=read,
        tensor_suffixes=(*hunyuan.SUFFIXES, ("mlp.gate.wg.weight", "mlp.gate.weight")),
        experts=QWEN_EXPERTS,
        gguf=Gguf(
            architecture="hunyuan-moe",
            layer={
                **(gguf.PROJECTIONS | gguf.TWO_NORMS | gguf.QWEN_EXPERTS),
                **(hunyuan.GGUF_NORMS | _SHARED),
                "ffn_gate_inp": "mlp.gate.wg",
            },
            fields=_gguf_fields,
        ),
    ),
)
