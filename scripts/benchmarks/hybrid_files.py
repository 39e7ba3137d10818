"""Random weights of Qwen 3.5's shapes, as llama-quantize makes a Q4_K_M of them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import TokenType
from transformers.convert_slow_tokenizer import bytes_to_unicode

_KEY = 128  # numbers of a key and of a value of a recurrent head
_KEY_HEADS = 16
_INTERVAL = 4  # one layer in so many attends
_HEAD = 256
_SCALES = {
    Kind.Q4_K: (0, (1e-4, 7.5e-4)),
    Kind.Q5_K: (0, (5e-5, 7.8e-4)),
    Kind.Q6_K: (208, (3e-5,)),
}
"""Where the float16 of a block are, and numbers that make weights of about 0.02, around zero."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Attributes:
    width: of the hidden state.
    kv_heads: of an attending layer; it has four query heads for each.
    value_heads: of a recurrent layer, for 16 key heads.
    features: of the feed-forward, or of an expert and of the shared one.
    experts: how many, and how many a token takes.
    """

    layers: int
    width: int
    kv_heads: int
    value_heads: int
    features: int
    experts: tuple[int, int] | None = None
    vocabulary: int = 248_320


SHAPES = {
    "0.8b": Shape(layers=24, width=1024, kv_heads=2, value_heads=16, features=3584),
    "4b": Shape(layers=32, width=2560, kv_heads=4, value_heads=32, features=9216),
    "moe": Shape(layers=16, width=1024, kv_heads=2, value_heads=32, features=512, experts=(32, 4)),
    "tiny": Shape(layers=4, width=256, kv_heads=1, value_heads=32, features=256, vocabulary=512),
}


def add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    """A token a byte, one of two, and tokens that no text gives up to the vocabulary's size."""
    read = [*bytes_to_unicode().values(), "Ġt"]
    unread = [f"<|{number}|>" for number in range(len(read), size)]
    writer.add_vocab_size(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(read + unread)
    writer.add_token_types([TokenType.NORMAL] * len(read) + [TokenType.CONTROL] * len(unread))
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(size - 1)


def write_hybrid(file: Path, shape: Shape) -> None:
    writer = gguf.GGUFWriter(file, "qwen35moe" if shape.experts else "qwen35")
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_head_count(4 * shape.kv_heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(_HEAD // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_state_size(_KEY)
    writer.add_ssm_group_count(_KEY_HEADS)
    writer.add_ssm_time_step_rank(shape.value_heads)
    writer.add_ssm_inner_size(shape.value_heads * _KEY)
    writer.add_full_attention_interval(_INTERVAL)
    add_tokenizer(writer, shape.vocabulary)
    if shape.experts is None:
        writer.add_feed_forward_length(shape.features)
    else:
        writer.add_expert_count(shape.experts[0])
        writer.add_expert_used_count(shape.experts[1])
        writer.add_expert_feed_forward_length(shape.features)
        writer.add_expert_shared_feed_forward_length(shape.features)
    generator = np.random.default_rng(0)
    for name, size, kind in _tensors(shape):
        writer.add_tensor(name, random_values(size, kind, generator), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    width, inner = shape.width, shape.value_heads * _KEY
    channels = 2 * _KEY_HEADS * _KEY + inner
    yield "token_embd.weight", (shape.vocabulary, width), Kind.Q6_K
    yield "output_norm.weight", (width,), Kind.F32
    for layer in range(shape.layers):
        attends = layer % _INTERVAL == _INTERVAL - 1
        more = kind_of_values(layer, shape.layers)
        query, kv = 4 * shape.kv_heads * _HEAD, shape.kv_heads * _HEAD
        parts: dict[str, tuple[tuple[int, ...], Kind]] = {
            "attn_norm": ((width,), Kind.F32),
            "post_attention_norm": ((width,), Kind.F32),
        }
        if attends:
            parts |= {
                "attn_q": ((2 * query, width), Kind.Q4_K),
                "attn_k": ((kv, width), Kind.Q4_K),
                "attn_v": ((kv, width), more),
                "attn_output": ((width, query), Kind.Q4_K),
                "attn_q_norm": ((_HEAD,), Kind.F32),
                "attn_k_norm": ((_HEAD,), Kind.F32),
            }
        else:
            parts |= {
                "attn_qkv": ((channels, width), Kind.Q5_K),
                "attn_gate": ((inner, width), Kind.Q4_K),
                "ssm_beta": ((shape.value_heads, width), Kind.Q4_K),
                "ssm_alpha": ((shape.value_heads, width), Kind.Q4_K),
                "ssm_conv1d": ((channels, 4), Kind.F32),
                "ssm_norm": ((_KEY,), Kind.F32),
                "ssm_out": ((width, inner), Kind.Q4_K),
            }
            for vector in ("ssm_dt.bias", "ssm_a"):
                yield f"blk.{layer}.{vector}", (shape.value_heads,), Kind.F32
        gated = {"gate": Kind.Q4_K, "up": Kind.Q4_K, "down": more}
        stacks: list[tuple[str, tuple[int, ...]]] = [("", ())]
        if shape.experts is not None:
            stacks = [("_exps", shape.experts[:1]), ("_shexp", ())]
            parts["ffn_gate_inp"] = ((shape.experts[0], width), Kind.F32)
            parts["ffn_gate_inp_shexp"] = ((width,), Kind.F32)
        for suffix, number in stacks:
            for part, kind in gated.items():
                size = (shape.features, width) if part != "down" else (width, shape.features)
                parts[f"ffn_{part}{suffix}"] = ((*number, *size), kind)
        for part, (size, kind) in parts.items():
            yield f"blk.{layer}.{part}.weight", size, kind


def kind_of_values(layer: int, num_layers: int) -> Kind:
    """Of `attn_v` and `ffn_down` in a Q4_K_M: llama-quantize's use_more_bits."""
    eighth, of_eight = num_layers // 8, 8 * layer // num_layers
    has_more = of_eight in (0, 7) or (layer - eighth) % 3 == 2
    return Kind.Q6_K if has_more else Kind.Q4_K


def random_values(
    size: tuple[int, ...], kind: Kind, generator: np.random.Generator
) -> np.ndarray[Any, Any]:
    """Floats, or bytes of blocks. A decay's rate is negative, as in `ssm_a`."""
    if kind is Kind.F32:
        scale = 1 if len(size) == 1 else 0.02
        return (-np.abs(generator.standard_normal(size)) * scale).astype(np.float32)
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (*size[:-1], size[-1] // elements, num_bytes), np.uint8)
    at, numbers = _SCALES[kind]
    scales = np.array(numbers, np.float16).view(np.uint8)
    blocks[..., at : at + len(scales)] = scales
    return blocks.reshape(*size[:-1], -1)
