"""The daemon's options that say which model runs, where, and in which numbers. Must not
import torch: `--help` reads this.

What "auto" and None become is settled in `engine_core.startup.device`. What a device cannot do is
refused, so that nothing is accepted and ignored.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from engine_core.errors import ConfigurationError
from engine_core.options.values import AT_LEAST_ZERO, option, size_option

DeviceName = Literal["auto", "cuda", "cpu"]
DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
CacheDtypeName = Literal["auto", "fp8", "bfloat16", "int8"]
QuantizationName = Literal["auto", "none", "int8", "int4"]


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)  # of several bases only one can have slots
class DeviceOptions:
    model: Annotated[
        str | None,
        option(
            "A folder as on the Hugging Face hub, a .gguf file, a known name, or a hub id.", "Model"
        ),
    ] = None
    device: Annotated[
        DeviceName,
        option("Where the model runs; auto: on an NVIDIA GPU if torch sees one.", "Model"),
    ] = "auto"
    dtype: Annotated[
        DtypeName,
        option(
            "Weights and activations; auto: float32 on a CPU; on a GPU the checkpoint's own 16-bit "
            "type, bfloat16 if it has none.",
            "Model",
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        option(
            "A request gets the same bits whatever runs beside it: on a GPU slower, on a CPU "
            "always so with native kernels, and refused without.",
            "Model",
        ),
    ] = False
    quantization: Annotated[
        QuantizationName,
        option(
            "Weights of dense layers; int8: a scale a row; int4: groups of 32 (both on a CPU); "
            "none: as --dtype says; auto: quantised as the file is where the device runs that, "
            "unless --dtype is given.",
            "Model",
        ),
    ] = "auto"
    weight_cache: Annotated[
        int | None,
        size_option(
            "Most disk space for quantised weights as this CPU runs them, kept in the user's cache "
            "folder for the next start (default 8GiB); 0: none are kept.",
            "Model",
            validator=AT_LEAST_ZERO,
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"],
        option("auto: the model's files; dummy: random weights for --model-config.", "Model"),
    ] = "auto"
    model_config: Annotated[
        Path | None,
        option("A config.json whose shape --load-format dummy takes.", "Model"),
    ] = None
    capture_at_start: Annotated[
        bool,
        option("Capture every CUDA graph before ready, not at first use; GPU only.", "Serving"),
    ] = False
    enforce_eager: Annotated[
        bool,
        option(
            "Launch every step kernel by kernel, without CUDA graphs; a CPU has none.", "Serving"
        ),
    ] = False
    kv_cache_dtype: Annotated[
        CacheDtypeName,
        option(
            "auto: as the model, int8 beside quantised weights on a CPU; fp8: e4m3, half a block's "
            "memory, GPU only; bfloat16 and int8 (a scale a head and token): a half and 0.27 of "
            "float32's memory, CPU only.",
            "KV cache",
        ),
    ] = "auto"

    def check_device(self, device_type: str) -> None:
        """Refuse what the device ("cpu" or "cuda") cannot do, and what contradicts itself.

        Raises:
            ConfigurationError: naming the option and the reason.
        """
        if self.enforce_eager and self.capture_at_start:
            raise ConfigurationError(
                "--capture-at-start has no effect with --enforce-eager, which captures no CUDA "
                "graph; omit one of them"
            )
        if device_type != "cpu":
            self._check_gpu()
            return
        if self.kv_cache_dtype == "fp8":
            raise ConfigurationError(
                "--kv-cache-dtype fp8 needs a GPU: the CPU's attention has no arithmetic on 8-bit "
                "floats and would be slower for it; use auto, or run with --device cuda"
            )
        if self.capture_at_start:
            raise ConfigurationError(
                "--capture-at-start has no effect on a CPU, which has no CUDA graphs; omit it, or "
                "run with --device cuda"
            )

    def _check_gpu(self) -> None:
        if self.kv_cache_dtype in ("bfloat16", "int8"):
            raise ConfigurationError(
                f"--kv-cache-dtype {self.kv_cache_dtype} is for float32 models on a CPU; use auto "
                "or fp8, or run with --device cpu"
            )
        if self.quantization in ("int8", "int4"):
            raise ConfigurationError(
                f"--quantization {self.quantization} runs on a CPU only; omit it, or run with "
                "--device cpu"
            )
        if self.weight_cache is not None:
            raise ConfigurationError(
                "--weight-cache has no effect on a GPU, which takes weights as they are; omit it, "
                "or run with --device cpu"
            )

    def check_weights(self) -> None:
        """Refuse a model that is named twice or not at all, and weights of two kinds.

        Raises:
            ConfigurationError: naming the options.
        """
        if self.quantization in ("int8", "int4") and self.dtype in ("bfloat16", "float16"):
            raise ConfigurationError(
                f"--quantization {self.quantization} computes in float32, not in {self.dtype}; "
                "omit one of them"
            )
        if self.load_format == "dummy":
            if self.model_config is None:
                raise ConfigurationError(
                    "--load-format dummy needs a shape; name a config.json with --model-config"
                )
            if self.model is not None:
                raise ConfigurationError(
                    f"--model {self.model} has no effect with --load-format dummy; omit one of "
                    "them, and name the weights with --model-name"
                )
        elif self.model_config is not None:
            raise ConfigurationError(
                "--model-config has no effect without --load-format dummy; omit it, or give both"
            )
        elif self.model is None:
            raise ConfigurationError(
                "--model is missing; name a folder, a .gguf file, a known name or a hub id"
            )
