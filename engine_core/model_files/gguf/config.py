"""GGUF metadata to a config.json as transformers 5 writes it, for the architectures served.

Everything that changes the mathematics and is not understood is refused by name here, so that no
file is served wrongly. Must not know tensor data or tokenizers.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from typing import Any

from engine_core.model_files.errors import BrokenModelFile
from engine_core.model_files.gguf.experts import mixtral_config, qwen3_moe_config
from engine_core.model_files.gguf.header import GgufTensor
from engine_core.model_files.gguf.metadata import GgufMetadata
from engine_core.model_files.gguf.rope import LOCAL_ROPE_THETA, rope_parameters

_GEMMA3_WINDOW_PATTERN = 6  # one layer in six sees everything
_GEMMA3_27B_LAYERS = 62


def build_config(meta: GgufMetadata, tensors: dict[str, GgufTensor]) -> dict[str, Any]:
    """The config.json that the model had before it was converted, in the fields that matter.

    Args:
        tensors: by GGUF name; only names and shapes are read.

    Raises:
        BrokenModelFile: a needed key or tensor is missing, or two of them contradict each other.
        UnsupportedModelFile: an option is set that would change the result and is not read.
    """
    try:
        return _build_config(meta, tensors)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise BrokenModelFile(
            f"{meta.file} has metadata of a wrong type or value ({error}); download it again"
        ) from error


def _build_config(meta: GgufMetadata, tensors: dict[str, GgufTensor]) -> dict[str, Any]:
    hidden_size = int(meta.number("embedding_length"))
    num_heads = int(meta.number("attention.head_count"))
    num_layers = int(meta.number("block_count"))
    head_dim = _head_dim(meta, hidden_size, num_heads)
    vocab_size, width = _shape(meta, tensors, "token_embd.weight")
    if width != hidden_size:
        raise BrokenModelFile(
            f"{meta.file}: embedding_length is {hidden_size}, the embedding has {width} columns; "
            f"convert the model again"
        )
    if meta.number("expert_count", 0) and meta.family not in ("mixtral", "qwen3moe"):
        meta.refuse("a mixture of experts")
    config: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": int(meta.number("feed_forward_length")),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(meta.number("attention.head_count_kv", num_heads)),
        "head_dim": head_dim,
        "rms_norm_eps": float(meta.number("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(meta.number("context_length")),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": rope_parameters(meta),
    }
    config |= _token_ids(meta)
    if meta.architecture == "gemma3":
        config |= _gemma3(meta, config)
    else:
        config |= _llama_like(meta, tensors)
    return config


def _shape(
    meta: GgufMetadata, tensors: dict[str, GgufTensor], name: str
) -> tuple[int, ...] | tuple[int, int]:
    if name not in tensors or len(tensors[name].shape) != 2:
        raise BrokenModelFile(f"{meta.file} has no matrix {name}; download it again")
    return tensors[name].shape


def _head_dim(meta: GgufMetadata, hidden_size: int, num_heads: int) -> int:
    head_dim = int(meta.number("attention.key_length", 0))
    if not head_dim:
        if num_heads <= 0 or hidden_size % num_heads:
            raise BrokenModelFile(
                f"{meta.file}: {num_heads} heads do not divide a width of {hidden_size}, and "
                f"attention.key_length is not given; convert the model again"
            )
        head_dim = hidden_size // num_heads
    if meta.number("attention.value_length", head_dim) != head_dim:
        meta.refuse("keys and values of different lengths")
    if meta.number("rope.dimension_count", head_dim) != head_dim:
        meta.refuse("rotary embedding of a part of each head")
    return head_dim


def _token_ids(meta: GgufMetadata) -> dict[str, Any]:
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {
        f"{ours}_token_id": meta.raw.get(f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in keys.items()
    }


def _llama_like(meta: GgufMetadata, tensors: dict[str, GgufTensor]) -> dict[str, Any]:
    for name, what in (("logit_scale", 1.0), ("residual_scale", 1.0), ("embedding_scale", 1.0)):
        if meta.number(name, what) != what:  # Granite and others that borrow the name
            meta.refuse(f"{name} {meta.number(name)}")
    attention_bias = "blk.0.attn_q.bias" in tensors
    window = meta.number("attention.sliding_window", None)
    common: dict[str, Any] = {"hidden_act": "silu"}
    if meta.architecture == "qwen2":
        return common | {
            "model_type": "qwen2",
            "architectures": ["Qwen2ForCausalLM"],
            "use_sliding_window": False,
        }
    if meta.architecture == "qwen3":
        return common | {
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
            "attention_bias": attention_bias,
            "use_sliding_window": False,
        }
    if meta.architecture == "qwen3moe":
        return (
            common
            | qwen3_moe_config(meta)
            | {
                "model_type": "qwen3_moe",
                "architectures": ["Qwen3MoeForCausalLM"],
                "attention_bias": attention_bias,
                "use_sliding_window": False,
            }
        )
    if meta.family == "mixtral":
        if attention_bias:
            meta.refuse("experts together with attention biases")
        return (
            common
            | mixtral_config(meta)
            | {
                "model_type": "mixtral",
                "architectures": ["MixtralForCausalLM"],
                "sliding_window": int(window) if window else None,
            }
        )
    if window:  # of the models that llama.cpp calls llama, only Mistral's have a window
        if attention_bias:
            meta.refuse("a sliding window together with attention biases")
        return common | {
            "model_type": "mistral",
            "architectures": ["MistralForCausalLM"],
            "sliding_window": int(window),
        }
    return common | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": attention_bias,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }


def _gemma3(meta: GgufMetadata, config: dict[str, Any]) -> dict[str, Any]:
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    pattern = meta.raw.get("gemma3.attention.sliding_window_pattern", _GEMMA3_WINDOW_PATTERN)
    if isinstance(pattern, list):
        is_sliding = [bool(flag) for flag in pattern]
    else:
        is_sliding = [bool((layer + 1) % int(pattern)) for layer in range(num_layers)]
    if len(is_sliding) != num_layers:
        raise BrokenModelFile(
            f"{meta.file}: sliding_window_pattern has {len(is_sliding)} entries for {num_layers} "
            f"layers; convert the model again"
        )
    scalar = head_dim
    if num_layers == _GEMMA3_27B_LAYERS:  # as llama.cpp tells that model apart
        scalar = config["hidden_size"] // config["num_attention_heads"]
    local_theta = float(meta.number("rope.freq_base_swa", LOCAL_ROPE_THETA))
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": scalar,
        "sliding_window": int(meta.number("attention.sliding_window")),
        "layer_types": ["sliding_attention" if s else "full_attention" for s in is_sliding],
        "final_logit_softcapping": meta.number("final_logit_softcapping", None),
        "attn_logit_softcapping": meta.number("attn_logit_softcapping", None),
        "rope_parameters": {
            "full_attention": config["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }
