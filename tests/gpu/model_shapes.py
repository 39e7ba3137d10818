"""Shapes of published models, as their config.json gives them, and what a step of them must do.

Owns these numbers and the arithmetic of bytes and operations. Must not know tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Shape = Mapping[str, Any]

LLAMA_8B: Shape = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
QWEN3_8B: Shape = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
QWEN3_SMALL: Shape = {
    **QWEN3_8B,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
"""Qwen3-0.6B."""

_BYTES = 2
"""Of a number in 16 bits."""


def layer_numbers(shape: Shape) -> int:
    """Weights of all layers' products."""
    hidden, head_size = shape["hidden_size"], shape["head_dim"]
    q_heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    attention = hidden * head_size * (2 * q_heads + 2 * kv_heads)
    return int(shape["num_hidden_layers"] * (attention + 3 * hidden * shape["intermediate_size"]))


def logit_numbers(shape: Shape) -> int:
    """Weights of the product that gives logits."""
    return int(shape["hidden_size"] * shape["vocab_size"])


def decode_bytes(shape: Shape, *, batch: int, context: int) -> float:
    """That a decode step must read: weights once, every sequence's keys and values."""
    a_token = shape["num_hidden_layers"] * 2 * shape["num_key_value_heads"] * shape["head_dim"]
    numbers = layer_numbers(shape) + logit_numbers(shape) + batch * context * a_token
    return float(_BYTES * numbers)


def decode_flops(shape: Shape, *, batch: int, context: int) -> float:
    """Of a decode step's products."""
    attended = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
    a_sequence = layer_numbers(shape) + logit_numbers(shape) + 2 * context * attended
    return float(2 * batch * a_sequence)


def prefill_flops(shape: Shape, num_tokens: int) -> float:
    """Of a prompt's products in one step; logits of its last token only."""
    pairs = num_tokens * (num_tokens + 1) / 2
    attended = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
    products = num_tokens * layer_numbers(shape) + logit_numbers(shape)
    return float(2 * products + 4 * pairs * attended)
