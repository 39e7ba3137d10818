"""Adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors.

Source: https://github.com/huggingface/peft (LoraConfig, LoraLayer.update_layer)."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine_core.adapters.errors import AdapterError
from engine_core.model_files.json_file import read_json_object
from engine_core.model_files.safetensors_shards import read_safetensors
from kernels.interface.lora import LoRAPart

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 256

_APPLIED = frozenset({"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
_WITHOUT_EFFECT = frozenset(
    {
        "alora_invocation_tokens_str", "auto_mapping", "base_model_name_or_path", "bias",
        "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out",
        "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
        "loftq_config", "lora_dropout", "megatron_core", "peft_type", "peft_version",
        "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type",
    }
)  # fmt: skip
"""Of training, or looked at below. Which layers were changed is said by the weights."""
_HARMLESS_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base model as it is."""
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")
_REPEATS, _REPEATED_GROUP = re.compile(r"[+*{?]"), re.compile(r"\)[+*{?]")
_MOST_REPEATS = 3
_LAYER = re.compile(r".*?\b(layers\.\d+\..+)")


def read_peft_adapter(folder: Path) -> dict[str, LoRAPart]:
    """By the model's name of the projection.
    Raises AdapterError, ModelFilesError: it is no LoRA adapter, incomplete, or asks for what is not
    applied."""
    if not (folder / CONFIG).is_file():
        raise AdapterError(f"{folder} has no {CONFIG}, so it is no adapter; name another folder")
    config = read_json_object(folder / CONFIG)
    _check_config(folder, config)
    file = folder / WEIGHTS
    if not file.is_file():
        others = sorted(each.name for each in folder.glob("adapter_model.*"))
        raise AdapterError(
            f"{folder} has no {WEIGHTS}{f' but {others[0]}' if others else ''}; save the adapter "
            "with save_pretrained(..., safe_serialization=True)"
        )
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in read_safetensors({file: None}):
        match = _NAME.fullmatch(name)
        if match is None or not isinstance(tensor, torch.Tensor):
            raise AdapterError(
                f"{file} holds {name!r}, which is not applied: only lora_A and lora_B of linear "
                "layers are (no DoRA, embeddings, biases or whole modules); train it without"
            )
        halves.setdefault(match[1], {})[match[2]] = tensor
    if not halves:
        raise AdapterError(f"{file} holds no weights; save the adapter again")
    return {_model_name(name): _part(file, name, pair, config) for name, pair in halves.items()}


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    def refuse(what: str) -> None:
        raise AdapterError(f"{folder / CONFIG}: {what}")

    if config.get("peft_type") != "LORA":
        refuse(f"peft_type is {config.get('peft_type')!r}, only LORA is applied")
    if config.get("use_dora"):
        refuse("use_dora is set, DoRA is not applied; train with plain LoRA")
    if config.get("bias", "none") != "none":
        refuse(f"bias is {config['bias']!r}, biases are not changed; train with bias='none'")
    start = config.get("init_lora_weights")
    if not isinstance(start, bool | str | None) or start not in _HARMLESS_STARTS:
        refuse(
            f"init_lora_weights is {start!r}, which changes the base model, too; convert the "
            "adapter with save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    for name, value in config.items():
        if value and name not in _APPLIED | _WITHOUT_EFFECT and name != "use_dora":
            refuse(f"{name} is {str(value)[:80]!r}, which is not applied; train without it")
    rank = config.get("r")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        refuse(f"r is {rank!r}, it must be a whole number from 1 to {MAX_RANK}")
    if not _is_number(config.get("lora_alpha")):
        refuse(f"lora_alpha is {config.get('lora_alpha')!r}, it must be a number")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(map(_is_number, pattern.values())):
            refuse(f"{name} is {str(pattern)[:80]!r}, it must give numbers by layers' names")
        for key in pattern:
            if len(_REPEATS.findall(key)) > _MOST_REPEATS or _REPEATED_GROUP.search(key):
                refuse(f"{key[:80]!r} in {name} could take for ever to match; write it simpler")


def _part(
    file: Path, name: str, pair: Mapping[str, torch.Tensor], config: Mapping[str, Any]
) -> LoRAPart:
    if len(pair) < 2:
        there = next(iter(pair))
        raise AdapterError(f"{file} has only lora_{there} of {name}; save the adapter again")
    a_RE, b_NR = pair["A"].float().contiguous(), pair["B"].float().contiguous()
    rank = _of_pattern(config.get("rank_pattern") or {}, name, config["r"])
    if (a_RE.dim() == 2 and a_RE.shape[0] != rank) or not 1 <= rank <= MAX_RANK:
        raise AdapterError(
            f"{file}: lora_A of {name} is {list(a_RE.shape)}, its rank by {CONFIG} is {rank} (the "
            f"limit is {MAX_RANK}); save the adapter again"
        )
    alpha = _of_pattern(config.get("alpha_pattern") or {}, name, config["lora_alpha"])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoRAPart(a_RE, b_NR * scale)


def _of_pattern(pattern: Mapping[str, Any], name: str, default: Any) -> Any:
    """As peft's `get_pattern_key`: the first key that is, as an expression, the name's end."""
    for key, value in pattern.items():
        try:
            if re.match(rf"(.*\.)?({key})$", name):
                return value
        except re.error as error:
            raise AdapterError(f"{key!r} in {CONFIG} is no regular expression: {error}") from error
    return default


def _model_name(name: str) -> str:
    """Multimodal models have their decoder a level deeper."""
    match = _LAYER.fullmatch(name)
    is_decoder = match is not None and "vision" not in name.partition(".layers.")[0]
    return f"model.{match[1]}" if match is not None and is_decoder else name


def _is_number(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(float(value))  # type: ignore[arg-type]
