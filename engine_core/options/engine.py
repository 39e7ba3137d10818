"""The daemon's options as typed by the operator. Must not import torch: `--help` reads this.

Each field is one `--option` and one key of the TOML file. "auto" values are resolved once, at
start-up; nothing after start-up sees this class.
"""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, validators

from engine_core.errors import ConfigurationError
from engine_core.options.device import DeviceOptions
from engine_core.options.scheduling import SchedulingOptions
from engine_core.options.values import AT_LEAST_ONE, AT_LEAST_ZERO, option, size_option

_Count = int | None


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions(SchedulingOptions, DeviceOptions):
    tokenizer: Annotated[
        str | None,
        option("A folder or file to take the tokenizer from, if not the model's.", "Model"),
    ] = None
    model_name: Annotated[
        str | None, option("The name to report; default: the folder's or file's.", "Model")
    ] = None
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        option("auto: our own model code where there is some, else transformers'.", "Model"),
    ] = "auto"
    max_model_len: Annotated[
        _Count,
        option(
            "Most tokens of a request, prompt and output; default: the model's own.",
            "Model",
            validator=AT_LEAST_ONE,
        ),
    ] = None

    block_size: Annotated[int, option("Tokens a KV block.", "KV cache", validator=AT_LEAST_ONE)] = (
        16
    )
    num_blocks: Annotated[
        _Count,
        option("KV blocks, exactly; default: from memory.", "KV cache", validator=AT_LEAST_ONE),
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        size_option(
            "Memory for the KV cache, such as 2GiB; default: from what is free.",
            "KV cache",
            validator=AT_LEAST_ONE,
        ),
    ] = None
    host_cache_memory: Annotated[
        int,
        size_option(
            "Host memory in which evicted and swapped KV blocks live on, such as 8GiB; 0: none.",
            "KV cache",
            validator=AT_LEAST_ZERO,
        ),
    ] = 0
    memory_fraction: Annotated[
        float | None,
        option(
            "On a CPU the share of the memory free after the weights that the KV cache may take "
            "(default 0.4); on a GPU the share of all its memory that weights, steps and the KV "
            "cache may take together (default 0.9).",
            "KV cache",
            validator=validators.Number(gt=0, lte=1),
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool, option("Reuse the KV blocks of prompts that begin alike.", "KV cache")
    ] = True
    watermark: Annotated[
        float,
        option(
            "Share of the blocks kept free when a request is admitted.",
            "KV cache",
            validator=validators.Number(gte=0, lt=1),
        ),
    ] = 0.01

    bind: Annotated[
        str | None,
        option(
            "ipc://PATH or tcp://HOST:PORT (port 0: any); default: a private Unix socket.",
            "Serving",
        ),
    ] = None
    drain_timeout: Annotated[
        float,
        option(
            "Seconds that running requests get to finish after SIGTERM.",
            "Serving",
            validator=validators.Number(gte=0),
        ),
    ] = 30.0
    max_logprobs: Annotated[
        int,
        option(
            "Most logprobs a request may ask for a position; -1: the whole vocabulary.",
            "Serving",
            validator=validators.Number(gte=-1),
        ),
    ] = -1
    num_threads: Annotated[
        _Count,
        option("CPU threads of the model; default: one a core.", "Serving", validator=AT_LEAST_ONE),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], option("Detail of the log.", "Serving")
    ] = "info"
    trace: Annotated[
        Path | None,
        option(
            "Write every arrival, step and time to this file, for scripts/simulate.py; .gz packs "
            "it.",
            "Serving",
        ),
    ] = None
    exit_on_stdin_eof: Annotated[
        bool,
        option(
            "Stop when standard input closes: for a parent that may die.", "Serving", negative=""
        ),
    ] = False

    def check(self) -> None:
        """What can be said before the model is known.

        Raises:
            ConfigurationError: an option without effect, or a pair that cannot work.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                name = field.name.replace("_", "-")
                raise ConfigurationError(f"--{name} is {value}, it must be finite")
        self.check_weights()
        if self.load_format == "dummy" and self.tokenizer is not None:
            raise ConfigurationError(
                "--tokenizer has no effect with --load-format dummy, whose clients send token ids; "
                "omit it"
            )
        if self.device != "auto":
            self.check_device(self.device)
        self.check_scheduling()
        if not self.host_cache_memory and self.preemption_mode in ("swap", "auto"):
            raise ConfigurationError(
                f"--preemption-mode {self.preemption_mode} needs host memory to swap to; give "
                "--host-cache-memory, or use recompute"
            )
        if (
            self.host_cache_memory
            and self.preemption_mode == "recompute"
            and not self.enable_prefix_caching
        ):
            raise ConfigurationError(
                "--host-cache-memory has no effect with --preemption-mode recompute and "
                "--no-enable-prefix-caching; omit it, or one of those"
            )
        if self.trace is not None and not self.trace.absolute().parent.is_dir():
            raise ConfigurationError(
                f"--trace: there is no folder {self.trace.absolute().parent}; make it first"
            )
