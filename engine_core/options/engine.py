"""The daemon's options as typed by the operator: each field is one `--option` and one key of the
TOML file. "auto" values are resolved once, at start-up; nothing later sees this class."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, validators

from engine_core.logs import LogFormat
from engine_core.options.scheduling import SchedulingOptions
from engine_core.options.security import SecurityOptions
from engine_core.options.speculation import QuantizationName, SpeculationOptions
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
        Path | None, option("A config.json whose shape --load-format dummy takes.", MODEL)
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
    speculation: SpeculationOptions = dataclasses.field(default_factory=SpeculationOptions)

    bind: Annotated[
        str | None,
        option(
            "ipc://PATH or tcp://HOST:PORT (port 0: any); default: a private Unix socket.",
            SERVING,
            is_common=True,
        ),
    ] = None
    max_clients: Annotated[
        int, option("Most clients connected at once.", SERVING, validator=AT_LEAST_ONE)
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
        LogFormat, option("Lines of the log: text, or an object of JSON each.", SERVING)
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
        bool, option("Capture every CUDA graph before ready, not at first use; GPU only.", SERVING)
    ] = False
    enforce_eager: Annotated[
        bool,
        option("Launch every step kernel by kernel, without CUDA graphs; a CPU has none.", SERVING),
    ] = False
