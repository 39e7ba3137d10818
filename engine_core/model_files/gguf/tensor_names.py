"""GGUF tensors to Hugging Face tensors: names, and what llama.cpp's converter did to the values
(source: its convert_hf_to_gguf.py)."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
# before experts were stacked, Mixtral's were tensors of their own
_OLD_EXPERT = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_up|ffn_down)\.(\d+)\.weight")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_TWO_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ATTENTION = {ours: theirs for ours, theirs in _PROJECTIONS.items() if ours.startswith("attn")}
_MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_LAYER_NAMES = {
    "llama": _PROJECTIONS | _TWO_NORMS,
    "qwen2": _PROJECTIONS | _TWO_NORMS,
    "qwen3": _PROJECTIONS | _TWO_NORMS | _QK_NORMS,
    "mixtral": _ATTENTION | _TWO_NORMS | _MIXTRAL_EXPERTS,
    "qwen3moe": _ATTENTION | _TWO_NORMS | _QK_NORMS | _QWEN_EXPERTS,
    "gemma3": _PROJECTIONS | _FOUR_NORMS | _QK_NORMS,
}

FAMILIES = frozenset(_LAYER_NAMES)

ROPE_FACTORS = "rope_freqs.weight"
# precomputed in some old files; everything in it follows from the config
IGNORED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")

Change = Literal["none", "unpermute_q", "unpermute_k", "subtract_one"]


@dataclasses.dataclass(frozen=True, slots=True)
class HfTensor:
    """Name of a tensor on the Hugging Face side, and how its values get there."""

    name: str
    """The tensor's name; of a stack with {} where an expert's number belongs."""
    change: Change

    @property
    def is_stack(self) -> bool:
        """Whether it holds the weights of all experts of a layer."""
        return "{}" in self.name


def hf_tensor(family: str, gguf_name: str) -> HfTensor | None:
    """The tensor that `gguf_name` becomes, or None where the family has no such tensor.
    `family`: see `GgufMetadata.family`."""
    if gguf_name in _TOP:
        is_norm = gguf_name == "output_norm.weight"
        offset = is_norm and family == "gemma3"
        return HfTensor(_TOP[gguf_name], "subtract_one" if offset else "none")
    old = _OLD_EXPERT.fullmatch(gguf_name)
    if old is not None and family == "mixtral":
        layer, part, expert = old.groups()
        name = _MIXTRAL_EXPERTS[f"{part}_exps"].format(expert)
        return HfTensor(f"model.layers.{layer}.{name}.weight", "none")
    match = _LAYER.fullmatch(gguf_name)
    if match is None or match[2] not in _LAYER_NAMES[family]:
        return None
    layer, part, kind = match.groups()
    name = f"model.layers.{layer}.{_LAYER_NAMES[family][part]}.{kind}"
    return HfTensor(name, _change(family, part))


def _change(family: str, part: str) -> Change:
    if family in ("llama", "mixtral") and part == "attn_q":
        return "unpermute_q"
    if family in ("llama", "mixtral") and part == "attn_k":
        return "unpermute_k"
    if family == "gemma3" and part.endswith("_norm"):
        return "subtract_one"
    return "none"


def undo(change: Change, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Undo the converter's change. `tensor`: [rows, ...]; for the unpermutations rows = heads x
    head_dim, weights or biases. Returns the same shape; `tensor` itself for "none"."""
    match change:
        case "none":
            return tensor
        case "subtract_one":
            return tensor.float() - 1.0  # llama.cpp has Gemma's 1 + w baked in
        case "unpermute_q":
            return _unpermute(tensor, config["num_attention_heads"])
        case "unpermute_k":
            return _unpermute(tensor, config["num_key_value_heads"])


def _unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rotary pairs (0, 1), (2, 3) ... of a head back to (0, D/2), (1, D/2 + 1) ..."""
    half = tensor.shape[0] // num_heads // 2
    pairs = tensor.reshape(num_heads, half, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
