"""Towers of images as llama.cpp's converter writes them (MmprojModel of its conversion/), and their
texts beside them."""

import gguf
import numpy as np
import torch

from tests.engine_core.model_files import test_gguf_qwen_hybrids as hybrids
from tests.engine_core.model_files.converted import gguf_keys, gguf_tensors, permute

TOKENS = {
    "qwen": {110: "<|image_pad|>", 111: "<|vision_start|>", 112: "<|vision_end|>"},
    "gemma3": {110: "<image_soft_token>", 111: "<start_of_image>", 112: "<end_of_image>"},
    "idefics3": {110: "<image>"},
    "mistral3": {110: "[IMG]"},
}
PROJECTORS = {
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_vl_moe": "qwen3vl_merger",
    "qwen3_5": "qwen3vl_merger",
    "gemma3": "gemma3",
    "idefics3": "idefics3",
    "mistral3": "pixtral",
}
_QWEN3_MERGER = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}


def text_file(model, tokens=None):
    """Keys and tensors of the text. `tokens`: default: made-up ones."""
    config, kind = model.config, model.config.model_type
    state = {
        name.replace("model.language_model.", "model.").replace("model.text_model.", "model."): each
        for name, each in model.state_dict().items()
        if "language_model." in name or "text_model." in name or name == "lm_head.weight"
    }
    text = config.text_config
    if config.tie_word_embeddings:
        state.pop("lm_head.weight")
    if tokens is None:
        named = TOKENS["qwen" if kind.startswith("qwen") else kind]
        tokens = [named.get(number, f"t{number}") for number in range(text.vocab_size)]
    more = {"tokenizer.ggml.tokens": tokens}
    if kind == "qwen3_5":
        part = text.rope_parameters["partial_rotary_factor"]
        more["qwen35.rope.dimension_count"] = int(text.head_dim * part)
        return hybrids.keys_of(text) | more, hybrids.tensors_of(text, state)
    if kind == "gemma3":
        is_sliding = [each == "sliding_attention" for each in text.layer_types]
        more["gemma3.attention.sliding_window_pattern"] = is_sliding
    return gguf_keys(text) | more, gguf_tensors(text, state)


def tower_file(model):
    """Keys and tensors of the mmproj file."""
    config = model.config
    kind, vision = config.model_type, config.vision_config
    depth = getattr(vision, "depth", None) or vision.num_hidden_layers
    heads = getattr(vision, "num_heads", None) or vision.num_attention_heads
    width = vision.embed_dim if kind == "qwen2_vl" else vision.hidden_size
    keys = {
        "projection_dim": config.text_config.hidden_size,
        "image_size": getattr(vision, "image_size", 16),
        "patch_size": vision.patch_size,
        "embedding_length": width,
        "feed_forward_length": getattr(vision, "intermediate_size", vision.hidden_size),
        "block_count": depth,
        "attention.head_count": heads,
        "attention.layer_norm_epsilon": 1e-6,
        "image_mean": [0.5, 0.25, 0.5],
        "image_std": [0.5, 0.5, 0.25],
    }
    more = {"clip.projector_type": PROJECTORS[kind], "clip.has_vision_encoder": True}
    if kind == "qwen2_5_vl":
        keys |= {"n_wa_pattern": vision.fullatt_block_indexes[0] + 1, "window_size": 16}
    elif kind.startswith("qwen3"):
        flags = [layer in vision.deepstack_visual_indexes for layer in range(depth)]
        keys |= {"is_deepstack_layers": flags, "spatial_merge_size": vision.spatial_merge_size}
    elif kind == "gemma3":
        side = vision.image_size // vision.patch_size
        keys["projector.scale_factor"] = side // int(config.mm_tokens_per_image**0.5)
    elif kind == "idefics3":
        keys |= {"projector.scale_factor": config.scale_factor, "preproc_image_size": 64}
    elif kind == "mistral3":
        keys["spatial_merge_size"] = config.spatial_merge_size
        more["clip.use_silu" if vision.hidden_act == "silu" else "clip.use_gelu"] = True
    found = {"general.architecture": "clip", "general.type": "mmproj", **more}
    found |= {f"clip.vision.{key}": value for key, value in keys.items()}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    tensors = {}
    for name, tensor in model.state_dict().items():
        if "language_model" in name or "text_model" in name or name == "lm_head.weight":
            continue
        if ".head." not in name:
            tensors |= _converted(kind, name, tensor, names, model.config)
    return found, {name: tensor.float().numpy() for name, tensor in tensors.items()}


def _converted(kind, name, tensor, names, config):
    if kind != "idefics3":
        name = name.removeprefix("model.")
    if kind == "gemma3":
        name = name.replace("vision_tower.", "vision_tower.vision_model.")
        name = name.replace("_weight", ".weight")
        tensor = tensor + 1 if "soft_emb_norm" in name else tensor
    if kind == "mistral3" and ("q_proj" in name or "k_proj" in name):
        heads = config.vision_config.num_attention_heads
        tensor = torch.from_numpy(permute(tensor.numpy(), heads))
    if name == "visual.patch_embed.proj.weight":
        return {"v.patch_embd.weight": tensor[:, :, 0], "v.patch_embd.weight.1": tensor[:, :, 1]}
    if kind in ("qwen2_vl", "qwen2_5_vl") and ".qkv." in name:
        parts = zip("qkv", tensor.chunk(3), strict=True)
        return {_mapped(names, name.replace("qkv", part)): each for part, each in parts}
    stem, _, end = name.rpartition(".")
    if kind.startswith("qwen3") and stem.startswith("visual.merger."):
        return {f"{_QWEN3_MERGER[stem.removeprefix('visual.merger.')]}.{end}": tensor}
    if "deepstack_merger_list" in name:
        _, _, number, part = stem.split(".")
        layer = config.vision_config.deepstack_visual_indexes[int(number)]
        return {f"v.deepstack.{layer}.{part.removeprefix('linear_')}.{end}": tensor}
    return {_mapped(names, name): tensor}


def _mapped(names, name):
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def files_of(model, write_gguf):
    """The text's file, and the tower's as mmproj-tiny.gguf beside it."""
    keys, tensors = tower_file(model)
    tower = write_gguf(keys, tensors, name="mmproj-tiny.gguf")
    return write_gguf(*text_file(model), name="tiny.gguf"), tower


def as_q8_0(values):
    """A tensor for `write_gguf`."""
    kind = gguf.GGMLQuantizationType.Q8_0
    return gguf.quants.quantize(np.ascontiguousarray(values), kind), kind
