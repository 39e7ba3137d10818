"""Tiny random models of transformers with encoders of images or sounds around a text model."""

import torch
import transformers

TEXT = {
    "vocab_size": 131, "hidden_size": 40, "intermediate_size": 50, "num_hidden_layers": 2,
    "num_attention_heads": 5, "num_key_value_heads": 1, "max_position_embeddings": 256,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
AXES = TEXT | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
}
HALF_TURNED = TEXT | {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.4,
    },
}  # fmt: skip
GEMMA4 = TEXT | {
    "head_dim": 8, "global_head_dim": 12, "attention_k_eq_v": True, "sliding_window": 6,
    "num_hidden_layers": 3, "hidden_size_per_layer_input": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "num_key_value_heads": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4, "projection_dim": 40,
}  # fmt: skip
CLIP = VISION | {"model_type": "clip_vision_model"}
PIXTRAL = VISION | {"model_type": "pixtral", "head_dim": 16}
SIGLIP = VISION | {"model_type": "siglip_vision_model"}
PATCHES = {
    "depth": 1, "num_heads": 2, "patch_size": 4, "hidden_size": 32, "intermediate_size": 48,
    "out_hidden_size": 40, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    "image_size": 16,
}  # fmt: skip
SOUND = {
    "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_mel_bins": 16, "max_source_positions": 20, "output_dim": 40, "downsample_hidden_size": 8,
}  # fmt: skip

OWN = {
    "Mistral3": {"text_config": TEXT | {"model_type": "ministral3"}, "vision_config": PIXTRAL},
    "Mistral3, Mistral 4": {
        "text_config": TEXT | LATENT | {"model_type": "mistral4"}, "vision_config": PIXTRAL,
    },
    "Glm4v": {"text_config": HALF_TURNED, "vision_config": PATCHES},
    "Qwen2_5_VL": {"text_config": AXES, "vision_config": PATCHES, "tie_word_embeddings": True},
    "Qwen3VLMoe": {"text_config": AXES | EXPERTS | {"head_dim": 8}, "vision_config": PATCHES},
    "Gemma3": {
        "text_config": TEXT | {"head_dim": 8, "sliding_window": 6, "num_hidden_layers": 3},
        "vision_config": VISION,
    },
    "Gemma4": {
        "text_config": GEMMA4 | {
            "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 131,
            "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    },
    "Gemma4Unified": {"text_config": GEMMA4 | {"num_global_key_value_heads": 5}},
    "Llava": {"text_config": TEXT | {"model_type": "mistral"}, "vision_config": PIXTRAL},
    "Idefics3": {"text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION},
    "InternVL": {
        "text_config": TEXT | {"model_type": "qwen2"},
        "vision_config": VISION | {"image_size": [16, 16], "patch_size": [4, 4]},
        "tie_word_embeddings": False,
    },
    "Voxtral": {"text_config": TEXT | {"model_type": "llama"}, "audio_config": SOUND},
    "Qwen3ASR": {
        "text_config": TEXT | {"head_dim": 8}, "audio_config": SOUND, "eos_token_id": 2,
    },
    "Qwen2_5OmniThinker": {
        "text_config": AXES, "vision_config": PATCHES, "audio_config": SOUND,
        "tie_word_embeddings": False, "vision_start_token_id": 130,
    },
}  # fmt: skip
"""Constructor arguments by the first part of the class's name (and a text): of families of ours."""

THROUGH_TRANSFORMERS = {
    "AyaVision": {"text_config": TEXT | {"model_type": "cohere"}, "vision_config": SIGLIP},
}  # fmt: skip

REFUSED = {
    "Mistral3": {
        "text_config": TEXT | LATENT | {"model_type": "glm_image_text"},
        "vision_config": PIXTRAL,
    },
    "PaliGemma": {
        "text_config": TEXT | {"model_type": "gemma", "head_dim": 8}, "vision_config": SIGLIP,
        "projection_dim": 40,
    },
}  # fmt: skip


def make_whole(stem, arguments):
    torch.manual_seed(0)
    stem = stem.partition(",")[0]
    config = getattr(transformers, f"{stem}Config")(**arguments)
    whole = getattr(transformers, f"{stem}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for weight in whole.parameters():
            weight += 0.1 * torch.randn_like(weight)  # biases and norms, too
    return whole
