"""Granite 3 with experts: its factors, and maybe a feed-forward that all tokens go through."""

from dataclasses import replace

from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_experts
from engine_core.models.expert_tensors import MIXTRAL_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.dense import granite
from engine_core.models.families.experts import mixtral
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata


def read(fields: ConfigFields) -> ModelConfig:
    fields = fields.with_defaults({"intermediate_size": 11_008})
    shared = fields.get("shared_intermediate_size") or None
    experts = read_experts(
        fields,
        intermediate_size=fields.positive_int("intermediate_size"),
        default_num_experts=8,
        default_top_k=2,
        renormalise=True,
        round_weights=True,
        naming=MIXTRAL_EXPERTS,
        shared_size=None if shared is None else fields.positive_int("shared_intermediate_size"),
    )
    experts = replace(experts, shared_name="mlp", gates_shared=False)
    config = granite.read(fields)
    return replace(config, experts=(experts,) * len(config.experts))


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    experts = gguf.experts(meta)
    if not experts.pop("norm_topk_prob"):
        meta.refuse("weights of experts that are not renormalised")
    return {
        **granite.gguf_fields(meta, config),
        "num_local_experts": experts.pop("num_experts"),
        **experts,
        "shared_intermediate_size": int(meta.number("expert_shared_feed_forward_length", 0)),
    }


_GGUF_LAYER = {
    **(gguf.PROJECTIONS | gguf.TWO_NORMS | mixtral.GGUF_EXPERTS),
    "ffn_gate_shexp": "mlp.gate_proj",
    "ffn_up_shexp": "mlp.up_proj",
    "ffn_down_shexp": "mlp.down_proj",
}
_PLAIN = Family(
    names=("GraniteMoeForCausalLM", "GraniteMoeModel"),
    model_type="granitemoe",
    read=read,
    experts=MIXTRAL_EXPERTS,
)
FAMILIES = (
    _PLAIN,
    replace(
        _PLAIN,
        names=("GraniteMoeSharedForCausalLM", "GraniteMoeSharedModel"),
        model_type="granitemoeshared",
        tensor_suffixes=(("shared_mlp.output_linear.weight", "mlp.down_proj.weight"),),
        gguf=Gguf(
            architecture="granitemoe",
            layer=_GGUF_LAYER,
            fields=_gguf_fields,
            pairs_rows=True,
            scales=granite.SCALES,
        ),
    ),
)
