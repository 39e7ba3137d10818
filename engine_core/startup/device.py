"""What "auto" means on this machine: the device, its dtypes and its defaults."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from engine_core.options.engine import CacheDtypeName, DeviceName, DtypeName
from engine_core.options.speculation import QuantizationName
from kernels.backends import FloatWeights

_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "int8": torch.int8}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Values of options that were not given."""

    max_num_batched_tokens: int
    max_num_seqs: int
    memory_fraction: float


_OF_A_CPU = DeviceDefaults(
    max_num_batched_tokens=128,  # near the matrix product's best rate, and still a short step
    max_num_seqs=128,
    memory_fraction=0.4,
)
_OF_A_CPU_IN_INTEGERS = dataclasses.replace(
    _OF_A_CPU,
    max_num_batched_tokens=256,  # integer products take less than half the time
)
_OF_A_GPU = DeviceDefaults(
    max_num_batched_tokens=8192,  # a prompt of that length computes at the matrix product's rate
    max_num_seqs=256,
    memory_fraction=0.9,
)


def defaults_of(device: torch.device, *, is_quantised: bool = False) -> DeviceDefaults:
    """The defaults on a kind of device. `is_quantised`: most of the weights are."""
    if device.type == "cuda":
        return _OF_A_GPU
    return _OF_A_CPU_IN_INTEGERS if is_quantised else _OF_A_CPU


def choose_device(name: DeviceName) -> torch.device:
    """`auto` is a GPU if torch sees one. Whether it can serve is not asked here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def choose_dtype(name: DtypeName, device: torch.device, config: Mapping[str, Any]) -> torch.dtype:
    """Of weights and activations.
    `config`: as in config.json, which says in which type the checkpoint was written."""
    if name != "auto":
        return _DTYPES[name]
    if device.type != "cuda":
        return torch.float32
    stored = _stored_dtype(config)
    return stored if stored in (torch.bfloat16, torch.float16) else torch.bfloat16


def float_weights_of(quantization: QuantizationName) -> FloatWeights:
    """What floating weights of dense layers become."""
    return quantization if quantization in ("int8", "int4") else "float32"


def keeps_blocks(quantization: QuantizationName, dtype: DtypeName) -> bool:
    """Whether quantised blocks of a file stay what they are, where the backend can run them."""
    return quantization not in ("none", "int8", "int4") and dtype == "auto"


def choose_cache_dtype(
    name: CacheDtypeName, dtype: torch.dtype, *, keeps_bytes: bool = False
) -> torch.dtype:
    """Of keys and values, for a model that computes in `dtype`.
    `keeps_bytes`: `auto` is int8. Beside weights of 8 or 4 bits it costs SmolLM2 0.03 % of
    perplexity, and attention reads a quarter of the bytes."""
    return _CACHE_DTYPES.get(name, torch.int8 if keeps_bytes else dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _stored_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Newer transformers write "dtype", older "torch_dtype"; multimodal ones for each part."""
    text_config = config.get("text_config")
    for part in (config, text_config if isinstance(text_config, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            name = part.get(key)
            if isinstance(name, str):
                return _DTYPES.get(name.removeprefix("torch."))
    return None
