"""Random weights of dense models' shapes and one with experts, as llama-quantize makes a Q4_K_M of
them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from scripts.benchmarks.hybrid_files import add_tokenizer, kind_of_values, random_values


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Attributes:
    architecture: GGUF's; Qwen 3's norm queries and keys.
    width: of the hidden state.
    heads: of queries, and of keys and values.
    features: of the feed-forward, or of an expert.
    experts: how many, and how many a token takes.
    """

    architecture: str
    layers: int
    width: int
    heads: tuple[int, int]
    head: int = 128
    features: int
    experts: tuple[int, int] | None = None
    vocabulary: int = 128_256
    is_tied: bool = True


SHAPES = {
    "llama-1b": Shape(
        architecture="llama", layers=16, width=2048, heads=(32, 8), head=64, features=8192
    ),
    "llama-3b": Shape(architecture="llama", layers=28, width=3072, heads=(24, 8), features=8192),
    "llama-8b": Shape(
        architecture="llama", layers=32, width=4096, heads=(32, 8), features=14336, is_tied=False
    ),
    "qwen3-4b": Shape(
        architecture="qwen3", layers=36, width=2560, heads=(32, 8), features=9728,
        vocabulary=151_936,
    ),
    "qwen3-moe": Shape(
        architecture="qwen3moe", layers=12, width=2048, heads=(32, 4), features=768,
        experts=(64, 8), vocabulary=151_936, is_tied=False,
    ),
    "tiny": Shape(
        architecture="qwen3moe", layers=2, width=256, heads=(4, 2), head=64, features=256,
        experts=(4, 2), vocabulary=512,
    ),
}  # fmt: skip


def write_model(file: Path, shape: Shape) -> None:
    writer = gguf.GGUFWriter(file, shape.architecture)
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_head_count(shape.heads[0])
    writer.add_head_count_kv(shape.heads[1])
    writer.add_key_length(shape.head)
    writer.add_value_length(shape.head)
    writer.add_rope_dimension_count(shape.head)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(5e5)
    writer.add_feed_forward_length(shape.features)
    if shape.experts is not None:
        writer.add_expert_count(shape.experts[0])
        writer.add_expert_used_count(shape.experts[1])
        writer.add_expert_feed_forward_length(shape.features)
    add_tokenizer(writer, shape.vocabulary)
    generator = np.random.default_rng(0)
    for name, size, kind in _tensors(shape):
        writer.add_tensor(name, random_values(size, kind, generator), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], Kind]]:
    width = shape.width
    query, kv = (number * shape.head for number in shape.heads)
    yield "token_embd.weight", (shape.vocabulary, width), Kind.Q6_K if shape.is_tied else Kind.Q4_K
    yield "output_norm.weight", (width,), Kind.F32
    if not shape.is_tied:
        yield "output.weight", (shape.vocabulary, width), Kind.Q6_K
    for layer in range(shape.layers):
        more = kind_of_values(layer, shape.layers)
        parts: dict[str, tuple[tuple[int, ...], Kind]] = {
            "attn_norm": ((width,), Kind.F32),
            "ffn_norm": ((width,), Kind.F32),
            "attn_q": ((query, width), Kind.Q4_K),
            "attn_k": ((kv, width), Kind.Q4_K),
            "attn_v": ((kv, width), more),
            "attn_output": ((width, query), Kind.Q4_K),
        }
        if shape.architecture.startswith("qwen3"):
            parts |= dict.fromkeys(("attn_q_norm", "attn_k_norm"), ((shape.head,), Kind.F32))
        suffix, number = "", ()
        if shape.experts is not None:
            suffix, number = "_exps", shape.experts[:1]
            parts["ffn_gate_inp"] = ((shape.experts[0], width), Kind.F32)
        for part, kind in {"gate": Kind.Q4_K, "up": Kind.Q4_K, "down": more}.items():
            size = (shape.features, width) if part != "down" else (width, shape.features)
            parts[f"ffn_{part}{suffix}"] = ((*number, *size), kind)
        for part, (size, kind) in parts.items():
            yield f"blk.{layer}.{part}.weight", size, kind
