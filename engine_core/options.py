"""The daemon's options as typed by the operator. Must not import torch: `--help` reads this.

Each field is one `--option` and one key of the TOML file. "auto" values are resolved once, in
`engine_core.startup`; nothing after start-up sees this class.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token, validators

_AT_LEAST_ONE = validators.Number(gte=1)
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTES |= {f"{prefix}i": 1024**power for power, prefix in enumerate("kmgt", start=1)}


def parse_bytes(text: str) -> int:
    """ "2GiB", "512MB", "1.5g" or a plain number of bytes.

    Raises:
        ValueError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if match is None or match[2] not in _BYTES:
        raise ValueError(f"{text!r} is not a size; write for instance 2GiB, 512MB or 1000000")
    return int(float(match[1]) * _BYTES[match[2]])


def _size(_type: Any, tokens: Sequence[Token]) -> int:
    return parse_bytes(tokens[0].value)


def _option(help_text: str, group: str, **more: Any) -> Parameter:
    return Parameter(help=help_text, group=group, **more)


_Count = int | None


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    model: Annotated[
        str,
        _option(
            "A folder as on the Hugging Face hub, a .gguf file, a known name, or a hub id.", "Model"
        ),
    ]
    tokenizer: Annotated[
        str | None,
        _option("A folder or file to take the tokenizer from, if not the model's.", "Model"),
    ] = None
    model_name: Annotated[
        str | None, _option("The name to report; default: the folder's or file's.", "Model")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        _option("Weights and activations; auto is float32 on a CPU.", "Model"),
    ] = "auto"
    device: Annotated[Literal["auto", "cpu"], _option("Where the model runs.", "Model")] = "auto"
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        _option("auto: our own model code where there is some, else transformers'.", "Model"),
    ] = "auto"
    max_model_len: Annotated[
        _Count,
        _option(
            "Most tokens of a request, prompt and output; default: the model's own.",
            "Model",
            validator=_AT_LEAST_ONE,
        ),
    ] = None

    max_num_batched_tokens: Annotated[
        _Count,
        _option("Most tokens a step; default: 256 on a CPU.", "Scheduler", validator=_AT_LEAST_ONE),
    ] = None
    max_num_seqs: Annotated[
        _Count,
        _option(
            "Most requests running at once; default: 128 on a CPU.",
            "Scheduler",
            validator=_AT_LEAST_ONE,
        ),
    ] = None
    max_chunk_size: Annotated[
        _Count,
        _option(
            "Most prompt tokens of one request a step; default: the step's budget.",
            "Scheduler",
            validator=_AT_LEAST_ONE,
        ),
    ] = None

    block_size: Annotated[
        int, _option("Tokens a KV block.", "KV cache", validator=_AT_LEAST_ONE)
    ] = 16
    num_blocks: Annotated[
        _Count,
        _option("KV blocks, exactly; default: from memory.", "KV cache", validator=_AT_LEAST_ONE),
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        _option(
            "Memory for the KV cache, such as 2GiB; default: from what is free.",
            "KV cache",
            converter=_size,
            n_tokens=1,
            validator=_AT_LEAST_ONE,
        ),
    ] = None
    memory_fraction: Annotated[
        float,
        _option(
            "Share of the memory free after the weights that the KV cache may take.",
            "KV cache",
            validator=validators.Number(gt=0, lte=1),
        ),
    ] = 0.4
    enable_prefix_caching: Annotated[
        bool, _option("Reuse the KV blocks of prompts that begin alike.", "KV cache")
    ] = True
    watermark: Annotated[
        float,
        _option(
            "Share of the blocks kept free when a request is admitted.",
            "KV cache",
            validator=validators.Number(gte=0, lt=1),
        ),
    ] = 0.01

    bind: Annotated[
        str | None,
        _option(
            "ipc://PATH or tcp://HOST:PORT (port 0: any); default: a private Unix socket.",
            "Serving",
        ),
    ] = None
    drain_timeout: Annotated[
        float,
        _option(
            "Seconds that running requests get to finish after SIGTERM.",
            "Serving",
            validator=validators.Number(gte=0),
        ),
    ] = 30.0
    max_logprobs: Annotated[
        int,
        _option(
            "Most logprobs a request may ask for a position; -1: the whole vocabulary.",
            "Serving",
            validator=validators.Number(gte=-1),
        ),
    ] = -1
    num_threads: Annotated[
        _Count,
        _option(
            "CPU threads of the model; default: one a core.", "Serving", validator=_AT_LEAST_ONE
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], _option("Detail of the log.", "Serving")
    ] = "info"
    exit_on_stdin_eof: Annotated[
        bool,
        _option(
            "Stop when standard input closes: for a parent that may die.", "Serving", negative=""
        ),
    ] = False
