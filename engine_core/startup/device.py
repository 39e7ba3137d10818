"""What "auto" means on this machine: the device, its dtypes and its defaults."""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine_core.devices import DeviceTraits, traits_of
from engine_core.errors import ConfigurationError
from engine_core.model_files import ModelFiles
from engine_core.models.text_part import inner_text
from engine_core.options.checks import check_cpu_experts, check_device, check_encoder, check_layers
from engine_core.options.engine import CacheDtypeName, DtypeName, EngineOptions
from engine_core.options.speculation import QuantizationName
from engine_core.startup.before_torch import are_gpus_hidden, has_nvidia_driver
from engine_core.startup.pooled_files import PooledFiles
from kernels.backends import Bfloat16Products, FloatWeights, UnsupportedDevice, check_cuda

logger = logging.getLogger(__name__)

_CACHE_DTYPES = {"fp8": torch.float8_e4m3fn, "bfloat16": torch.bfloat16, "int8": torch.int8}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES: dict[str, DtypeName] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Numbers:
    """What a model computes in.

    Attributes:
        name: as `--dtype` calls it.
        activations: their dtype, and that of weights that are not packed.
        weights: what floating weights become.
        reason: why `auto` means this; empty: it was named.
    """

    name: DtypeName
    activations: torch.dtype
    weights: FloatWeights = "float32"
    reason: str = ""

    def by_torch(self, why: str) -> "Numbers":
        """The numbers without native products of bfloat16. `why`: a reason, for `auto`."""
        if self.weights != "bfloat16":
            return self
        if self.reason:
            return Numbers("float32", torch.float32, reason=why)
        return Numbers(self.name, torch.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """Values of options that were not given."""

    max_num_batched_tokens: int
    max_num_seqs: int
    memory_fraction: float
    max_num_shared_tokens: int | None = None
    """A default that holds only where `max_num_batched_tokens` has its default, too."""


_OF_A_CPU = DeviceDefaults(
    max_num_batched_tokens=512,  # weights are read from memory once for so many
    max_num_seqs=128,
    memory_fraction=0.4,
    max_num_shared_tokens=128,  # near the matrix product's best rate, and still a short step
)
_OF_A_CPU_IN_FEWER_BITS = dataclasses.replace(
    _OF_A_CPU,
    max_num_batched_tokens=256,  # products of integers and of bfloat16 take half the time or less
    max_num_shared_tokens=None,
)
_OF_A_GPU = DeviceDefaults(
    max_num_batched_tokens=8192,  # a prompt of that length computes at the matrix product's rate
    max_num_seqs=256,
    memory_fraction=0.9,
)


def defaults_of(device: torch.device, *, has_fewer_bits: bool = False) -> DeviceDefaults:
    """The defaults on a kind of device. `has_fewer_bits`: products on a CPU are not in float32."""
    if device.type == "cuda":
        return _OF_A_GPU
    return _OF_A_CPU_IN_FEWER_BITS if has_fewer_bits else _OF_A_CPU


def choose_device(options: EngineOptions, files: ModelFiles) -> tuple[torch.device, str]:
    """The device, and why `auto` is not the GPU that this machine has; empty: it is, or there is
    none, or the device was named. `auto` is a GPU if torch sees one that can run the model with
    these options; else the reason is logged."""
    if options.device != "auto":
        return torch.device(options.device), ""
    gpu = torch.device("cuda")
    reason = unseen_gpu()
    if torch.cuda.is_available():
        try:
            check_device(options, traits_of(gpu))
            check_model(options, files, traits_of(gpu))
            check_cuda(gpu)
        except (ConfigurationError, UnsupportedDevice) as refusal:
            reason = str(refusal)
        else:
            return gpu, ""
    if reason:
        logger.warning("--device auto is the CPU, not the GPU of this machine: %s", reason)
    return torch.device("cpu"), reason


def check_model(options: EngineOptions, files: ModelFiles, device: DeviceTraits) -> None:
    """Refuse a model that the device cannot run, as far as its config.json says it.
    Raises ConfigurationError: naming the model, the size and the limit."""
    if isinstance(files, PooledFiles) and files.is_encoder:
        check_encoder(options)
    check_layers(files.config, device)
    check_cpu_experts(options, files.config)


def refused_gpu() -> str:
    """Why this machine's GPU runs no model at all, with the cure; empty: it does."""
    if reason := unseen_gpu():
        return reason
    try:
        check_cuda(torch.device("cuda"))
    except UnsupportedDevice as refusal:
        return str(refusal)
    return ""


def unseen_gpu(system: Path = Path("/")) -> str:
    """Why torch does not see the NVIDIA GPU that the system has, and the cure; empty: it does, or
    there is none, or it is hidden on purpose. `system`: the root of its files."""
    if not has_nvidia_driver(system) or are_gpus_hidden() or torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        version = torch.__version__.partition("+")[0]
        return (
            f"torch {torch.__version__} is a build without CUDA; get one with it: pip install "
            f"--force-reinstall torch=={version}"
        )
    return (
        f"torch {torch.__version__} is for CUDA {torch.version.cuda}, which the driver "
        f"({_driver_version(system)}) does not give it; nvidia-smi says which CUDA the driver has: "
        "update the driver, or install a torch for that CUDA (pytorch.org)"
    )


def _driver_version(system: Path) -> str:
    """From "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug ..."."""
    try:
        words = (system / "proc/driver/nvidia/version").read_text().split()
    except OSError:
        return "of an unknown version"
    return next((word for word in words if word[0].isdigit() and "." in word), "of some version")


def choose_numbers(
    name: DtypeName,
    device: torch.device,
    config: Mapping[str, Any],
    *,
    quantization: QuantizationName = "auto",
    has_blocks: bool = False,
    native_bfloat16: Bfloat16Products | None = None,
) -> Numbers:
    """
    Args:
        config: as in config.json, which says in which type the checkpoint was written.
        has_blocks: most of the weights stay the quantised blocks of a file.
        native_bfloat16: see `kernels.backends.native_bfloat16`.
    """
    stored = _stored_dtype(config)
    if device.type == "cuda":
        if name != "auto":
            return Numbers(name, _DTYPES[name])
        why = "a GPU computes in 16 bits, the checkpoint's where it has some"
        chosen: DtypeName = "float16" if stored == "float16" else "bfloat16"
        return Numbers(chosen, _DTYPES[chosen], reason=why)
    if quantization in ("int8", "int4"):
        return Numbers("float32", torch.float32, quantization)
    if name == "bfloat16" and native_bfloat16 is not None:
        return Numbers(name, torch.float32, "bfloat16")
    if name != "auto":
        return Numbers(name, _DTYPES[name])
    written = f"the checkpoint is {stored or 'of no known dtype'}"
    if has_blocks:
        why = "the file's quantised blocks stay as they are, and the rest is float32"
    elif stored not in ("bfloat16", "float16"):
        why = written
    elif native_bfloat16 != "units":
        why = "this CPU has no units for bfloat16"
    else:
        why = f"{written}, and this CPU has units for bfloat16"
        return Numbers("bfloat16", torch.float32, "bfloat16", why)
    return Numbers("float32", torch.float32, reason=why)


def float_weights_of(quantization: QuantizationName) -> FloatWeights:
    """The format that floating weights take under this quantization."""
    return quantization if quantization in ("int8", "int4") else "float32"


def float_weights_on_host(options: EngineOptions, activations: torch.dtype) -> FloatWeights:
    """The format of floating experts in the host's memory, for a model on a GPU.
    Raises ConfigurationError: there is no native library to compute them."""
    from kernels.cpu.library import NativeLibraryUnavailable, load_library

    try:
        load_library(options.num_threads, logger.info, by_node=options.numa is not None)
    except NativeLibraryUnavailable as error:
        raise ConfigurationError(
            f"--cpu-experts needs the native CPU kernels: {error}; mend that, or leave the option "
            "out"
        ) from error
    return "bfloat16" if activations is torch.bfloat16 else "float32"


def keeps_blocks(quantization: QuantizationName, dtype: DtypeName) -> bool:
    """Whether quantised blocks of a file stay what they are, where the backend can run them."""
    return quantization not in ("none", "int8", "int4") and dtype == "auto"


def choose_cache_dtype(
    name: CacheDtypeName, numbers: Numbers, *, keeps_bytes: bool = False
) -> torch.dtype:
    """The dtype of keys and values, for a model that computes in `numbers`.
    `keeps_bytes`: `auto` is int8. Beside weights of 8 or 4 bits it costs SmolLM2 0.03 % of
    perplexity, and attention reads a quarter of the bytes."""
    return _CACHE_DTYPES.get(name, torch.int8 if keeps_bytes else _DTYPES[numbers.name])


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _stored_dtype(config: Mapping[str, Any]) -> DtypeName | None:
    """Newer transformers write "dtype", older "torch_dtype"; multimodal ones for each part."""
    for part in (config, inner_text(config) or {}):
        for key in ("dtype", "torch_dtype"):
            name = part.get(key)
            if isinstance(name, str):
                return _NAMES.get(name.removeprefix("torch."))
    return None
