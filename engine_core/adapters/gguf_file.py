"""Adapters as llama.cpp's convert_lora_to_gguf.py writes them.

Source: https://github.com/ggml-org/llama.cpp (src/llama-adapter.cpp)."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from engine_core.adapters.errors import AdapterError
from engine_core.model_files.gguf.header import GgufHeader, GgufTensor, read_gguf_header
from engine_core.model_files.gguf.tensor_names import hf_tensor, undo
from engine_core.models.families.gguf import Gguf
from engine_core.models.families.table import FAMILIES, GGUF_ARCHITECTURES
from engine_core.models.interface import ModelSpec
from engine_core.models.layer_cache import PagedKeys
from kernels.interface.lora import LoRAPart

_NAME = re.compile(r"((?:blk\.(\d+)\.)?.+\.weight)\.lora_(a|b)")


def read_gguf_adapter(file: Path, spec: ModelSpec, *, has_experts: bool) -> dict[str, LoRAPart]:
    """By the model's name of the projection. `spec`, `has_experts`: the model's.
    Raises AdapterError, ModelFilesError: it is no LoRA adapter, incomplete, or asks for what is not
    applied."""
    header = read_gguf_header(file)
    family, alpha = _check_metadata(header, has_experts=has_experts)
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in _tensors(header):
        match = _NAME.fullmatch(name)
        found = None if match is None else hf_tensor(family, match[1])
        if match is None or found is None or found.is_stack:
            raise AdapterError(
                f"{file} holds {name!r}, which is not applied: only lora_a and lora_b of linear "
                f"layers of {family.architecture} are; train it on other layers"
            )
        if family.reordered is not None and ".linear_attn." in found.name:
            raise AdapterError(
                f"{file} changes {found.name}, whose heads llama.cpp has in another order; use the "
                "adapter's PEFT folder"
            )
        if match[3] == "b" and tensor.dim() == 2:
            tensor = undo(found.change, tensor, _heads(spec, int(match[2] or 0)))
        halves.setdefault(found.name.removesuffix(".weight"), {})[match[3]] = tensor
    if not halves:
        raise AdapterError(f"{file} holds no weights; convert the adapter again")
    parts = {}
    for name, pair in halves.items():
        if len(pair) < 2:
            there = next(iter(pair))
            raise AdapterError(f"{file} has only lora_{there} of {name}; convert it again")
        rank = pair["b"].shape[-1]
        parts[name] = LoRAPart(pair["a"], pair["b"] * (alpha / rank if alpha else 1.0))
    return parts


def _heads(spec: ModelSpec, layer: int) -> dict[str, int]:
    """The numbers of a layer that the converter's changes depend on."""
    keys = spec.layers[min(layer, spec.num_layers - 1)]  # the model has no other: refused later
    num_kv_heads = keys.num_kv_heads if isinstance(keys, PagedKeys) else spec.num_query_heads
    return {"num_attention_heads": spec.num_query_heads, "num_key_value_heads": num_kv_heads}


def _check_metadata(header: GgufHeader, *, has_experts: bool) -> tuple[Gguf, float]:
    """The family whose names it has, and alpha."""
    file, metadata = header.file, header.metadata
    kind = metadata.get("general.type"), metadata.get("adapter.type")
    if kind != ("adapter", "lora"):
        raise AdapterError(
            f"{file} is of type {kind[0]!r} and adapter type {kind[1]!r}, not a LoRA adapter; "
            "convert one with llama.cpp's convert_lora_to_gguf.py"
        )
    if metadata.get("adapter.alora.invocation_tokens"):
        raise AdapterError(f"{file} is an activated LoRA, which is not applied; use a plain one")
    architecture = metadata.get("general.architecture")
    known = [each.gguf for each in FAMILIES if each.gguf is not None]
    of_it = [gguf for gguf in known if gguf.architecture == architecture]
    if not of_it:
        raise AdapterError(
            f"{file} is for architecture {architecture!r}, known are "
            f"{', '.join(GGUF_ARCHITECTURES)}"
        )
    family = next((gguf for gguf in of_it if gguf.has_experts == has_experts), of_it[0])
    alpha = metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, float):
        raise AdapterError(f"{file} has adapter.lora.alpha {alpha!r}, not a number; convert again")
    return family, alpha


def _tensors(header: GgufHeader) -> Iterator[tuple[str, torch.Tensor]]:
    data = np.memmap(header.file, np.uint8, mode="r")
    for tensor in header.tensors:
        yield tensor.name, _floats(tensor, data)


def _floats(tensor: GgufTensor, data: np.ndarray) -> torch.Tensor:
    import gguf

    raw = np.asarray(data[tensor.start_bytes : tensor.start_bytes + tensor.num_bytes])
    rows = raw.reshape(*tensor.shape[:-1], -1)
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(tensor.quant_type.value))
    return torch.from_numpy(np.array(values, np.float32)).reshape(tensor.shape)
