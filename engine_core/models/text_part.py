"""The text model of a checkpoint that also holds encoders of images or sounds: where its config and
its tensors are, as data. With prompts of text the model around it adds nothing. Needs no torch."""

from collections.abc import Mapping
from typing import Any

TEXT_PLACES = ("thinker_config", "text_config", "llm_config", "language_config")
"""Fields that hold the text's config, or a config that holds it."""

TEXT_OF = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "paligemma": "gemma",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_asr": "qwen3",
    "smolvlm": "llama",
    "voxtral": "llama",
}
"""By `model_type` of the whole: that of a text which does not say it, as in transformers."""

_PREFIX_MODELS = ("paligemma",)
"""Their texts attend to a prompt in both directions, which their configs do not spell out."""

_FLAT = ("qwen2_vl", "qwen2_5_vl")
"""Published with the text's fields among those of the whole."""

_PLAIN: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_unified_text": (
        "gemma4_text",
        {
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
            "max_position_embeddings": 1 << 18,
        },
    ),
    "glm4v_text": ("glm4", {"attention_bias": True}),
    "glm4v_moe_text": ("glm4_moe", {}),
    "kimi_k2": ("deepseek_v3", {}),
    "qwen2_vl_text": ("qwen2", {}),
    "qwen2_5_vl_text": ("qwen2", {}),
    "qwen2_5_omni_text": ("qwen2", {}),
    "qwen3_asr_text": ("qwen3", {}),
    "qwen3_vl_text": ("qwen3", {}),
    "qwen3_vl_moe_text": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_omni_moe_text": ("qwen3_moe", {}),
}
"""Texts that are another `model_type` where all axes have equal positions, with fields that they
do not spell out."""

_SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
}
"""What LLaVA's published configs leave out, by `model_type`: the defaults of transformers."""

TENSOR_PREFIXES = (
    ("thinker.model.", "model."),
    ("thinker.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.layers.", "model.layers."),
    ("language_model.embed_tokens.", "model.embed_tokens."),
    ("language_model.norm.", "model.norm."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
"""(of a checkpoint, of the text model alone); names with none of the first are as they are."""

_OF_TEXT = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.", "mtp.")


def inner_text(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The text's fields as they stand within a config; None: it has no such part."""
    for place in TEXT_PLACES:
        if isinstance(inner := config.get(place), Mapping):
            return inner_text(inner) or inner
    return None


def text_part(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config of the text model by itself, as that of a model that takes text alone; None: it
    is one already. Whether the head is tied is a matter of the whole, if that says it."""
    whole = str(config.get("model_type"))
    inner = inner_text(config)
    if inner is None and whole not in _FLAT:
        return None
    fields = dict(config if inner is None else inner)
    kind = TEXT_OF.get(whole) if inner is None else inner.get("model_type", TEXT_OF.get(whole))
    if isinstance(kind, str):
        plain, more = _PLAIN.get(kind, (kind, {}))
        # names of classes are the whole's, or of code that the publisher had
        named = {"model_type": plain, "architectures": None}
        fields = _SIZES.get(plain, {}) | more | fields | named
    if whole in _PREFIX_MODELS and fields.get("use_bidirectional_attention") is None:
        fields["use_bidirectional_attention"] = True
    if config.get("tie_word_embeddings") is not None:
        fields["tie_word_embeddings"] = config["tie_word_embeddings"]
    return fields


def text_tensor(name: str) -> str | None:
    """The name in the text model alone of a tensor of the whole; None: it is of another part."""
    for prefix, replacement in TENSOR_PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name if name.startswith(_OF_TEXT) else None
