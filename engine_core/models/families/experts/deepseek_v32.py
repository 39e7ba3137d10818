"""DeepSeek V3.2 and GLM-5: DeepSeek V3 whose layers attend the keys that an indexer chooses."""

from functools import partial

from engine_core.models.blocks.latents import with_indexer
from engine_core.models.config import ModelConfig
from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import ModelConfigError
from engine_core.models.expert_tensors import QWEN_EXPERTS
from engine_core.models.families.experts import deepseek_v3
from engine_core.models.families.experts.deepseek_v2 import (
    GGUF_LAYER,
    gguf_fields,
    heads_below_each_other,
)
from engine_core.models.families.family import Family
from engine_core.models.families.gguf import NEXTN, Fields, Gguf, Metadata

_DEFAULTS = {
    "max_position_embeddings": 163_840,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}
_GLM_DEFAULTS = {
    **_DEFAULTS,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202_752,
    "index_n_heads": 32,
}


def _read(defaults: Fields, pairs: bool, fields: ConfigFields) -> ModelConfig:
    """`pairs`: of the indexer; the layers' own heads turn by neighbours."""
    fields = fields.with_defaults(defaults)
    config = deepseek_v3.read(deepseek_v3.DEFAULTS, fields)
    kinds = ["full"] * config.spec.num_layers
    if pairs:
        kinds = _kinds(fields, config.spec.num_layers)
    return with_indexer(config, fields, kinds, pairs=pairs)


def _kinds(fields: ConfigFields, num_layers: int) -> list[str]:
    """Of each layer whether it chooses: a list, letters, or every so many layers."""
    kinds = fields.get("indexer_types") or fields.get("index_topk_pattern")
    if kinds is None:
        every = fields.positive_int("index_topk_freq", 1)
        start = fields.positive_int("index_skip_topk_offset", 2) - 1
        kinds = ["S" if max(layer - start, 0) % every else "F" for layer in range(num_layers)]
    if not isinstance(kinds, list | str) or not all(isinstance(kind, str) for kind in kinds):
        raise ModelConfigError(f"config: indexer_types is {kinds!r}, it must list kinds of layers")
    return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in kinds]


_GGUF_LAYER = {
    **(GGUF_LAYER | NEXTN),
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}


def _gguf_fields(meta: Metadata, config: Fields) -> Fields:
    layers = range(config["num_hidden_layers"])
    has_own = [f"blk.{layer}.indexer.attn_k.weight" in meta.tensors for layer in layers]
    chooses = meta.values("attention.indexer.types", has_own)
    return {
        **gguf_fields(meta, config),
        "index_n_heads": int(meta.number("attention.indexer.head_count")),
        "index_head_dim": int(meta.number("attention.indexer.key_length")),
        "index_topk": int(meta.number("attention.indexer.top_k")),
        "indexer_types": ["full" if own else "shared" for own in chooses][: len(layers)],
    }


def _family(name: str, model_type: str, defaults: Fields, architecture: str, pairs: bool) -> Family:
    return Family(
        names=(f"{name}ForCausalLM", f"{name}Model"),
        model_type=model_type,
        read=partial(_read, defaults, pairs),
        ignored_prefixes=("mtp.",),
        experts=QWEN_EXPERTS,
        gguf=Gguf(
            architecture=architecture,
            layer=_GGUF_LAYER,
            fields=_gguf_fields,
            reordered=heads_below_each_other,
            has_yarn_log=True,
            has_latents=True,
        ),
    )


FAMILIES = (
    _family("DeepseekV32", "deepseek_v32", _DEFAULTS, "deepseek32", False),
    _family("GlmMoeDsa", "glm_moe_dsa", _GLM_DEFAULTS, "glm-dsa", True),
)
