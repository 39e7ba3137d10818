"""Small random models of transformers, and ours with the same weights.

All have heads of one size and as many tokens in their vocabulary as the device reports
log-probabilities of: a check sees whole distributions, and few kernels are compiled.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import transformers

from engine_core.models.interface import Model
from engine_core.models.loading import load_model
from kernels.interface.operations import Operations
from kernels.interface.weights import QuantisedTensor

VOCAB_SIZE = 128
HYBRIDS = ("qwen3.5", "granite-h", "lfm2", "bamba", "nemotron-h")
MORE_HYBRIDS = ("falcon-h1", "minimax", "lfm3")
"""Tried on a GPU alone: in the interpreter each takes some ten seconds."""
_SEED = 0
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "initializer_range": 0.3,
}
_NUM_LAYERS = 3
_WINDOW = 20
"""Tokens, more than a block and no multiple of one."""


def tiny_config(name: str, *, num_layers: int | None = None) -> transformers.PretrainedConfig:
    """Of "llama" (groups of 3 query heads), "qwen3" (norms of queries and keys), "gemma3" (windows,
    scaled embeddings, GELU), "mixtral" and "qwen3-moe"; and of "qwen3.5", "granite-h", "lfm2",
    "bamba", "nemotron-h" and the others, whose first and third layer keep a state."""
    shape = _SHAPE | {"num_hidden_layers": num_layers or _NUM_LAYERS}
    if name in HYBRIDS + MORE_HYBRIDS:
        return _hybrid_config(name, shape)
    if name == "llama":
        return transformers.LlamaConfig(**shape)
    if name == "qwen3":
        return transformers.Qwen3Config(**shape)
    if name == "gemma3":
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        return transformers.Gemma3TextConfig(
            **shape,
            sliding_window=_WINDOW,
            layer_types=layers[: shape["num_hidden_layers"]],
            query_pre_attn_scalar=32,
        )
    if name == "mixtral":
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
        return transformers.MixtralConfig(**shape, **experts)
    if name == "qwen3-moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
        return transformers.Qwen3MoeConfig(**shape, **experts, norm_topk_prob=True)
    raise ValueError(f"{name!r} is no tiny model")


def _hybrid_config(name: str, shape: dict[str, Any]) -> transformers.PretrainedConfig:
    number = shape["num_hidden_layers"]
    if name == "qwen3.5":
        layers = ["linear_attention", "full_attention", "linear_attention"][:number]
        sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        sizes |= {"linear_key_head_dim": 32, "linear_value_head_dim": 24}
        return transformers.Qwen3_5TextConfig(**shape, **sizes, layer_types=layers)
    if name == "granite-h":
        layers = ["linear_attention", "full_attention", "linear_attention"][:number]
        sizes = {"mamba_n_heads": 12, "mamba_d_state": 32, "shared_intermediate_size": 160}
        return transformers.GraniteMoeHybridConfig(
            **shape, **sizes, num_local_experts=0, layer_types=layers
        )
    if name == "lfm2":
        layers = ["conv", "full_attention", "conv"][:number]
        return transformers.Lfm2Config(**shape, layer_types=layers, block_auto_adjust_ff_dim=False)
    if name == "bamba":
        sizes = {"mamba_n_heads": 12, "mamba_d_state": 32}
        return transformers.BambaConfig(**shape, **sizes, attn_layer_indices=[1][: number - 1])
    if name == "falcon-h1":
        sizes = {"mamba_n_heads": 12, "mamba_d_state": 32, "mamba_d_ssm": 96}
        factors = {"key_multiplier": 0.7, "ssm_multipliers": [0.9, 1.0, 1.0, 1.1, 0.7]}
        return transformers.FalconH1Config(**shape, **sizes, **factors)
    if name == "lfm3":
        layers = ["conv", "sliding_attention", "conv"][:number]
        return transformers.Lfm3Config(
            **shape, layer_types=layers, sliding_window=_WINDOW, pad_token_id=0
        )
    layers = ["linear_attention", "full_attention", "linear_attention"][:number]
    if name == "minimax":
        factors = {"linear_attn_alpha_factor": 1.7, "mlp_alpha_factor": 1.7}
        return transformers.MiniMaxConfig(
            **shape, **factors, layer_types=layers, num_local_experts=8
        )
    del shape["num_hidden_layers"]
    sizes = {"mamba_num_heads": 12, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2}
    return transformers.NemotronHConfig(
        **shape, **sizes, layers_block_type=layers, time_step_min=1e-9
    )


def random_reference(
    config: transformers.PretrainedConfig, *, dtype: torch.dtype, device: str
) -> torch.nn.Module:
    """transformers' own model; equal configs, equal weights (rounded to `dtype`)."""
    torch.manual_seed(_SEED)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    is_sparse = hasattr(model.config, "num_experts_per_tok")
    if is_sparse and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # they begin as 0 or 1
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
        elif name.endswith("mlp.gate.weight"):  # Qwen's begin as 0: every expert alike
            torch.nn.init.normal_(parameter, std=0.3)
    moved: torch.nn.Module = model.to(device).eval()
    # not `.to(dtype)`, which would round the frequencies of rotary embeddings too
    for parameter in moved.parameters():
        parameter.data = parameter.data.to(dtype)
    return moved


def ours_of(
    reference: Any,
    ops: Operations,
    *,
    dtype: torch.dtype,
    parts: Mapping[str, QuantisedTensor] = MappingProxyType({}),
) -> Model:
    """Our model with the reference's weights, which pass through the host as a file's would.

    Args:
        parts: what replaces weights, by name.
    """
    weights = (
        (name, parts[name] if name in parts else weight.cpu())
        for name, weight in reference.state_dict().items()
    )
    return load_model(reference.config.to_dict(), weights, dtype=dtype, ops=ops)


@torch.inference_mode()
def reference_logprobs(
    reference: Any, prompt: list[int], output: list[int], *, device: str
) -> torch.Tensor:
    """float32 [N, V] on the host: of each token of `output`, given all tokens before it."""
    tokens = torch.tensor([prompt + output], device=device)
    logits_NV = reference(tokens).logits[0, len(prompt) - 1 : -1]
    logprobs_NV: torch.Tensor = logits_NV.float().log_softmax(-1).cpu()
    return logprobs_NV
