"""From vLLM's engine arguments to the daemon's command line.

Owns which are passed on, which ask for nothing, and which are refused. Must not know requests.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from frontend.errors import InvalidInput

_FLAGS = {
    "model": "--model",
    "tokenizer": "--tokenizer",
    "dtype": "--dtype",
    "device": "--device",
    "kv_cache_dtype": "--kv-cache-dtype",
    "quantization": "--quantization",
    "weight_cache": "--weight-cache",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_chunk_size": "--max-chunk-size",
    "block_size": "--block-size",
    "num_blocks": "--num-blocks",
    "kv_cache_memory": "--kv-cache-memory",
    "memory_fraction": "--memory-fraction",
    "max_logprobs": "--max-logprobs",
    "model_name": "--model-name",
    "model_impl": "--model-impl",
    "num_threads": "--num-threads",
    "log_level": "--log-level",
    "host_cache_memory": "--host-cache-memory",
    "trace": "--trace",
    "max_num_partial_prefills": "--max-num-partial-prefills",
    "max_long_partial_prefills": "--max-long-partial-prefills",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "batching": "--batching",
    "prefill_delay_factor": "--prefill-delay-factor",
    "slo_tpot_ms": "--slo-tpot-ms",
    "slo_ttft_ms": "--slo-ttft-ms",
    "preemption_mode": "--preemption-mode",
    "max_queued_requests": "--max-queued-requests",
    "max_queued_tokens": "--max-queued-tokens",
    "scheduling_policy": "--scheduling-policy",
    "priority_min_gain": "--priority-min-gain",
    "priority_ageing_s": "--priority-ageing-s",
}
_SWITCHES = {
    "enable_prefix_caching": "--enable-prefix-caching",
    "force_preemption": "--force-preemption",
    "batch_invariant": "--batch-invariant",
    "capture_at_start": "--capture-at-start",
    "enforce_eager": "--enforce-eager",
}
_OTHER_NAMES = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "gpu_memory_utilization": "memory_fraction",
    "served_model_name": "model_name",
    "max_num_partial_prefills": "max_num_partial_prefills",
    "long_prefill_token_threshold": "long_prefill_token_threshold",
}
"""vLLM's names for the same thing."""
_DTYPES = {"half": "float16", "float": "float32"}
_QUANTIZATIONS = ("auto", "none", "int8", "int4")
_CACHE_DTYPES = {"fp8_e4m3": "fp8"}

_ANY = object()
"""Every value asks for something that is so here anyway."""
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "allowed_local_media_path": (None, ""),
    "async_scheduling": (None, False),
    "compilation_config": (None, 0, {}),
    "config_format": ("auto", "hf"),
    "convert": ("auto", "none"),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "disable_custom_all_reduce": (_ANY,),
    "disable_log_requests": (_ANY,),
    "disable_log_stats": (_ANY,),
    "distributed_executor_backend": (None, "uni"),
    "download_dir": (None,),
    "enable_chunked_prefill": (None, True),
    "enable_expert_parallel": (False,),
    "enable_lora": (None, False),
    "generation_config": ("auto",),
    "hf_overrides": (None, {}),
    "hf_token": (None, False),
    "limit_mm_per_prompt": (None, {}),
    "load_format": ("auto", "safetensors"),
    "logits_processors": (None, []),
    "mm_processor_kwargs": (None, {}),
    "override_generation_config": (None, {}),
    "pipeline_parallel_size": (1,),
    "revision": (None,),
    "rope_scaling": (None, {}),
    "rope_theta": (None,),
    "runner": ("auto", "generate"),
    "skip_tokenizer_init": (False,),
    "speculative_config": (None, {}),
    "structured_outputs_config": (None, {}),
    "swap_space": (0, 4),
    "task": (None, "auto", "generate"),
    "tensor_parallel_size": (1,),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "trust_remote_code": (False,),
}
_ADVICE = {
    "tensor_parallel_size": "use 1",
    "pipeline_parallel_size": "use 1",
    "data_parallel_size": "use 1",
    "load_format": "start engine-core --load-format dummy --model-config FILE and connect to it",
    "quantization": "int8 and int4 quantise at load; other kinds come with the model's files, such "
    "as a .gguf file",
    "enable_chunked_prefill": "long prompts are always chunked; see max_chunk_size",
    "trust_remote_code": "only code that is part of this release runs; use False",
    "revision": "download the revision and give its folder as the model",
    "swap_space": "use host_cache_memory, in bytes or as a text such as '4GiB'",
}


def daemon_arguments(model: str, options: Mapping[str, Any]) -> list[str]:
    """The daemon's command line for `LLM(model, **options)`. None means the daemon's default.

    Raises:
        InvalidInput: an option that asks for something this engine does not do.
        TypeError: an option that nobody knows.
    """
    arguments = ["--model", str(model)]
    for name, value in _canonical(options).items():
        if name in _NEUTRAL:
            _check_neutral(name, value)
        elif name in _SWITCHES:
            if value is not None:
                flag = _SWITCHES[name]
                arguments.append(flag if value else f"--no-{flag.removeprefix('--')}")
        elif name == "tenant_weights":
            for tenant, weight in (value or {}).items():
                arguments.append(f"--tenant-weight={tenant}={weight}")
        elif name in _FLAGS:
            if value is not None:
                arguments.append(f"{_FLAGS[name]}={_as_text(name, value)}")
        else:
            raise TypeError(f"unknown engine option {name!r}; known are {known_options()}")
    return arguments


def known_options() -> list[str]:
    """The names that may be set, without those that may only have their neutral value."""
    return sorted({*_FLAGS, *_SWITCHES, *_OTHER_NAMES, "tenant_weights"})


def _canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    canonical: dict[str, Any] = {}
    for name, value in options.items():
        known_as = _OTHER_NAMES.get(name, name)
        if canonical.get(known_as) is not None and value is not None:
            raise InvalidInput(f"{name} and {known_as} are the same option; give one of them")
        if canonical.get(known_as) is None:
            canonical[known_as] = value
    return canonical


def _check_neutral(name: str, value: object) -> None:
    accepted = _NEUTRAL[name]
    if any(neutral is _ANY or neutral == value for neutral in accepted):
        return
    advice = _ADVICE.get(name, "omit it")
    raise InvalidInput(f"this engine does not support {name}={value!r}; {advice}")


def _as_text(name: str, value: object) -> str:
    text = str(value)
    if name == "dtype":
        text = text.removeprefix("torch.")  # str(torch.float32)
        return _DTYPES.get(text, text)
    if name == "kv_cache_dtype":
        return _CACHE_DTYPES.get(text, text)
    if name == "quantization" and text not in _QUANTIZATIONS:
        raise InvalidInput(
            f"this engine does not support {name}={value!r}, only {', '.join(_QUANTIZATIONS)}; "
            f"{_ADVICE[name]}"
        )
    if isinstance(value, bool) or not isinstance(value, str | int | float | PathLike):
        raise InvalidInput(f"{name} is {value!r}, which the engine's command line cannot take")
    return text
