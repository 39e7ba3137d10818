"""DeepSeek V2, V2.5, V2-Lite and Coder-V2: latent attention, and experts by softmax beside some
that every token goes through."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine_core.layers.config import ExpertConfig
from engine_core.models.blocks.latents import latent_fields, with_latents
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_decoder
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.expert_config import read_deepseek_experts
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families import gguf
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import Fields, Gguf, Metadata

if TYPE_CHECKING:
    import torch

    from kernels.interface.weights import WeightPart

_DEFAULTS = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "norm_topk_prob": False,
}


def read(fields: ConfigFields) -> ModelConfig:
    fields = latent_fields(fields.with_defaults(_DEFAULTS))
    if fields.flag("norm_topk_prob", False):
        raise UnsupportedArchitecture("norm_topk_prob of DeepSeek V2 is not supported")
    check_scores(fields, "softmax")
    method = fields.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedArchitecture(
            f'topk_method "{method}" of DeepSeek V2 is not supported; supported: greedy, '
            "group_limited_greedy"
        )
    if method == "greedy":
        fields = fields.with_values({"n_group": 1, "topk_group": 1})
    experts = tuple(each and _by_softmax(each) for each in read_deepseek_experts(fields))
    config = read_decoder(fields, default_max_position=2048, experts=experts)
    return with_latents(config, fields, pairs=True)


def check_scores(fields: ConfigFields, scores: str) -> None:
    """Raises UnsupportedArchitecture: the router's scores are others than this family's."""
    spelled = fields.text("scoring_func", scores)
    if spelled != scores or fields.positive_int("moe_layer_freq", 1) != 1:
        raise UnsupportedArchitecture(
            f'scoring_func "{spelled}" with moe_layer_freq {fields.get("moe_layer_freq") or 1} is '
            f'not supported here, only "{scores}" in every layer behind the dense ones'
        )


def _by_softmax(experts: ExpertConfig) -> ExpertConfig:
    router = replace(experts.router, scores="softmax", has_bias=False, epsilon=0.0)
    return replace(experts, router=router)


GGUF_LAYER = (
    gguf.LATENTS
    | gguf.GATED
    | gguf.TWO_NORMS
    | gguf.QWEN_EXPERTS
    | {
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
    }
)
_SIGMOID = 2  # expert_gating_func


def gguf_fields(meta: Metadata, config: Fields) -> Fields:
    """Fields of either DeepSeek's config. Files from before 2025 say nothing of the size of values,
    which is that of the files' values then."""
    groups = int(meta.number("expert_group_count", 0)) or 1
    rotary: dict[str, Any] = config["rope_parameters"]
    if log := rotary.get("mscale_all_dim"):  # the file has it times 0.1; mscale is equal
        rotary = rotary | dict.fromkeys(("mscale", "mscale_all_dim"), round(log * 10, 6))
    return {
        "hidden_act": "silu",
        **gguf.latent_sizes(meta, config, int(meta.number("attention.value_length"))),
        "rope_parameters": rotary,
        "rope_interleave": True,
        "n_routed_experts": int(meta.number("expert_count")),
        "num_experts_per_tok": int(meta.number("expert_used_count")),
        "n_shared_experts": int(meta.number("expert_shared_count", 0)),
        "moe_intermediate_size": int(meta.number("expert_feed_forward_length")),
        "first_k_dense_replace": int(meta.number("leading_dense_block_count", 0)),
        "routed_scaling_factor": float(meta.number("expert_weights_scale", 0.0)) or 1.0,
        "norm_topk_prob": bool(meta.number("expert_weights_norm", False)),
        "n_group": groups,
        "topk_group": int(meta.number("expert_group_used_count", 0)) or 1,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def by_sigmoid(meta: Metadata) -> bool:
    """Whether a file is of DeepSeek V3 or one that follows it; files of GLM-4.7-Flash may not say
    so, but hold the bias."""
    dense = int(meta.number("leading_dense_block_count", 0))
    has_bias = f"blk.{dense}.exp_probs_b.bias" in meta.tensors
    return has_bias or meta.number("expert_gating_func", 0) == _SIGMOID


def heads_below_each_other(name: str, part: Any, _config: Fields) -> WeightPart:
    """`attn_k_b`, which has the transposed rows of a head in kv_b_proj, and `attn_v_b`: what the
    products of a head multiply with, [H, N, E] -> [H * N, E]."""
    if not name.endswith((".k_b_proj.weight", ".v_b_proj.weight")) or len(part.shape) != 3:
        return part  # type: ignore[no-any-return]
    heads_HNE: torch.Tensor = part
    return heads_HNE.flatten(0, 1)


FAMILIES = (
    Family(
        names=("DeepseekV2ForCausalLM", "DeepseekV2Model", "DeepseekV2ForSequenceClassification"),
        model_type="deepseek_v2",
        read=read,
        experts=QWEN_EXPERTS,
        gguf=Gguf(
            architecture="deepseek2",
            layer=GGUF_LAYER,
            fields=gguf_fields,
            reordered=heads_below_each_other,
            has_yarn_log=True,
            has_latents=True,
        ),
    ),
)
