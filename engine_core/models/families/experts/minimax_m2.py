"""MiniMax-M2: norms over all heads, angles for a part of a head, experts chosen by sigmoids with a
bias."""

from dataclasses import replace

from engine_core.layers.config import RouterConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import head_size_of, read_decoder, read_experts
from engine_core.models.expert_tensors import MIXTRAL_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.experts import mixtral, olmoe
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata
from engine_core.models.rotary_config import read_rotary

_BIAS = "block_sparse_moe.gate.e_score_correction_bias"


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults({"head_dim": 128, "intermediate_size": 1536})
    head_size = head_size_of(fields)
    if fields.get("rotary_dim") is not None:
        part = fields.positive_int("rotary_dim") / head_size
        fields = fields.with_defaults({"partial_rotary_factor": part})
    rotary = read_rotary(fields, head_size=head_size, default_theta=5_000_000.0, turns_a_part=True)
    experts = read_experts(
        fields,
        intermediate_size=fields.positive_int("intermediate_size"),
        default_num_experts=256,
        default_top_k=8,
        renormalise=True,
        round_weights=False,
        naming=MIXTRAL_EXPERTS,
    )
    num_layers = fields.positive_int("num_hidden_layers")
    config = read_decoder(
        fields,
        default_max_position=196_608,
        default_num_kv_heads=8,
        rotary=(rotary,) * num_layers,
        experts=(replace(experts, router=RouterConfig(scores="sigmoid", has_bias=True)),)
        * num_layers,
    )
    return replace(config, block=olmoe.block, can_be_shared=False)


def _gguf_fields(meta: Metadata, _config: Fields) -> Fields:
    fields = gguf.deepseek_experts(meta)
    return {
        "hidden_act": "silu",
        "num_local_experts": fields["n_routed_experts"],
        "num_experts_per_tok": fields["num_experts_per_tok"],
        "intermediate_size": fields["moe_intermediate_size"],
    }


FAMILIES = (
    Family(
        names=("MiniMaxM2ForCausalLM", "MiniMaxM2Model"),
        model_type="minimax_m2",
        read=read,
        tensor_suffixes=(
            ("block_sparse_moe.e_score_correction_bias", _BIAS),
            ("mlp.e_score_correction_bias", _BIAS),
        ),
        experts=MIXTRAL_EXPERTS,
        gguf=Gguf(
            architecture="minimax-m2",
            layer={
                **(gguf.PROJECTIONS | gguf.TWO_NORMS | gguf.QK_NORMS | mixtral.GGUF_EXPERTS),
                "exp_probs_b.bias": _BIAS,
            },
            fields=_gguf_fields,
            turns_a_part=True,
            theta=5_000_000.0,
        ),
    ),
)
