"""The options of a sparse layer, and how families of models spell them.

Owns what is read of experts, layer by layer. Must not know the rest of a decoder's options.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import ModelConfigError, UnsupportedArchitecture
from engine_core.models.expert_tensors import MIXTRAL_EXPERTS, QWEN_EXPERTS, ExpertNaming


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """What one layer's experts are.

    Attributes:
        top_k: experts of a token.
        intermediate_size: of one expert.
        renormalise: the weights of a token's experts are made to sum to one.
        round_weights: they are rounded to the model's dtype before they are used.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool
    round_weights: bool
    naming: ExpertNaming


Experts = tuple[ExpertConfig | None, ...]
"""By layer; None where the feed-forward is dense."""


def read_mixtral_experts(fields: ConfigFields) -> Experts:
    """Mixtral: experts in every layer."""
    experts = _read_experts(
        fields,
        intermediate_size=fields.positive_int("intermediate_size"),
        default_num_experts=8,
        default_top_k=2,
        renormalise=True,
        round_weights=False,
        naming=MIXTRAL_EXPERTS,
    )
    return (experts,) * fields.positive_int("num_hidden_layers")


def read_qwen3_experts(fields: ConfigFields) -> Experts:
    """Qwen3-MoE: experts in each `decoder_sparse_step`-th layer that `mlp_only_layers` spares."""
    experts = _read_experts(
        fields,
        intermediate_size=fields.positive_int("moe_intermediate_size", 768),
        default_num_experts=128,
        default_top_k=8,
        renormalise=fields.flag("norm_topk_prob", False),
        round_weights=True,
        naming=QWEN_EXPERTS,
    )
    step = fields.positive_int("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    num_layers = fields.positive_int("num_hidden_layers")
    if not isinstance(dense, list) or not all(layer in range(num_layers) for layer in dense):
        raise ModelConfigError(
            f"config: mlp_only_layers is {dense!r}, it must list layers from 0 to {num_layers - 1}"
        )
    return tuple(
        None if layer in dense or (layer + 1) % step else experts for layer in range(num_layers)
    )


def _read_experts(
    fields: ConfigFields,
    *,
    intermediate_size: int,
    default_num_experts: int,
    default_top_k: int,
    renormalise: bool,
    round_weights: bool,
    naming: ExpertNaming,
) -> ExpertConfig:
    if fields.text("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedArchitecture(
            f'experts with activation "{fields.get("hidden_act")}" are not supported, only silu'
        )
    # transformers takes either name for the other
    old, new = fields.get("num_experts"), fields.get("num_local_experts")
    if None not in (old, new) and old != new:
        raise ModelConfigError(
            f"config: num_experts is {old!r} and num_local_experts {new!r}; they are one number"
        )
    name = "num_experts" if new is None else "num_local_experts"
    num_experts = fields.positive_int(name, default_num_experts)
    top_k = fields.positive_int("num_experts_per_tok", default_top_k)
    if top_k > num_experts:
        raise ModelConfigError(
            f"config: num_experts_per_tok is {top_k}, but there are only {num_experts} experts"
        )
    return ExpertConfig(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=intermediate_size,
        renormalise=renormalise,
        round_weights=round_weights,
        naming=naming,
    )
