"""Experts as DeepSeek's config.json spells them, and those of families that follow it."""

from dataclasses import replace

from engine_core.layers.config import ExpertConfig, RouterConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.decoder_config import read_experts
from engine_core.models.errors import ModelConfigError
from engine_core.models.expert_tensors import QWEN_EXPERTS, ExpertNaming

_LEAST_SUM = 1e-20


def read_deepseek_experts(
    fields: ConfigFields, naming: ExpertNaming = QWEN_EXPERTS
) -> tuple[ExpertConfig | None, ...]:
    """Experts of each layer as `deepseek_experts` reads them; the first layers are dense, or those
    that `mlp_layer_types` says."""
    experts = deepseek_experts(fields, naming)
    return tuple(experts if sparse else None for sparse in _sparse_layers(fields))


def deepseek_experts(fields: ConfigFields, naming: ExpertNaming = QWEN_EXPERTS) -> ExpertConfig:
    """Sigmoids with a bias that chooses, groups, a factor, shared experts (arXiv:2412.19437). A
    family gives `fields` its defaults of sizes; there are no groups and no shared experts if
    nothing says so."""
    if (routed := fields.get("n_routed_experts")) is not None:
        fields = fields.with_values({"num_experts": None, "num_local_experts": routed})
    features = fields.positive_int("moe_intermediate_size")
    num_shared = _count(fields, "n_shared_experts")
    experts = read_experts(
        fields,
        intermediate_size=features,
        renormalise=fields.flag("norm_topk_prob", True),
        round_weights=False,
        naming=naming,
        shared_size=num_shared * features or None,
    )
    experts = replace(
        experts,
        shared_name=f"{naming.block}.shared_experts",
        gates_shared=False,
        router=RouterConfig(
            scores="sigmoid",
            has_bias=True,
            num_groups=fields.positive_int("n_group", 1),
            top_groups=fields.positive_int("topk_group", 1),
            epsilon=_LEAST_SUM,
            scale=fields.positive_float("routed_scaling_factor", 1.0),
            in_float32=True,
        ),
    )
    _check_groups(experts)
    return experts


def _sparse_layers(fields: ConfigFields) -> list[bool]:
    """Whether each layer has experts."""
    num_layers = fields.positive_int("num_hidden_layers")
    kinds = fields.get("mlp_layer_types")
    if kinds is None:
        num_dense = _count(fields, "first_k_dense_replace")
        return [layer >= num_dense for layer in range(num_layers)]
    is_known = isinstance(kinds, list) and set(kinds) <= {"dense", "sparse"}
    if not is_known or len(kinds) != num_layers:
        raise ModelConfigError(
            f'config: mlp_layer_types is {kinds!r}, it must say "dense" or "sparse" of each of '
            f"{num_layers} layers"
        )
    return [kind == "sparse" for kind in kinds]


def _check_groups(experts: ExpertConfig) -> None:
    router, number = experts.router, experts.num_experts
    size, rest = divmod(number, router.num_groups)
    if rest or router.top_groups > router.num_groups or experts.top_k > router.top_groups * size:
        raise ModelConfigError(
            f"config: n_group is {router.num_groups}, topk_group {router.top_groups} and "
            f"num_experts_per_tok {experts.top_k}, which do not suit {number} experts: groups must "
            "be of one size, and those that are taken must have as many experts as a token"
        )


def _count(fields: ConfigFields, name: str) -> int:
    """A whole number, 0 if absent."""
    value = fields.get(name)
    return 0 if value in (None, 0) else fields.positive_int(name)
