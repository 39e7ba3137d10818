"""Nemotron 3 (Nemotron-H with experts): llama.cpp's files of it; folders are `nemotron_h`'s."""

from dataclasses import replace

from engine_core.models.families import gguf
from engine_core.models.families.gguf import Fields, Gguf, Metadata
from engine_core.models.families.hybrids import nemotron_h

_EXPERTS = {
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}


def _fields(meta: Metadata, config: Fields) -> Fields:
    meta.refuse_unless("expert_group_count", 1, 0)  # how many a token's are of is not in the file
    return {
        **nemotron_h.gguf_fields(meta, config),
        **gguf.deepseek_experts(meta),
        "moe_shared_expert_intermediate_size": int(
            meta.number("expert_shared_feed_forward_length")
        ),
        "moe_latent_size": int(meta.number("moe_latent_size", 0)) or None,
    }


FAMILIES = (
    replace(
        nemotron_h.FAMILY,
        gguf=Gguf(
            architecture="nemotron_h_moe",
            layer=nemotron_h.GGUF_LAYER | _EXPERTS,
            fields=_fields,
            has_kinds=True,
        ),
    ),
)
