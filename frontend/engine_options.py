"""From keyword arguments of `LLM` to the daemon's command line. An option is passed on under its
own name; the daemon refuses what it does not know. Here are only vLLM's other names, and vLLM's
options that this engine does not have."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from frontend.errors import InvalidInput

_OTHER_NAMES = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "gpu_memory_utilization": "memory_fraction",
    "served_model_name": "model_name",
}
"""vLLM's names for the same thing."""
_DTYPES = {"half": "float16", "float": "float32"}
_CACHE_DTYPES = {"fp8_e4m3": "fp8"}

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "data_parallel_size": (1,),
    "distributed_executor_backend": (None, "uni"),
    "enable_chunked_prefill": (None, True),
    "load_format": ("auto", "safetensors"),
    "pipeline_parallel_size": (1,),
    "runner": ("auto", "generate"),
    "swap_space": (0, 4),
    "task": (None, "auto", "generate"),
    "tensor_parallel_size": (1,),
}
"""vLLM's options that this engine does not have, with the values that ask for nothing."""
_NEUTRAL_IF_EMPTY = frozenset({
    "allowed_local_media_path", "async_scheduling", "compilation_config", "cpu_offload_gb",
    "download_dir", "enable_expert_parallel", "enable_lora", "generation_config", "hf_overrides",
    "hf_token", "limit_mm_per_prompt", "logits_processors", "mm_processor_kwargs",
    "override_generation_config", "revision", "rope_scaling", "rope_theta", "skip_tokenizer_init",
    "speculative_config", "structured_outputs_config", "tokenizer_mode", "tokenizer_revision",
    "trust_remote_code",
})  # fmt: skip
"""The same, where None, False, 0, "auto" and empty values ask for nothing."""
_IGNORED = ("disable_custom_all_reduce", "disable_log_requests", "disable_log_stats")
"""The same, where every value asks for nothing."""
_ADVICE = {
    "tensor_parallel_size": "use 1",
    "pipeline_parallel_size": "use 1",
    "data_parallel_size": "use 1",
    "load_format": "start engine-core --load-format dummy --model-config FILE and connect to it",
    "enable_chunked_prefill": "long prompts are always chunked; see max_chunk_size",
    "trust_remote_code": "only code that is part of this release runs; use False",
    "revision": "download the revision and give its folder as the model",
    "swap_space": "use host_cache_memory, in bytes or as a text such as '4GiB'",
}


def daemon_arguments(model: str, options: Mapping[str, Any]) -> list[str]:
    """The daemon's command line for `LLM(model, **options)`. None means the daemon's default.

    Raises:
        InvalidInput: a value that this engine does not support, or that is not a text or number.
    """
    arguments = ["--model", str(model)]
    for name, value in _canonical(options).items():
        flag = name.replace("_", "-")
        if name in _IGNORED or _is_neutral(name, value):
            continue
        if name in _NEUTRAL or name in _NEUTRAL_IF_EMPTY:
            advice = _ADVICE.get(name, "omit it")
            raise InvalidInput(f"this engine does not support {name}={value!r}; {advice}")
        if name == "tenant_weights":
            for tenant, weight in (value or {}).items():
                arguments.append(f"--tenant-weight={tenant}={weight}")
        elif isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            arguments.append(f"--{flag}={_as_text(name, value)}")
    return arguments


def _canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    canonical: dict[str, Any] = {}
    for name, value in options.items():
        known_as = _OTHER_NAMES.get(name, name)
        if canonical.get(known_as) is not None and value is not None:
            raise InvalidInput(f"{name} and {known_as} are the same option; give one of them")
        if canonical.get(known_as) is None:
            canonical[known_as] = value
    return canonical


def _is_neutral(name: str, value: object) -> bool:
    is_empty = not value or value == "auto"
    return is_empty if name in _NEUTRAL_IF_EMPTY else value in _NEUTRAL.get(name, ())


def _as_text(name: str, value: object) -> str:
    text = str(value)
    if name == "dtype":
        text = text.removeprefix("torch.")  # str(torch.float32)
        return _DTYPES.get(text, text)
    if name == "kv_cache_dtype":
        return _CACHE_DTYPES.get(text, text)
    if not isinstance(value, str | int | float | PathLike):
        raise InvalidInput(f"{name} is {value!r}, which the engine's command line cannot take")
    return text
