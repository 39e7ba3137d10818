"""GGUF tensors to Hugging Face tensors: names, and what llama.cpp's converter did to the values
(source: its convert_hf_to_gguf.py)."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, Literal

from engine_core.models.families.gguf import NEXTN, Gguf

if TYPE_CHECKING:
    import torch

_LAYER = re.compile(r"blk\.(\d+)\.([a-z12_.]+?)(\.weight|\.bias|)")
# before experts were stacked, Mixtral's were tensors of their own
_OLD_EXPERT = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_up|ffn_down)\.(\d+)\.weight")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"
# precomputed in some old files; everything in it follows from the config
IGNORED = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")

Change = Literal[
    "none",
    "unpermute_q",
    "unpermute_k",
    "subtract_one",
    "one_row",
    "flatten",
    "negative_exponential",
    "one_input",
]
_OF_STATES: dict[str, Change] = {
    "ssm_a": "negative_exponential",
    "ssm_d": "flatten",
    "ssm_norm.weight": "flatten",
    "ssm_conv1d.weight": "one_input",
    "shortconv.conv.weight": "one_input",
    "ffn_gate_inp.scale": "none",
    "ffn_down_exps.scale": "none",
    "ffn_norm": "none",
}
"""Changes to tensors of layers that keep a state, among them all whose names have no kind."""


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


def hf_tensor(family: Gguf, gguf_name: str) -> HfTensor | None:
    """The tensor that `gguf_name` becomes, or None where the family has no such tensor."""
    if gguf_name in (top := {**_TOP, **family.top}):
        return HfTensor(top[gguf_name], "one_row" if gguf_name == "token_types.weight" else "none")
    if gguf_name == family.last_norm:
        return HfTensor("model.norm.weight", "subtract_one" if family.norms_plus_one else "none")
    old = _OLD_EXPERT.fullmatch(gguf_name)
    if old is not None and f"{old[2]}_exps" in family.layer:
        layer, part, expert = old.groups()
        name = family.layer[f"{part}_exps"].format(expert)
        return HfTensor(f"model.layers.{layer}.{name}.weight", "none")
    match = _LAYER.fullmatch(gguf_name)
    if match is None:
        return None
    layer, part, kind = match.groups()
    change = _OF_STATES.get(part + kind)
    target = family.layer.get(part + kind)  # without .weight or .bias on the other side
    if target is None or (not kind and change is None):
        if part not in family.layer or not kind:
            return None
        target = family.layer[part] + kind
    change = change or _change(family, part, kind)
    return HfTensor(f"{family.layers}{layer}.{target}", change)


def of_drafts(family: Gguf, tensor: HfTensor, num_layers: int) -> HfTensor | None:
    """A tensor of a layer behind the model's own as one of a head for multi-token prediction; None:
    the family's is not read. `tensor`: by `hf_tensor`."""
    if not family.layer.keys() >= NEXTN.keys():
        return None
    layer, rest = tensor.name.removeprefix("model.layers.").split(".", 1)
    name = rest if rest.startswith("mtp.") else f"mtp.layers.{int(layer) - num_layers}.{rest}"
    return dataclasses.replace(tensor, name=name)


def _change(family: Gguf, part: str, kind: str) -> Change:
    if family.pairs_rows and part == "attn_q":
        return "unpermute_q"
    if family.pairs_rows and part == "attn_k":
        return "unpermute_k"
    if part == "ffn_gate_inp_shexp":
        return "one_row"
    if family.norms_plus_one and part.endswith("norm") and kind == ".weight":
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
        case "flatten":
            return tensor.flatten()
        case "negative_exponential":
            return (-tensor.float()).log().flatten()  # llama.cpp has it with its sign
        case "one_input":
            return tensor[:, None]  # a channel of a convolution reads itself alone
        case "one_row":
            return tensor if tensor.dim() > 1 else tensor[None]  # llama-quantize makes it a vector
        case "unpermute_q":
            return unpermute(tensor, config["num_attention_heads"])
        case "unpermute_k":
            return unpermute(tensor, config["num_key_value_heads"])


def unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rotary pairs (0, 1), (2, 3) ... of a head back to (0, D/2), (1, D/2 + 1) ..."""
    half = tensor.shape[0] // num_heads // 2
    pairs = tensor.reshape(num_heads, half, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
