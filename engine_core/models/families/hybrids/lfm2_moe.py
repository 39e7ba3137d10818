"""LFM2-MoE: LFM2 with experts in all layers but the first, chosen by sigmoids."""

from dataclasses import replace

from engine_core.layers.config import RouterConfig
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_experts
from engine_core.models.errors import ModelConfigError
from engine_core.models.expert_tensors import LFM2_EXPERTS
from engine_core.models.families.gguf import Fields, Metadata
from engine_core.models.families.hybrids import lfm2


def read(fields: ConfigFields) -> ModelConfig:
    num_dense = fields.get("num_dense_layers")
    num_dense = 2 if num_dense is None else num_dense
    if not isinstance(num_dense, int) or num_dense < 0:
        raise ModelConfigError(f"config: num_dense_layers is {num_dense!r}, it must be 0 or more")
    # dense layers are as wide as the config says
    config = lfm2.read(fields.with_values({"block_auto_adjust_ff_dim": False}))
    experts = read_experts(
        fields,
        intermediate_size=fields.positive_int("moe_intermediate_size", 1792),
        default_num_experts=32,
        default_top_k=4,
        renormalise=fields.flag("norm_topk_prob", True),
        round_weights=False,
        naming=LFM2_EXPERTS,
    )
    router = RouterConfig(
        scores="sigmoid",
        has_bias=fields.flag("use_expert_bias", True),
        epsilon=1e-6,
        scale=fields.positive_float("routed_scaling_factor", 1.0),
    )
    sparse = replace(experts, router=router)
    layers = range(config.spec.num_layers)
    return replace(config, experts=tuple(None if layer < num_dense else sparse for layer in layers))


_GGUF_EXPERTS = {
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
    "exp_probs_b.bias": "feed_forward.gate.e_score_correction_bias",
}
_SIGMOID = 2  # expert_gating_func


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    meta.refuse_unless("expert_gating_func", _SIGMOID)
    return {
        **lfm2.gguf_fields(meta, config),
        "num_experts": int(meta.number("expert_count")),
        "num_experts_per_tok": int(meta.number("expert_used_count")),
        "moe_intermediate_size": int(meta.number("expert_feed_forward_length")),
        "num_dense_layers": int(meta.number("leading_dense_block_count", 0)),
        "use_expert_bias": any(
            f"blk.{layer}.exp_probs_b.bias" in meta.tensors
            for layer in range(config["num_hidden_layers"])
        ),
    }


assert lfm2.FAMILY.gguf is not None
FAMILIES = (
    replace(
        lfm2.FAMILY,
        names=("Lfm2MoeForCausalLM", "Lfm2MoeModel"),
        model_type="lfm2_moe",
        read=read,
        tensor_suffixes=(
            ("feed_forward.expert_bias", "feed_forward.gate.e_score_correction_bias"),
            *lfm2.FAMILY.tensor_suffixes,
        ),
        experts=LFM2_EXPERTS,
        gguf=replace(
            lfm2.FAMILY.gguf,
            architecture="lfm2moe",
            layer=lfm2.GGUF_LAYER | _GGUF_EXPERTS,
            fields=_gguf_fields,
        ),
    ),
)
