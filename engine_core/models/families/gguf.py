"""How llama.cpp's files spell a family, as data (source: its convert_hf_to_gguf.py)."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
GATED = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
NORMS_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
SHARED_EXPERTS = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
MAMBA2 = {
    "ssm_in": "mamba.in_proj",
    "ssm_out": "mamba.out_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
}
KIMI_DELTA = {
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
LATENTS = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}
NEXTN = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
"""Of a head for multi-token prediction, a layer behind the model's own; the names are Qwen's."""
LLAMA = PROJECTIONS | GATED | TWO_NORMS
"""Tensors of a layer: llama.cpp's name to the checkpoint's, {} for the number of an expert. Where
both end in .weight or .bias, that is left out."""

_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func


class Metadata(Protocol):
    """What a file says of itself: keys of the architecture, and names of tensors."""

    @property
    def tensors(self) -> Container[str]: ...

    def number(self, key: str, default: Any = ...) -> Any:
        """Value of `<architecture>.<key>`, one for all layers; without default it must be there."""

    def values(self, key: str, default: Any) -> Any:
        """Value of `<architecture>.<key>`, one for all layers or a list of one a layer."""

    def numbers(self, tensor: str) -> list[float]:
        """Contents of a short tensor. Raises where it is not there."""

    def num_rows(self, tensor: str) -> int:
        """Rows of a matrix. Raises where it is not there."""

    def refuse_unless(self, key: str, *allowed: Any) -> None:
        """Raises unless the number of that key is absent or one of these."""

    def refuse(self, what: str) -> None:
        """Raises: the file holds what is not supported for its architecture."""

    def broken(self, what: str) -> None:
        """Raises: the file contradicts itself."""


Fields = dict[str, Any]
"""Fields of a config.json."""


def _no_fields(_meta: Metadata, _config: Fields) -> Fields:
    return {}


LONG_FACTORS = frozenset({"rope_factors_long.weight", "rope_factors_short.weight"})
"""Tensors that `Metadata.numbers` gives a family's `fields`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gguf:
    """
    Attributes:
        architecture: `general.architecture`.
        also: other architectures whose files of the text are the same.
        layer: tensors of a layer, see `LLAMA`.
        fields: of the config.json, beyond those that all families have; it gets those.
        is_of: whether a file of that architecture is of this family; None: if it is of no other.
        pairs_rows: rows of q and k are by rotary pairs.
        norms_plus_one: norms are stored with the one that a checkpoint leaves out.
        turns_a_part: of a head, as the file says.
        has_yarn_log: YaRN's attention factor may be divided by one of a multiplier.
        theta: of the angles, where the file does not say.
        read_tensors: what `fields` reads; no part of the model.
        has_kinds: layers differ: of one that has no attention, say, the number of heads is 0.
        by_layer: keys whose values may differ between layers; the config has the first one.
        last_norm: the tensor of the norm before the head.
        top: tensors of no layer, beside embedding, head and last norm.
        in_place: tensors that are handed on as they lie in the file, floating ones too.
        reordered: a tensor by the checkpoint's name, with the config -> as the checkpoint has it;
            None: rows and columns are in the checkpoint's order.
        scales: keys such as "logit_scale" that `fields` reads; elsewhere they must be one.
        biases_output: a config's attention_bias is also of the output; absent ones are zero.
        norm_eps: the key of what norms add.
        has_latents: a head of the config is what turns of one; keys are as long as it caches them.
        layers: what names of the checkpoint's layers begin with.
        is_causal: tokens see those before them alone.
    """

    architecture: str
    layer: Mapping[str, str]
    also: tuple[str, ...] = ()
    fields: Callable[[Metadata, Fields], Fields] = _no_fields
    is_of: Callable[[Metadata], bool] | None = None
    pairs_rows: bool = False
    norms_plus_one: bool = False
    turns_a_part: bool = False
    has_yarn_log: bool = False
    theta: float = 10_000.0
    read_tensors: frozenset[str] = frozenset()
    has_kinds: bool = False
    by_layer: frozenset[str] = frozenset()
    last_norm: str = "output_norm.weight"
    top: Mapping[str, str] = field(default_factory=dict)
    in_place: frozenset[str] = frozenset()
    reordered: Callable[[str, Any, Fields], Any] | None = None
    scales: frozenset[str] = frozenset()
    biases_output: bool = True
    norm_eps: str = "attention.layer_norm_rms_epsilon"
    has_latents: bool = False
    layers: str = "model.layers."
    is_causal: bool = True

    @property
    def architectures(self) -> tuple[str, ...]:
        """All values of `general.architecture`."""
        return (self.architecture, *self.also)

    @property
    def has_experts(self) -> bool:
        """Whether layers hold stacks of experts."""
        return any("{}" in name for name in self.layer.values())


def experts(meta: Metadata, *, renormalises: bool = True) -> Fields:
    """Number and choice of experts, as a Qwen3MoeConfig has them.
    `renormalises`: whether weights are, where the file does not say."""
    for key in ("expert_group_count", "leading_dense_block_count"):
        meta.refuse_unless(key, 0)
    meta.refuse_unless("expert_gating_func", _SOFTMAX, 0)
    meta.refuse_unless("expert_weights_scale", 1.0, 0.0)
    return {
        "num_experts": int(meta.number("expert_count")),
        "num_experts_per_tok": int(meta.number("expert_used_count")),
        "norm_topk_prob": bool(meta.number("expert_weights_norm", renormalises)),
    }


def deepseek_experts(meta: Metadata) -> Fields:
    """Experts, and layers before them, as a DeepseekV3Config has them."""
    meta.refuse_unless("expert_gating_func", _SIGMOID)
    groups = int(meta.number("expert_group_count", 0)) or 1
    return {
        "hidden_act": "silu",
        "n_routed_experts": int(meta.number("expert_count")),
        "num_experts_per_tok": int(meta.number("expert_used_count")),
        "moe_intermediate_size": int(meta.number("expert_feed_forward_length")),
        "n_shared_experts": int(meta.number("expert_shared_count", 0)),
        "n_group": groups,
        "topk_group": int(meta.number("expert_group_used_count", groups)) or groups,
        "first_k_dense_replace": int(meta.number("leading_dense_block_count", 0)),
        "norm_topk_prob": bool(meta.number("expert_weights_norm", True)),
        "routed_scaling_factor": float(meta.number("expert_weights_scale", 0.0)) or 1.0,
    }


def layer_types(meta: Metadata, num_layers: int, every: int) -> list[str]:
    """ "sliding_attention" or "full_attention" of each layer.
    `every`: so many layers, the last one sees everything, where the file does not say."""
    pattern = meta.values("attention.sliding_window_pattern", every)
    if isinstance(pattern, list):
        is_sliding = [bool(flag) for flag in pattern]
    else:
        is_sliding = [bool((layer + 1) % int(pattern)) for layer in range(num_layers)]
    if len(is_sliding) != num_layers:
        meta.broken(f"sliding_window_pattern has {len(is_sliding)} entries for {num_layers} layers")
    return ["sliding_attention" if each else "full_attention" for each in is_sliding]


def layer_kinds(meta: Metadata, num_layers: int, kinds: Mapping[str, str]) -> list[str]:
    """What each layer is. `kinds`: the matrix that such a layer alone has, to its kind."""
    found = [
        kind
        for layer in range(num_layers)
        for tensor, kind in kinds.items()
        if f"blk.{layer}.{tensor}.weight" in meta.tensors
    ]
    if len(found) != num_layers:
        meta.broken(f"{len(found)} of {num_layers} layers have a matrix of {', '.join(kinds)}")
    return found


def mamba2_sizes(meta: Metadata, config: Fields, kinds: list[str]) -> Fields:
    """Sizes of Mamba-2 layers, as a BambaConfig has them."""
    inner, num_heads = (int(meta.number(f"ssm.{key}")) for key in ("inner_size", "time_step_rank"))
    layer = kinds.index("linear_attention") if "linear_attention" in kinds else 0
    return {
        "hidden_act": "silu",
        "mamba_n_heads": num_heads,
        "mamba_d_head": inner // num_heads,
        "mamba_expand": inner // config["hidden_size"],
        "mamba_n_groups": int(meta.number("ssm.group_count")),
        "mamba_d_state": int(meta.number("ssm.state_size")),
        "mamba_d_conv": int(meta.number("ssm.conv_kernel")),
        "mamba_conv_bias": f"blk.{layer}.ssm_conv1d.bias" in meta.tensors,
        "mamba_proj_bias": f"blk.{layer}.ssm_in.bias" in meta.tensors,
    }


def latent_sizes(meta: Metadata, config: Fields, value_size: int) -> Fields:
    """Sizes of latent attention. `value_size`: of a head, where the file does not say."""
    rope_size = int(meta.number("rope.dimension_count"))
    key_size = int(meta.number("attention.key_length_mla", meta.number("attention.key_length")))
    ranks = {"q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank"}
    return {
        **{field: meta.number(key, None) for field, key in ranks.items()},
        "num_key_value_heads": config["num_attention_heads"],
        "qk_rope_head_dim": rope_size,
        "qk_nope_head_dim": key_size - rope_size,
        "v_head_dim": int(meta.number("attention.value_length_mla", value_size)),
    }
