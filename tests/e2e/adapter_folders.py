"""Makes adapters for a model's folder, and its tokens with them by transformers. Not a test."""

import functools
import json

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

_PARTS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def make_adapter(folder, model_folder, *, seed, rank=4, alpha=8.0):
    """All linear layers of a Llama, as PEFT saves them. Returns the folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in _weights(model_folder).items():
        outputs, inputs = weight.shape
        prefix = f"base_model.model.{name}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) * 0.2
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) * 0.2
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged_model(model_folder, folder=None):
    """transformers' model with `W + alpha / r * B A` in place of W."""
    from safetensors.torch import load_file

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    if folder is not None:
        config = json.loads((folder / "adapter_config.json").read_text())
        tensors = load_file(folder / "adapter_model.safetensors")
        for name in _weights(model_folder):
            prefix = f"base_model.model.{name}"
            a, b = (tensors[f"{prefix}.lora_{half}.weight"] for half in "AB")
            model.get_submodule(name).weight.data += config["lora_alpha"] / config["r"] * b @ a
    return model


@torch.inference_mode()
def greedy_tokens(model, prompt, count):
    model.generation_config.eos_token_id = None
    out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


@functools.cache
def _weights(model_folder):
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    return {
        f"model.layers.{layer}.{block}.{part}": model.get_submodule(
            f"model.layers.{layer}.{block}.{part}"
        ).weight.detach()
        for layer in range(model.config.num_hidden_layers)
        for block, parts in _PARTS.items()
        for part in parts
    }
