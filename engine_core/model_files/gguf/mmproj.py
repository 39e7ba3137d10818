"""The tower of images that llama.cpp keeps beside a text, in an mmproj file, in Hugging Face terms
(source: the classes `MmprojModel` of its converter)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine_core.model_files.errors import BrokenModelFile, UnsupportedModelFile
from engine_core.model_files.gguf.file import GgufFile, mapped
from engine_core.model_files.gguf.header import SUPPORTED_TYPES, GgufTensor, read_gguf_header
from engine_core.model_files.gguf.tensor_names import unpermute

if TYPE_CHECKING:
    import torch

Fields = dict[str, Any]

_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_IGNORED = "v.token_embd.img_break"  # a copy of a row of the text's embedding
_BLOCK = ("ln1", "ln2", "attn_q", "attn_k", "attn_v", "attn_out", "ffn_up", "ffn_down", "ffn_gate")


def _block(prefix: str, names: str) -> dict[str, str]:
    """Tensors of a block: llama.cpp's name to that in transformers' module, {} for its number; of
    both ends .weight and .bias are left out. `names`: in the order of `_BLOCK`."""
    pairs = zip(_BLOCK, names.split(), strict=False)
    return {f"v.blk.{{}}.{ours}": f"{prefix}.{{}}.{theirs}" for ours, theirs in pairs}


_QWEN = "norm1 norm2 attn.q attn.k attn.v attn.proj"
_QWEN_TOP = {
    "v.patch_embd": "visual.patch_embed.proj", "v.blk.{}.attn_qkv": "visual.blocks.{}.attn.qkv",
}  # fmt: skip
_QWEN2_TOP = _QWEN_TOP | {"v.post_ln": "visual.merger.ln_q", "mm.{}": "visual.merger.mlp.{}"}
_DEEPSTACK = "visual.deepstack_merger_list.{}"
_QWEN3_TOP = _QWEN_TOP | {
    "v.position_embd": "visual.pos_embed", "v.post_ln": "visual.merger.norm",
    "mm.0": "visual.merger.linear_fc1", "mm.2": "visual.merger.linear_fc2",
    "v.deepstack.{}.norm": f"{_DEEPSTACK}.norm", "v.deepstack.{}.fc1": f"{_DEEPSTACK}.linear_fc1",
    "v.deepstack.{}.fc2": f"{_DEEPSTACK}.linear_fc2",
}  # fmt: skip
_SIGLIP = (
    "layer_norm1 layer_norm2 self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj "
    "mlp.fc1 mlp.fc2"
)
_GEMMA3 = {
    "v.patch_embd": "vision_tower.embeddings.patch_embedding",
    "v.position_embd": "vision_tower.embeddings.position_embedding",
    "v.post_ln": "vision_tower.post_layernorm",
    "mm.input_projection": "multi_modal_projector.mm_input_projection",
    "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
}
_IDEFICS3 = {
    "v.patch_embd": "vision_model.embeddings.patch_embedding",
    "v.position_embd": "vision_model.embeddings.position_embedding",
    "v.post_ln": "vision_model.post_layernorm",
    "mm.model.fc": "connector.modality_projection.proj",
}
_PIXTRAL = {
    "v.patch_embd": "vision_tower.patch_conv", "v.pre_ln": "vision_tower.ln_pre",
    "mm.{}": "multi_modal_projector.linear_{}", "mm.input_norm": "multi_modal_projector.norm",
    "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
}  # fmt: skip
_PIXTRAL_BLOCK = (
    "attention_norm ffn_norm attention.q_proj attention.k_proj attention.v_proj attention.o_proj "
    "feed_forward.up_proj feed_forward.down_proj feed_forward.gate_proj"
)


def _qwen2(keys: Mmproj) -> tuple[Fields, Fields]:
    width = keys.value("embedding_length")
    vision = {
        "embed_dim": width,
        "hidden_size": keys.value("projection_dim"),
        "mlp_ratio": keys.rows("v.blk.0.ffn_up.weight") // width,  # the key has another length
    }
    return _qwen(keys, vision, 3136, 12_845_056)


def _qwen2_5(keys: Mmproj) -> tuple[Fields, Fields]:
    every = keys.value("n_wa_pattern")
    full = list(range(every - 1, keys.value("block_count"), every))
    window = {"window_size": keys.value("window_size", 112), "fullatt_block_indexes": full}
    return _qwen(keys, _qwen_widths(keys) | window, 3136, 12_845_056)


def _qwen3(keys: Mmproj) -> tuple[Fields, Fields]:
    flags = keys.value("is_deepstack_layers", [])
    more = {
        "num_position_embeddings": keys.rows("v.position_embd.weight"),
        "deepstack_visual_indexes": [layer for layer, flag in enumerate(flags) if flag],
    }
    return _qwen(keys, _qwen_widths(keys) | more, 65_536, 16_777_216)


def _qwen_widths(keys: Mmproj) -> Fields:
    return {
        "hidden_size": keys.value("embedding_length"),
        "intermediate_size": keys.value("feed_forward_length"),
        "out_hidden_size": keys.value("projection_dim"),
    }


def _qwen(keys: Mmproj, vision: Fields, least: int, most: int) -> tuple[Fields, Fields]:
    """`least`, `most`: pixels of an image, of the published processors."""
    patch, merge = keys.value("patch_size"), keys.value("spatial_merge_size", 2)
    sizes = {"patch_size": patch, "temporal_patch_size": 2}
    blocks = {
        "depth": keys.value("block_count"),
        "num_heads": keys.value("attention.head_count"),
        "spatial_merge_size": merge,
        "in_channels": 3,
    }
    pixels = {
        "min_pixels": keys.value("image_min_pixels", least),
        "max_pixels": keys.value("image_max_pixels", most),
    }
    return {"vision_config": vision | sizes | blocks}, {**sizes, "merge_size": merge, **pixels}


def _sizes(keys: Mmproj) -> Fields:
    return {
        "hidden_size": keys.value("embedding_length"),
        "intermediate_size": keys.value("feed_forward_length"),
        "num_hidden_layers": keys.value("block_count"),
        "num_attention_heads": keys.value("attention.head_count"),
        "image_size": keys.value("image_size"),
        "patch_size": keys.value("patch_size"),
    }


def _gemma3(keys: Mmproj) -> tuple[Fields, Fields]:
    side = keys.value("image_size")
    scale = keys.value("patch_size") * keys.value("projector.scale_factor", 4)
    own = {"model_type": "siglip_vision_model", "vision_use_head": False}
    fields = {"vision_config": _sizes(keys) | own, "mm_tokens_per_image": (side // scale) ** 2}
    return fields, {"size": {"height": side, "width": side}}


def _idefics3(keys: Mmproj) -> tuple[Fields, Fields]:
    side = keys.value("image_size")
    fields = {
        "vision_config": _sizes(keys),
        "scale_factor": keys.value("projector.scale_factor"),
    }
    longest = keys.value("preproc_image_size", 4 * side)
    return fields, {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}


def _pixtral(keys: Mmproj) -> tuple[Fields, Fields]:
    if keys.raw.get("clip.rope.freq_base", 1e4) != 1e4:
        keys.refuse(f"clip.rope.freq_base {keys.raw['clip.rope.freq_base']}")
    act = "silu" if keys.raw.get("clip.use_silu") else "gelu"
    fields = {
        "vision_config": _sizes(keys) | {"model_type": "pixtral", "hidden_act": act},
        "spatial_merge_size": keys.value("spatial_merge_size", 1),
        "multimodal_projector_bias": "mm.1.bias" in keys.shapes,
    }
    return fields, {"size": {"longest_edge": keys.value("image_size")}}


@dataclasses.dataclass(frozen=True, slots=True)
class _Projector:
    """
    Attributes:
        model_types: of the whole, by the text's architecture.
        fields: of the config.json beside `text_config`, and the image processor's settings.
        token_ids: fields of the config.json, and texts of which the first that is there counts.
    """

    model_types: Mapping[str, str]
    tensors: Mapping[str, str]
    fields: Callable[[Mmproj], tuple[Fields, Fields]]
    token_ids: Mapping[str, tuple[str, ...]]


_QWEN_IDS = {
    "image_token_id": ("<|image_pad|>",),
    "vision_start_token_id": ("<|vision_start|>",),
    "vision_end_token_id": ("<|vision_end|>",),
}
_QWEN3_TEXTS = {
    "qwen3vl": "qwen3_vl", "qwen3vlmoe": "qwen3_vl_moe", "qwen35": "qwen3_5",
    "qwen35moe": "qwen3_5_moe",
}  # fmt: skip
_GEMMA3_IDS = {
    # files whose vocabulary ends before that token have unused ones
    "image_token_index": ("<image_soft_token>", "<unused98>"),
    "boi_token_index": ("<start_of_image>",),
    "eoi_token_index": ("<end_of_image>",),
}
_PROJECTORS = {
    "qwen2vl_merger": _Projector(
        {"qwen2vl": "qwen2_vl"},
        _block("visual.blocks", f"{_QWEN} mlp.fc1 mlp.fc2") | _QWEN2_TOP, _qwen2, _QWEN_IDS,
    ),
    "qwen2.5vl_merger": _Projector(
        {"qwen2vl": "qwen2_5_vl"},
        _block("visual.blocks", f"{_QWEN} mlp.up_proj mlp.down_proj mlp.gate_proj") | _QWEN2_TOP,
        _qwen2_5, _QWEN_IDS,
    ),
    "qwen3vl_merger": _Projector(
        _QWEN3_TEXTS,
        _block("visual.blocks", f"{_QWEN} mlp.linear_fc1 mlp.linear_fc2") | _QWEN3_TOP,
        _qwen3, _QWEN_IDS,
    ),
    "gemma3": _Projector(
        {"gemma3": "gemma3"},
        _block("vision_tower.encoder.layers", _SIGLIP) | _GEMMA3, _gemma3, _GEMMA3_IDS,
    ),
    "idefics3": _Projector(
        {"llama": "idefics3"},
        _block("vision_model.encoder.layers", _SIGLIP) | _IDEFICS3,
        _idefics3, {"image_token_id": ("<image>",)},
    ),
    "pixtral": _Projector(
        {"llama": "mistral3", "mistral3": "mistral3"},
        _block("vision_tower.transformer.layers", _PIXTRAL_BLOCK) | _PIXTRAL,
        _pixtral, {"image_token_index": ("[IMG]",)},
    ),
}  # fmt: skip


class Mmproj:
    """Implements `EncoderFile`.

    Args:
        file: the mmproj file.
        text: the model that the tower is of.

    Raises:
        BrokenModelFile: it is truncated or garbage, or contradicts the text.
        UnsupportedModelFile: a tower or tensor that is not read, or one of another model.
    """

    def __init__(self, file: Path, text: GgufFile) -> None:
        self._header = read_gguf_header(file)
        self.file = file
        self.raw = self._header.metadata
        self.shapes = {tensor.name: tensor.shape for tensor in self._header.tensors}
        kind = str(self.raw.get("clip.projector_type") or self.value("projector_type", "none"))
        projector = _PROJECTORS.get(kind)
        if projector is None or text.architecture not in projector.model_types:
            self.refuse(f"projector {kind!r} for a text of architecture {text.architecture!r}")
        width = text.config["hidden_size"]
        if self.value("projection_dim") != width:
            raise UnsupportedModelFile(
                f"{file}: projection_dim is {self.value('projection_dim')}, and the text's hidden "
                f"size {width}: it is of another model; give this one's as --mmproj"
            )
        self._projector = projector
        try:
            fields, images = projector.fields(self)
            self._names = {
                tensor.name: self._name(tensor)
                for tensor in self._header.tensors
                if not tensor.name.startswith(_IGNORED)
            }
        except (TypeError, ValueError, ArithmeticError) as error:
            raise BrokenModelFile(
                f"{file} has metadata of a wrong type or value ({error}); download it again"
            ) from error
        self.processor = images | {key: self.value(key) for key in ("image_mean", "image_std")}
        self.config = self._config(text, projector, fields)

    def value(self, key: str, default: Any = None) -> Any:
        """Value of `clip.vision.<key>`. Raises BrokenModelFile: absent and without default."""
        value = self.raw.get(f"clip.vision.{key}", default)
        if value is None:
            raise BrokenModelFile(
                f"{self.file} lacks clip.vision.{key}; convert the model again with a current "
                "llama.cpp"
            )
        return value

    def rows(self, tensor: str) -> int:
        """Rows of a matrix. Raises BrokenModelFile: it is not there."""
        if tensor not in self.shapes:
            raise BrokenModelFile(f"{self.file} has no tensor {tensor}; convert the model again")
        return self.shapes[tensor][0]

    def refuse(self, what: str) -> NoReturn:
        """Raises: UnsupportedModelFile, always."""
        known = ", ".join(sorted(_PROJECTORS))
        raise UnsupportedModelFile(
            f"{self.file}: {what} is not supported, of the projectors there are {known}; use the "
            "model's Hugging Face folder, or serve text alone with --language-model-only"
        )

    def _config(self, text: GgufFile, projector: _Projector, fields: Fields) -> Fields:
        rotary = dict(text.config["rope_parameters"])
        sections = text.metadata.get(f"{text.architecture}.rope.dimension_sections")
        if sections is not None:
            is_interleaved = projector.fields is _qwen3
            rotary |= {"mrope_section": sections[:3], "mrope_interleaved": is_interleaved}
        tokens = text.metadata.get("tokenizer.ggml.tokens") or []
        whole: Fields = {
            "model_type": projector.model_types[text.architecture],
            "text_config": text.config | {"rope_parameters": rotary},
            "tie_word_embeddings": text.config["tie_word_embeddings"],
            "dtype": text.config["dtype"],
            **fields,
        }
        for field, names in projector.token_ids.items():
            found = [tokens.index(name) for name in names if name in tokens]
            if not found:
                self.refuse(f"a text whose vocabulary lacks the token {names[0]}")
            whole[field] = found[0]
        return whole

    def _name(self, tensor: GgufTensor) -> str:
        name = tensor.name
        if tensor.quant_type not in SUPPORTED_TYPES:
            self.refuse(f"tensor {name!r} of type {tensor.quant_type.name}")
        stem, _, kind = name.removesuffix(".1").rpartition(".")
        known = self._projector.tensors
        number = _NUMBER.search(stem)
        target = known.get(stem) or known.get(_NUMBER.sub(".{}", stem, count=1))
        if target is None or kind not in ("weight", "bias"):
            self.refuse(f"tensor {name!r}")
        if number is not None and "{}" in target:
            index = int(number[0][1:])
            if ".deepstack_" in target:
                index = self.value("is_deepstack_layers")[:index].count(True)
            target = target.format(index)
        joined = "_" if target.endswith("mm_input_projection") else "."
        return f"model.{target}{joined}{kind}" + (".1" if name.endswith(".1") else "")

    def tensors(self) -> dict[str, torch.Tensor]:
        import torch

        from engine_core.model_files.gguf.dequantize import dequantize

        found = {
            self._names[tensor.name]: dequantize(data, tensor.quant_type, tensor.shape)
            for tensor, data in mapped(self._header)
            if tensor.name in self._names
        }
        for name in list(found):
            if name.endswith("soft_emb_norm.weight"):
                found[name] = found[name].float() - 1.0
            elif ".attention.q_proj." in name or ".attention.k_proj." in name:
                found[name] = unpermute(found[name], self.value("attention.head_count"))
            elif ".attn.q." in name:
                three = [name.replace(".attn.q.", f".attn.{part}.") for part in "qkv"]
                parts = [found.pop(each) for each in three if each in found]
                found[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)
            elif name.endswith(".1"):  # the frames of a patch, apart
                first = name.removesuffix(".1")
                frames = [found.pop(each) for each in (first, name) if each in found]
                found[first] = torch.stack(frames, dim=2)
        return found
