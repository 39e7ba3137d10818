"""Tiny models of transformers that take images or sounds, made-up ones for them, and what they
answer."""

import dataclasses
import functools

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForMultimodalLM

from engine_core.scheduler.records.prompt_content import MultiModalFeature

IMAGE, BEGIN, END = 110, 111, 112
TEXT = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 16, "patch_size": 4, "initializer_range": 0.3,
}  # fmt: skip
QWEN_TEXT = TEXT | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
}
QWEN_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
QWEN_VISION = {
    "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
    "in_channels": 3, "initializer_range": 0.3,
}  # fmt: skip
QWEN_IDS = {
    "image_token_id": IMAGE, "vision_start_token_id": BEGIN, "vision_end_token_id": END,
    "video_token_id": 113,
}  # fmt: skip
QWEN3_TEXT = TEXT | {
    "num_hidden_layers": 3, "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}  # fmt: skip
QWEN3_VISION = QWEN_VISION | {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
SOUND = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 128,
    "num_mel_bins": 6, "max_source_positions": 20, "initializer_range": 0.3,
}  # fmt: skip
GEMMA4_TEXT = TEXT | {
    "head_dim": 8, "global_head_dim": 14, "num_hidden_layers": 4, "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 118,
}  # fmt: skip
GEMMA4_IDS = {
    "image_token_id": IMAGE, "boi_token_id": BEGIN, "eoi_token_id": END, "video_token_id": 121,
    "audio_token_id": 122,
}  # fmt: skip
GEMMA4 = {
    "text_config": GEMMA4_TEXT
    | {"hidden_size_per_layer_input": 6, "num_kv_shared_layers": 2, "pad_token_id": 3},
    "vision_config": VISION
    | {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 2,
       "position_embedding_size": 12},
    "audio_config": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "output_proj_dims": 32, "subsampling_conv_channels": [4, 2],
    },
    **GEMMA4_IDS,
}  # fmt: skip
CONFIGS = {
    "qwen2_vl": {
        "text_config": QWEN_TEXT,
        "vision_config": QWEN_VISION | {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        **QWEN_IDS,
    },
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_parameters": QWEN_TEXT["rope_parameters"] | QWEN_YARN},
        "vision_config": QWEN_VISION
        | {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 32, "window_size": 16,
           "fullatt_block_indexes": [1]},
        **QWEN_IDS,
    },
    "qwen3_vl": {"text_config": QWEN3_TEXT, "vision_config": QWEN3_VISION, **QWEN_IDS},
    "qwen3_vl_moe": {
        "text_config": QWEN3_TEXT
        | {"moe_intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2},
        "vision_config": QWEN3_VISION, **QWEN_IDS,
    },
    "qwen3_5": {
        "text_config": QWEN3_TEXT
        | {"layer_types": ["linear_attention", "full_attention", "linear_attention"],
           "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
           "linear_value_head_dim": 5, "initializer_range": 0.15,
           "rope_parameters": QWEN3_TEXT["rope_parameters"] | {
               "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
           }},
        "vision_config": QWEN3_VISION, **QWEN_IDS,
    },
    "gemma3": {
        "text_config": TEXT
        | {"head_dim": 8, "num_hidden_layers": 3, "sliding_window": 6, "query_pre_attn_scalar": 8,
           "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        "vision_config": VISION, "mm_tokens_per_image": 16, "image_token_index": IMAGE,
        "boi_token_index": BEGIN, "eoi_token_index": END,
    },
    "gemma4": GEMMA4,
    "gemma4, rows see each other": {
        "text_config": GEMMA4_TEXT | {"use_bidirectional_attention": "vision"},
        "vision_config": GEMMA4["vision_config"]
        | {"standardize": True, "use_clipped_linears": True},
        **GEMMA4_IDS,
    },
    "gemma4_unified": {
        "text_config": {
            name: value for name, value in GEMMA4_TEXT.items() if "per_layer_input" not in name
        },
        "vision_config": {
            "patch_size": 2, "pooling_kernel_size": 2, "mm_embed_dim": 24, "mm_posemb_size": 12,
            "output_proj_dims": 24,
        },
        **GEMMA4_IDS,
    },
    "internvl": {
        "text_config": TEXT | {"model_type": "qwen3", "head_dim": 8},
        "vision_config": VISION | {"image_size": [16, 16], "patch_size": [4, 4]},
        "image_token_id": IMAGE, "image_seq_length": 4,
    },
    "smolvlm": {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION,
        "scale_factor": 2, "image_token_id": IMAGE,
    },
    "idefics3": {
        "text_config": TEXT | {"model_type": "llama"}, "vision_config": VISION,
        "scale_factor": 2, "image_token_id": IMAGE,
    },
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        "vision_config": VISION | {"model_type": "pixtral", "image_size": 24},
        "spatial_merge_size": 2, "image_token_index": IMAGE, "tie_word_embeddings": True,
    },
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": VISION
        | {"model_type": "clip_vision_model", "num_hidden_layers": 3, "projection_dim": 32},
        "image_token_index": IMAGE, "image_seq_length": 16,
    },
    "voxtral": {
        "text_config": TEXT | {"model_type": "llama", "head_dim": 8}, "audio_config": SOUND,
        "audio_token_id": IMAGE,
    },
    "qwen2_audio": {
        "text_config": TEXT, "audio_config": SOUND, "audio_token_id": IMAGE,
    },
    "qwen3_asr": {
        "text_config": TEXT | {"head_dim": 8},
        "audio_config": SOUND
        | {"output_dim": 32, "n_window_infer": 100, "downsample_hidden_size": 8},
        "audio_token_id": IMAGE,
    },
    "llava, of Pixtral": {
        "text_config": TEXT | {"model_type": "mistral", "head_dim": 6, "sliding_window": None},
        "vision_config": VISION | {"model_type": "pixtral", "image_size": 24, "patch_size": 8},
        "image_token_index": IMAGE, "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
    },
}  # fmt: skip
PIXTRAL = ("mistral3", "llava, of Pixtral")


@dataclasses.dataclass(frozen=True, eq=False)
class Image:
    """Tensors by transformers' names, and how many rows they become."""

    tensors: dict
    num_rows: int


@functools.cache
def make_model(model_type):
    torch.manual_seed(0)
    config = AutoConfig.for_model(type_of(model_type), **CONFIGS[model_type])
    model = AutoModelForMultimodalLM.from_config(config, attn_implementation="eager").eval()
    if model_type == "gemma3":  # transformers begins with zeros
        projector = model.model.multi_modal_projector
        torch.nn.init.normal_(projector.mm_input_projection_weight, std=0.3)
        torch.nn.init.normal_(projector.mm_soft_emb_norm.weight, std=0.3)
    return model


def type_of(name):
    """`model_type` of one of CONFIGS."""
    return name.split(",")[0]


def save_model(model_type, path):
    make_model(model_type).save_pretrained(path)
    return path


@functools.cache
def make_image(model_type, seed, size=(4, 4)):
    """`size`: of the grid of a Qwen model, Pixtral or Gemma 4, in patches; of Idefics3, SmolVLM and
    InternVL the first is twice the number of tiles; of a sound it is about its length."""
    draw = np.random.default_rng(seed)
    if "vision_config" not in CONFIGS[model_type]:
        return make_sound(model_type, draw, size[0] * size[1])
    if model_type.startswith("qwen"):
        rows, columns = size
        values = draw.standard_normal((rows * columns, 3 * 2 * 16), dtype=np.float32)
        grid = np.array([[1, rows, columns]], np.int64)
        return Image({"pixel_values": values, "image_grid_thw": grid}, rows * columns // 4)
    if model_type in ("smolvlm", "idefics3"):
        tiles = size[0] // 2
        pixels = draw.standard_normal((1, tiles, 3, 16, 16), dtype=np.float32)
        mask = np.ones((1, tiles, 16, 16), np.int64)
        return Image({"pixel_values": pixels, "pixel_attention_mask": mask}, 4 * tiles)
    if model_type == "internvl":
        tiles = size[0] // 2
        pixels = draw.standard_normal((tiles, 3, 16, 16), dtype=np.float32)
        return Image({"pixel_values": pixels}, 4 * tiles)
    if model_type.startswith("gemma4"):
        num_rows, merge = size[0] * size[1] // 4, 2 if model_type == "gemma4_unified" else 1
        rows, columns = (side // merge for side in size)
        pixels = np.zeros((1, 28, 48), np.float32)
        pixels[0, : rows * columns] = draw.random((rows * columns, 48), np.float32)
        places = np.full((1, 28, 2), -1)
        places[0, : rows * columns] = np.argwhere(np.ones((rows, columns)))[:, ::-1]
        return Image({"pixel_values": pixels, "image_position_ids": places}, num_rows)
    if model_type in PIXTRAL:
        rows, columns = size
        pixels = draw.standard_normal((1, 3, 4 * rows, 4 * columns), dtype=np.float32)
        sizes = np.array([pixels.shape[2:]], np.int64)
        return Image({"pixel_values": pixels, "image_sizes": sizes}, rows * columns // 4)
    pixels = draw.standard_normal((1, 3, 16, 16), dtype=np.float32)
    return Image({"pixel_values": pixels}, 16)


def make_sound(model_type, draw, size):
    if model_type == "voxtral":
        features = draw.standard_normal((size // 8, 6, 40), np.float32)
        return Image({"input_features": features}, 5 * (size // 8))
    if model_type == "qwen2_audio":
        number, num_frames, name = min(3 * size - 9, 40), 40, "feature_attention_mask"
        num_rows = ((number - 1) // 2 + 1) // 2
    else:
        number, name = {12: 20, 16: 130, 24: 148}[size], "input_features_mask"
        num_frames = -(-number // 100) * 100
        num_rows = number // 100 * 13 + -(-(number % 100) // 8)
    features = draw.standard_normal((1, 6, num_frames), np.float32)
    mask = (np.arange(num_frames) < number)[None].astype(np.int64)
    return Image({"input_features": features, name: mask}, num_rows)


def make_prompt(model_type, parts):
    """Numbers are text of that many tokens; images get their places, for tiles with a token
    between. Returns token ids and features."""
    ids, features = [], []
    for part in parts:
        if isinstance(part, int):
            ids += [3 + (7 * len(ids) + 5 * n) % 100 for n in range(part)]
            continue
        start, runs = len(ids), []
        pieces = [part.num_rows]
        if model_type in ("smolvlm", "idefics3"):
            pieces = [4] * (part.num_rows // 4)
        elif model_type in PIXTRAL:
            height, width = (part.tensors["image_sizes"][0] // 8).tolist()
            pieces = [width] * height
        for piece in pieces:
            runs.append((len(ids), len(ids) + piece))
            ids += [IMAGE] * piece
            if piece is not pieces[-1] or len(runs) < len(pieces):
                ids.append(BEGIN)
        name = repr([(k, v.tobytes()) for k, v in sorted(part.tensors.items())])
        identifier = hash_of(name)
        modality = "audio" if "input_features" in part.tensors else "image"
        features.append(
            MultiModalFeature(
                modality, start, runs[-1][1], part.num_rows, identifier, tuple(runs), part.tensors
            )
        )
    return ids, features


def hash_of(text):
    from hashlib import blake2b

    return blake2b(text.encode(), digest_size=32).digest()


def answer(model_type, ids, images, num_tokens=8):
    """Greedy tokens, and log-probabilities [prompt + tokens - 1, V] of what follows each token."""
    return _answer(model_type, tuple(ids), tuple(images), num_tokens)


@functools.cache
@torch.inference_mode()
def _answer(model_type, ids, images, num_tokens):
    model, ids = make_model(model_type), list(ids)
    tensors = {}
    for name in images[0].tensors if images else ():
        parts = [torch.from_numpy(image.tensors[name]) for image in images]
        if model_type in PIXTRAL and name == "pixel_values":  # padded to one size
            sides = [(24 - part.shape[3], 24 - part.shape[2]) for part in parts]
            parts = [
                torch.nn.functional.pad(part, (0, right, 0, below))
                for part, (right, below) in zip(parts, sides, strict=True)
            ]
        if model_type == "qwen3_asr":
            longest = max(part.shape[-1] for part in parts)
            parts = [torch.nn.functional.pad(part, (0, longest - part.shape[-1])) for part in parts]
        tensors[name] = torch.cat(parts, dim=1 if model_type in ("smolvlm", "idefics3") else 0)
    num_prompt = len(ids)
    while True:
        input_ids = torch.tensor([ids])
        is_image = (input_ids == IMAGE).int()
        is_image[0, num_prompt:] = 0
        more = {}
        if model_type.startswith("qwen"):
            model.model.rope_deltas = None
            more = {"mm_token_type_ids": is_image}
        elif model_type.startswith("gemma4"):
            more = {"mm_token_type_ids": is_image}
        elif model_type == "gemma3":
            more = {"token_type_ids": is_image}
        mask = torch.ones_like(input_ids)
        if model_type == "gemma4_unified":  # else all layers see ahead, see docs
            mask = model.create_masks_for_generate(
                model.config, model.get_input_embeddings()(input_ids.clamp(max=119)), mask, None,
                torch.arange(len(ids))[None], **more,
            )  # fmt: skip
        logits = model(
            input_ids=input_ids, attention_mask=mask, use_cache=False, **tensors, **more
        ).logits[0]
        if len(ids) - num_prompt == num_tokens:
            return ids[num_prompt:], logits.log_softmax(-1)
        ids.append(int(logits[-1].argmax()))
