"""Mixtral: Mistral with experts in every layer; its window, if any, is for all layers."""

from engine_core.layers.config import RotaryConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import head_size_of, read_decoder, read_experts, read_window
from engine_core.models.expert_tensors import MIXTRAL_EXPERTS
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import (
    PROJECTIONS,
    TWO_NORMS,
    Fields,
    Gguf,
    Metadata,
    experts,
)
from engine_core.models.rotary_config import read_rotary

GGUF_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}


def read(fields: ConfigFields, rotary: RotaryConfig | None = None) -> ModelConfig:
    """`rotary`: the angles; None: those of the config."""
    rotary = rotary or read_rotary(
        fields, head_size=head_size_of(fields), default_theta=1_000_000.0
    )
    num_layers = fields.positive_int("num_hidden_layers")
    of_layer = read_experts(
        fields,
        intermediate_size=fields.positive_int("intermediate_size"),
        default_num_experts=8,
        default_top_k=2,
        renormalise=True,
        round_weights=False,
        naming=MIXTRAL_EXPERTS,
    )
    return read_decoder(
        fields,
        default_max_position=131_072,
        default_num_kv_heads=8,
        default_norm_eps=1e-5,
        sliding_windows=(read_window(fields),) * num_layers,
        rotary=(rotary,) * num_layers,
        experts=(of_layer,) * num_layers,
    )


def _has_experts(meta: Metadata) -> bool:
    """llama.cpp calls Mixtral llama, too."""
    return bool(meta.number("expert_count", 0))


def gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    if "blk.0.attn_q.bias" in meta.tensors:
        meta.refuse("experts together with attention biases")
    fields = experts(meta)
    if not fields.pop("norm_topk_prob"):
        meta.refuse("weights of experts that are not renormalised")
    window = int(meta.number("attention.sliding_window", None) or 0) or None
    return {
        "hidden_act": "silu",
        "num_local_experts": fields.pop("num_experts"),
        "sliding_window": window,
        **fields,
    }


FAMILIES = (
    Family(
        names=("MixtralForCausalLM", "MixtralModel", "MixtralForSequenceClassification"),
        model_type="mixtral",
        read=read,
        experts=MIXTRAL_EXPERTS,
        gguf=Gguf(
            architecture="llama",
            layer=PROJECTIONS | TWO_NORMS | GGUF_EXPERTS,
            fields=gguf_fields,
            is_of=_has_experts,
            pairs_rows=True,
        ),
    ),
)
