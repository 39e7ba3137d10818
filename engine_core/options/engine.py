"""The daemon's options as typed by the operator: each field is one `--option` and one key of the
TOML file. "auto" values are resolved once, at start-up; nothing later sees this class.
"""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, validators

from engine_core.errors import ConfigurationError
from engine_core.logs import LogFormat
from engine_core.options.scheduling import SchedulingOptions
from engine_core.options.security import SecurityOptions
from engine_core.options.values import (
    AT_LEAST_ONE,
    AT_LEAST_ZERO,
    CACHE,
    MODEL,
    SERVING,
    option,
    size_option,
)

DeviceName = Literal["auto", "cuda", "cpu"]
DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
CacheDtypeName = Literal["auto", "fp8", "bfloat16", "int8"]
QuantizationName = Literal["auto", "none", "int8", "int4", "awq", "gptq", "gguf"]
LoadFormatName = Literal["auto", "safetensors", "gguf", "dummy"]


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    model: Annotated[
        str | None,
        option(
            "A folder as on the Hugging Face hub, a .gguf file, a known name, or a hub id.",
            MODEL,
            is_common=True,
        ),
    ] = None
    device: Annotated[
        DeviceName,
        option(
            "Where the model runs; auto: on an NVIDIA GPU if torch sees one.", MODEL, is_common=True
        ),
    ] = "auto"
    dtype: Annotated[
        DtypeName,
        option(
            "Weights and activations; auto: float32 on a CPU; on a GPU the checkpoint's own 16-bit "
            "type, bfloat16 if it has none.",
            MODEL,
            is_common=True,
        ),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        option(
            "A request gets the same bits whatever runs beside it: on a GPU slower, on a CPU "
            "always so with native kernels, and refused without.",
            MODEL,
        ),
    ] = False
    quantization: Annotated[
        QuantizationName,
        option(
            "Weights of dense layers; int8: a scale a row; int4: groups of 32 (both on a CPU); "
            "none: as --dtype says; auto: quantised as the file is where the device runs that, "
            "unless --dtype is given; awq, gptq, gguf: as auto, of such files only.",
            MODEL,
            is_common=True,
        ),
    ] = "auto"
    weight_cache: Annotated[
        int | None,
        size_option(
            "Most disk space for quantised weights as this CPU runs them, kept in the user's cache "
            "folder for the next start (default 8GiB); 0: none are kept.",
            MODEL,
            validator=AT_LEAST_ZERO,
        ),
    ] = None
    load_format: Annotated[
        LoadFormatName,
        option(
            "auto: the model's files; safetensors, gguf: of that kind only; dummy: random weights "
            "for --model-config.",
            MODEL,
        ),
    ] = "auto"
    model_config: Annotated[
        Path | None,
        option("A config.json whose shape --load-format dummy takes.", MODEL),
    ] = None
    tokenizer: Annotated[
        str | None,
        option("A folder or file to take the tokenizer from, if not the model's.", MODEL),
    ] = None
    model_name: Annotated[
        str | None, option("The name to report; default: the folder's or file's.", MODEL)
    ] = None
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        option("auto: our own model code where there is some, else transformers'.", MODEL),
    ] = "auto"
    max_model_len: Annotated[
        int | None,
        option(
            "Most tokens of a request, prompt and output; default: the model's own.",
            MODEL,
            is_common=True,
            validator=AT_LEAST_ONE,
        ),
    ] = None

    block_size: Annotated[int, option("Tokens a KV block.", CACHE, validator=AT_LEAST_ONE)] = 16
    num_blocks: Annotated[
        int | None,
        option("KV blocks, exactly; default: from memory.", CACHE, validator=AT_LEAST_ONE),
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        size_option(
            "Memory for the KV cache, such as 2GiB; default: from what is free.",
            CACHE,
            is_common=True,
            validator=AT_LEAST_ONE,
        ),
    ] = None
    host_cache_memory: Annotated[
        int,
        size_option(
            "Host memory in which evicted and swapped KV blocks live on, such as 8GiB; 0: none.",
            CACHE,
            validator=AT_LEAST_ZERO,
        ),
    ] = 0
    prefix_cache_dir: Annotated[
        Path | None,
        option(
            "Keep KV blocks of prompts in this folder, so that they survive a restart; CPU only.",
            CACHE,
        ),
    ] = None
    prefix_cache_disk: Annotated[
        int | None,
        size_option(
            "Most disk space for --prefix-cache-dir (default 8GiB); the least recently used go "
            "first.",
            CACHE,
            validator=AT_LEAST_ONE,
        ),
    ] = None
    memory_fraction: Annotated[
        float | None,
        option(
            "On a CPU the share of the memory free after the weights that the KV cache may take "
            "(default 0.4); on a GPU the share of all its memory that weights, steps and the KV "
            "cache may take together (default 0.9).",
            CACHE,
            is_common=True,
            validator=validators.Number(gt=0, lte=1),
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool, option("Reuse the KV blocks of prompts with a common prefix.", CACHE)
    ] = True
    watermark: Annotated[
        float,
        option(
            "Share of the blocks kept free when a request is admitted.",
            CACHE,
            validator=validators.Number(gte=0, lt=1),
        ),
    ] = 0.01
    kv_cache_dtype: Annotated[
        CacheDtypeName,
        option(
            "auto: as the model, int8 beside quantised weights on a CPU; fp8: e4m3, half a block's "
            "memory, GPU only; bfloat16 and int8 (a scale a head and token): a half and 0.27 of "
            "float32's memory, CPU only.",
            CACHE,
        ),
    ] = "auto"

    scheduling: SchedulingOptions = dataclasses.field(default_factory=SchedulingOptions)

    bind: Annotated[
        str | None,
        option(
            "ipc://PATH or tcp://HOST:PORT (port 0: any); default: a private Unix socket.",
            SERVING,
            is_common=True,
        ),
    ] = None
    max_clients: Annotated[
        int,
        option("Most clients connected at once.", SERVING, validator=AT_LEAST_ONE),
    ] = 1024
    security: SecurityOptions = dataclasses.field(default_factory=SecurityOptions)
    drain_timeout: Annotated[
        float,
        option(
            "Seconds that running requests get to finish after SIGTERM.",
            SERVING,
            validator=validators.Number(gte=0),
        ),
    ] = 30.0
    max_logprobs: Annotated[
        int,
        option(
            "Most logprobs a request may ask for a position; -1: the whole vocabulary.",
            SERVING,
            validator=validators.Number(gte=-1),
        ),
    ] = -1
    num_threads: Annotated[
        int | None,
        option(
            "CPU threads of the model; default: one a core.",
            SERVING,
            is_common=True,
            validator=AT_LEAST_ONE,
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], option("Detail of the log.", SERVING)
    ] = "info"
    log_format: Annotated[
        LogFormat,
        option("Lines of the log: text, or an object of JSON each.", SERVING),
    ] = "text"
    trace: Annotated[
        Path | None,
        option(
            "Write every arrival, step and time to this file, for scripts/simulate.py; .gz packs "
            "it.",
            SERVING,
        ),
    ] = None
    exit_on_stdin_eof: Annotated[
        bool,
        option("Stop when standard input closes: for a parent that may die.", SERVING, negative=""),
    ] = False
    parent_pid: Annotated[
        int | None,
        option("Stop when this process ends; Linux only.", SERVING, validator=AT_LEAST_ONE),
    ] = None
    watchdog_timeout: Annotated[
        float,
        option(
            "Seconds with work and without progress after which stacks and numbers are written to "
            "a file and, with --supervise, the engine is started again; 0: never.",
            SERVING,
            validator=validators.Number(gte=0),
        ),
    ] = 300.0
    supervise: Annotated[
        bool,
        option("Serve in a child process, and start it again when it dies; Linux only.", SERVING),
    ] = False
    max_restarts: Annotated[
        int | None,
        option(
            "With --supervise: restarts within 600 s (default 10); the next death ends the "
            "parent too.",
            SERVING,
            validator=AT_LEAST_ONE,
        ),
    ] = None
    capture_at_start: Annotated[
        bool,
        option("Capture every CUDA graph before ready, not at first use; GPU only.", SERVING),
    ] = False
    enforce_eager: Annotated[
        bool,
        option("Launch every step kernel by kernel, without CUDA graphs; a CPU has none.", SERVING),
    ] = False

    def check(self) -> None:
        """What can be said before the model is known, and without the scheduler's own options.

        Raises:
            ConfigurationError: an option without effect, or a pair that cannot work.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                name = field.name.replace("_", "-")
                raise ConfigurationError(f"--{name} is {value}, it must be finite")
        self._check_weights()
        if self.load_format == "dummy" and self.tokenizer is not None:
            raise ConfigurationError(
                "--tokenizer has no effect with --load-format dummy, whose clients send token ids; "
                "omit it"
            )
        if self.device != "auto":
            self.check_device(self.device)
        mode = self.scheduling.preemption_mode
        if not self.host_cache_memory and mode in ("swap", "auto"):
            raise ConfigurationError(
                f"--preemption-mode {mode} needs host memory to swap to; give "
                "--host-cache-memory, or use recompute"
            )
        if self.host_cache_memory and mode == "recompute" and not self.enable_prefix_caching:
            raise ConfigurationError(
                "--host-cache-memory has no effect with --preemption-mode recompute and "
                "--no-enable-prefix-caching; omit it, or one of those"
            )
        self._check_prefix_store()
        if self.security.isolate_tenants and not self.enable_prefix_caching:
            raise ConfigurationError(
                "--isolate-tenants has no effect with --no-enable-prefix-caching; omit one of them"
            )
        if self.max_restarts is not None and not self.supervise:
            raise ConfigurationError(
                "--max-restarts has no effect without --supervise; omit it, or give both"
            )
        if self.trace is not None and not self.trace.absolute().parent.is_dir():
            raise ConfigurationError(
                f"--trace: there is no folder {self.trace.absolute().parent}; make it first"
            )

    def _check_prefix_store(self) -> None:
        if self.prefix_cache_dir is None:
            if self.prefix_cache_disk is not None:
                raise ConfigurationError(
                    "--prefix-cache-disk has no effect without --prefix-cache-dir; omit it, or "
                    "give both"
                )
            return
        if not self.enable_prefix_caching:
            raise ConfigurationError(
                "--prefix-cache-dir has no effect with --no-enable-prefix-caching; omit one of them"
            )
        if self.trace is not None:
            raise ConfigurationError(
                "--trace with --prefix-cache-dir cannot be replayed, as a replay has no disk; omit "
                "one of them"
            )

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
        if self.prefix_cache_dir is not None:
            raise ConfigurationError(
                "--prefix-cache-dir keeps blocks of a CPU only: those of a GPU are not copied to "
                "disk; omit it, or run with --device cpu"
            )
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

    def _check_weights(self) -> None:
        """Refuse a model that is named twice or not at all, and weights of two kinds."""
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
