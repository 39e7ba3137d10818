"""The daemon's options as typed by the operator: each field is one `--option` and one key of the
TOML file. "auto" values are resolved once, at start-up; nothing later sees this class."""

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, validators

from engine_core.options.adapters import AdapterOptions
from engine_core.options.disaggregation import DisaggregationOptions
from engine_core.options.multimodal import MultiModalOptions
from engine_core.options.pooling import PoolingOptions
from engine_core.options.scheduling import SchedulingOptions
from engine_core.options.security import SecurityOptions
from engine_core.options.speculation import QuantizationName, SpeculationOptions
from engine_core.options.values import (
    CACHE,
    COMMON,
    FLAG,
    MODEL,
    NOT_NEGATIVE,
    POSITIVE,
    SERVING,
    SIZE,
    at_least,
)
from engine_core.options.workers import ParallelOptions
from protocol.logs import LogFormat

LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
DeviceName = Literal["auto", "cuda", "cpu"]
DtypeName = Literal["auto", "bfloat16", "float16", "float32"]
CacheDtypeName = Literal["auto", "fp8", "bfloat16", "int8"]
LoadFormatName = Literal["auto", "safetensors", "gguf", "dummy"]


@Parameter(name="*", group=SERVING.group)
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    model: Annotated[str | None, MODEL, COMMON] = None
    """A folder as on the Hugging Face hub, a .gguf file, a known name, or a hub id: org/name, or
    org/name:Q4_K_M of GGUF files."""
    device: Annotated[DeviceName, MODEL, COMMON] = "auto"
    """Where the model runs; auto: on an NVIDIA GPU if torch sees one."""
    dtype: Annotated[DtypeName, MODEL, COMMON] = "auto"
    """Weights and activations; auto: on a CPU float32, or bfloat16 where it has units for that
    and the checkpoint 16 bits; on a GPU the checkpoint's 16-bit type, else bfloat16."""
    batch_invariant: Annotated[bool, MODEL] = False
    """A request gets the same bits whatever runs beside it: on a GPU slower, on a CPU always so
    with native kernels, and refused without."""
    quantization: Annotated[QuantizationName, MODEL, COMMON] = "auto"
    """Weights of layers; int8: a scale a row; int4: groups of 32 (both on a CPU); none:
    as --dtype says; auto: quantised as the file is where the device runs that, unless --dtype
    is given; awq, gptq, gguf, fp8, mxfp4: as auto, of such files only."""
    cpu_experts: Annotated[int, MODEL, NOT_NEGATIVE] = 0
    """Experts of the model's first N layers stay in the host's memory, and the CPU computes them;
    for mixtures of experts that a GPU's memory does not hold."""
    weight_cache_size: Annotated[int | None, MODEL, SIZE, NOT_NEGATIVE] = None
    """Most disk space for quantised weights as this CPU runs them, kept in the user's cache
    folder for the next start (default 8GiB); 0: none are kept."""
    load_format: Annotated[LoadFormatName, MODEL] = "auto"
    """auto: the model's files; safetensors, gguf: of that kind only; dummy: random weights for
    --model-config."""
    model_config: Annotated[Path | None, MODEL] = None
    """A config.json whose shape --load-format dummy takes."""
    tokenizer: Annotated[str | None, MODEL] = None
    """A folder or file to take the tokenizer from, if not the model's."""
    model_name: Annotated[str | None, MODEL] = None
    """The name to report; default: the folder's or file's."""
    model_impl: Annotated[Literal["auto", "native", "transformers"], MODEL] = "auto"
    """auto: our own model code where there is some, else transformers'."""
    max_model_len: Annotated[int | None, MODEL, COMMON, POSITIVE] = None
    """Most tokens of a request, prompt and output; default: the model's own."""

    enable_prompt_embeds: Annotated[bool, FLAG] = False
    """Take hidden states in place of tokens from clients (prompt_embeds)."""
    max_prompt_embeds: Annotated[int | None, SIZE, POSITIVE] = None
    """Most bytes of them in a request, such as 256MiB (default 64MiB)."""

    pooling: PoolingOptions = dataclasses.field(default_factory=PoolingOptions)
    adapters: AdapterOptions = dataclasses.field(default_factory=AdapterOptions)
    multimodal: MultiModalOptions = dataclasses.field(default_factory=MultiModalOptions)

    block_size: Annotated[int, CACHE, POSITIVE] = 16
    """Tokens a KV block."""
    num_blocks: Annotated[int | None, CACHE, POSITIVE] = None
    """KV blocks, exactly; default: from memory."""
    kv_cache_memory: Annotated[int | None, CACHE, COMMON, SIZE, POSITIVE] = None
    """Memory for the KV cache, such as 2GiB; default: from what is free."""
    host_cache_memory: Annotated[int, CACHE, SIZE, NOT_NEGATIVE] = 0
    """Host memory in which evicted and swapped KV blocks live on, such as 8GiB; 0: none."""
    prefix_cache_dir: Annotated[Path | None, CACHE] = None
    """Keep KV blocks of prompts in this folder, so that they survive a restart; CPU only."""
    prefix_cache_disk: Annotated[int | None, CACHE, SIZE, POSITIVE] = None
    """Most disk space for --prefix-cache-dir (default 8GiB); the least recently used go
    first."""
    memory_fraction: Annotated[
        float | None, CACHE, COMMON, Parameter(validator=validators.Number(gt=0, lte=1))
    ] = None
    """On a CPU the share of the memory free after the weights that the KV cache may take
    (default 0.4); on a GPU the share of all its memory that weights, steps and the KV cache may
    take together (default 0.9)."""
    enable_prefix_caching: Annotated[bool, CACHE] = True
    """Reuse the KV blocks of prompts with a common prefix."""
    state_checkpoint_interval: Annotated[int | None, CACHE, NOT_NEGATIVE] = None
    """Of so many tokens one state of recurrent layers is kept for other requests to start from;
    0: none. Default: as many tokens as have keys and values of a state's bytes."""
    watermark: Annotated[float, CACHE, at_least(0, lt=1)] = 0.01
    """Share of the blocks kept free when a request is admitted."""
    kv_cache_dtype: Annotated[CacheDtypeName, CACHE] = "auto"
    """auto: as the model, int8 beside quantised weights on a CPU; fp8: e4m3, half a block's
    memory, GPU only; bfloat16 and int8 (a scale a head and token): a half and 0.27 of float32's
    memory, CPU only."""

    scheduling: SchedulingOptions = dataclasses.field(default_factory=SchedulingOptions)
    speculation: SpeculationOptions = dataclasses.field(default_factory=SpeculationOptions)
    disaggregation: DisaggregationOptions = dataclasses.field(default_factory=DisaggregationOptions)
    parallel: ParallelOptions = dataclasses.field(default_factory=ParallelOptions)

    bind: Annotated[str | None, COMMON] = None
    """ipc://PATH or tcp://HOST:PORT (port 0: any); default: a private Unix socket."""
    max_clients: Annotated[int, POSITIVE] = 1024
    """Most clients connected at once."""
    security: SecurityOptions = dataclasses.field(default_factory=SecurityOptions)
    logits_processors: Annotated[tuple[str, ...], FLAG] = ()
    """Load this class, which changes logits, and serve its extra_args: an entry point of group
    engine_core.logits_processors, or module:Class; may be given several times; CPU only."""
    drain_timeout: Annotated[float, NOT_NEGATIVE] = 30.0
    """Seconds that running requests get to finish after SIGTERM."""
    max_logprobs: Annotated[int, at_least(-1)] = 20
    """Most logprobs a request may ask for a position; -1: the whole vocabulary."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """What logprobs are: of the model's logits, or of what tokens are drawn from once bias,
    penalties, temperature and truncation have changed them; or these logits themselves."""
    num_threads: Annotated[int | None, COMMON, POSITIVE] = None
    """CPU threads of the model; default: one a core."""
    numa: Literal["distribute"] | None = None
    """Several nodes of memory: each has its own part of every operation and of the weights."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Detail of the log."""
    log_format: LogFormat = "text"
    """Lines of the log: text, or an object of JSON each."""
    trace: Path | None = None
    """Write every arrival, step and time to this file, for `engine-core simulate`; .gz packs
    it."""
    exit_on_stdin_eof: Annotated[bool, FLAG] = False
    """Stop when standard input closes: for a parent that may die."""
    parent_pid: Annotated[int | None, POSITIVE] = None
    """Stop when this process ends; Linux only."""
    watchdog_timeout: Annotated[float, NOT_NEGATIVE] = 300.0
    """Seconds with work and without progress after which stacks and numbers are written to a
    file and, with --supervise, the engine is started again; 0: never."""
    supervise: bool = False
    """Serve in a child process, and start it again when it dies; Linux only."""
    max_restarts: Annotated[int | None, POSITIVE] = None
    """With --supervise: restarts within 600 s (default 10); the next death ends the parent
    too."""
    capture_at_start: bool = False
    """Capture every CUDA graph before ready, the rare ones too; GPU only."""
    enforce_eager: bool = False
    """Launch every step kernel by kernel, without CUDA graphs; a CPU has none."""

    @property
    def prompt_embeds_bytes(self) -> int:
        """Most of a request; 0: none are taken."""
        return (self.max_prompt_embeds or 64 * 2**20) if self.enable_prompt_embeds else 0
