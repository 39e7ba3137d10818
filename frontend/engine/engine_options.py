"""From keyword arguments of `LLM` to the daemon's command line. An option is passed on under its
own name; the daemon refuses what it does not know. Here are only vLLM's other names, and vLLM's
options that this engine does not have."""

import json
import logging
from collections.abc import Mapping
from os import PathLike
from typing import Any

from frontend.errors import InvalidInput

logger = logging.getLogger(__name__)

_OTHER_NAMES = {
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_gpu_blocks_override": "num_blocks",
    "num_scheduler_steps": "num_decode_steps",
    "gpu_memory_utilization": "memory_fraction",
    "served_model_name": "model_name",
}
"""vLLM's names for the same thing."""
_DTYPES = {"half": "float16", "float": "float32"}
_CACHE_DTYPES = {"fp8_e4m3": "fp8"}
_QUANTIZATIONS = {"awq_marlin": "awq", "gptq_marlin": "gptq"}

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "config_format": ("auto", "hf"),
    "enable_chunked_prefill": (None, True),
    "swap_space": (0, 4),
    "task": (None, "auto", "generate"),
}
"""vLLM's options that this engine does not have, with the values that ask for nothing."""
_NEUTRAL_IF_EMPTY = frozenset({
    "allowed_local_media_path", "allowed_media_domains", "bind", "cpu_offload_gb",
    "exit_on_stdin_eof", "parent_pid",
    "download_dir", "enable_expert_parallel", "fully_sharded_loras", "generation_config",
    "hf_token", "lora_dtype", "max_cpu_loras",
    "mm_processor_kwargs",
    "override_generation_config", "revision", "rope_scaling", "rope_theta", "skip_tokenizer_init",
    "tokenizer_revision",
})  # fmt: skip
"""The same, where None, False, 0, "auto" and empty values ask for nothing."""
_IGNORED = ("disable_custom_all_reduce", "disable_log_requests", "disable_log_stats")
"""The same, where every value asks for nothing."""
_CHANGE_NO_RESULT = {
    "async_scheduling": "the engine decides",
    "compilation_config": "the engine decides; see enforce_eager",
    "disable_async_output_proc": "outputs are always processed in the client",
    "distributed_executor_backend": "workers are processes of the engine's own",
    "max_parallel_loading_workers": "the engine decides",
    "max_seq_len_to_capture": "graphs have no length; see enforce_eager",
    "tokenizer_mode": "there is one tokenizer, the fast one",
    "trust_remote_code": "only code that is part of this release runs",
    "use_v2_block_manager": "there is one block manager",
}
"""The same, where any value gives the same answers: taken, and said once."""
_SPECULATIVE_METHODS = {
    "ngram": "ngram", "suffix": "suffix", "draft_model": "draft", "eagle": "eagle",
    "eagle3": "eagle", "mtp": "mtp",
}  # fmt: skip
_SPECULATIVE_NAMES = {
    "model": "draft_model",
    "quantization": "draft_quantization",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_max": "prompt_lookup_max",
    "prompt_lookup_min": "prompt_lookup_min",
}
"""Keys of vLLM's `speculative_config`, and our options."""
_NOT_FROM_HERE = {("load_format", "dummy"), ("tokenizer_mode", "mistral")}
_JSON = ("hf_overrides", "limit_mm_per_prompt", "pooler_config")
"""Mappings, as one text."""
_ONE_EACH = {"tenant_weights": "tenant-weight", "adapters": "adapter"}
"""Mappings, an option for each entry."""
_ADVICE = {
    "allowed_media_domains": "use allow_media_url",
    "bind": "it listens in a private folder; start engine-core --bind and give its address",
    "exit_on_stdin_eof": "an engine that is started here always ends with this process",
    "parent_pid": "an engine that is started here always ends with this process",
    "load_format": "start engine-core --load-format dummy --model-config FILE and connect to it",
    "enable_chunked_prefill": "long prompts are always chunked; see max_chunk_size",
    "tokenizer_mode": "the model's own tokenizer is read; use 'auto'",
    "task": "use runner='pooling' with convert='embed' or 'classify'",
    "revision": "name it with the model, as org/name@revision",
    "swap_space": "use host_cache_memory, in bytes or as a text such as '4GiB'",
}


def daemon_arguments(model: str, options: Mapping[str, Any]) -> list[str]:
    """The daemon's command line for `LLM(model, **options)`. None means the daemon's default.
    Raises InvalidInput: a value that this engine does not support, or that is not a text or number.
    """
    arguments = ["--model", str(model)]
    without_effect: list[str] = []
    if options.get("enable_lora") and options.get("adapter_dir") is None:
        # as vLLM's: the engine serves this process alone, which may load what it may read
        options = {**options, "adapter_dir": "/"}
    for name, value in _canonical(options).items():
        flag = name.replace("_", "-")
        if name in _IGNORED or _is_neutral(name, value) or (name, value) == ("enable_lora", False):
            continue
        is_refused = (name, str(value)) in _NOT_FROM_HERE
        if name in _CHANGE_NO_RESULT and not is_refused:
            without_effect.append(f"{name}={value!r} ({_CHANGE_NO_RESULT[name]})")
            continue
        if name in _NEUTRAL or name in _NEUTRAL_IF_EMPTY or is_refused:
            advice = _ADVICE.get(name, "omit it")
            raise InvalidInput(f"this engine does not support {name}={value!r}; {advice}")
        if name in _ONE_EACH:
            for key, each in (value or {}).items():
                arguments.append(f"--{_ONE_EACH[name]}={key}={each}")
        elif name in _JSON and not isinstance(value, str):
            arguments += [f"--{flag}={json.dumps(value)}"] if value else []
        elif name == "logits_processors":
            arguments += [f"--{flag}={each}" for each in _processor_names(value)]
        elif isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            arguments.append(f"--{flag}={_as_text(name, value)}")
    if without_effect:
        logger.warning("options that change no answer here: %s", ", ".join(without_effect))
    return arguments


def _processor_names(value: object) -> list[str]:
    names = [value] if isinstance(value, str) else list(value or ())  # type: ignore[call-overload]
    for name in names:
        if not isinstance(name, str):
            raise InvalidInput(
                f"logits_processors holds {name!r}, and the engine is another process; name an "
                "entry point, or write 'module:Class'"
            )
    return names


def _canonical(options: Mapping[str, Any]) -> dict[str, Any]:
    canonical: dict[str, Any] = {}
    options = dict(options)
    options |= _speculation(options.pop("speculative_config", None))
    for name, value in options.items():
        known_as = _OTHER_NAMES.get(name, name)
        if canonical.get(known_as) is not None and value is not None:
            raise InvalidInput(f"{name} and {known_as} are the same option; give one of them")
        if canonical.get(known_as) is None:
            canonical[known_as] = value
    return canonical


def _speculation(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """vLLM's `speculative_config` as our options."""
    if not config:
        return {}
    if not isinstance(config, Mapping):
        raise InvalidInput(f"speculative_config is {config!r}, it must be a dictionary")
    given = {name: value for name, value in config.items() if value is not None}
    method = given.pop("method", None)
    if method is None:  # as vLLM takes it
        method = "ngram" if given.get("model") in ("ngram", "[ngram]") else "draft_model"
    if method not in _SPECULATIVE_METHODS:
        known = ", ".join(_SPECULATIVE_METHODS)
        raise InvalidInput(f"speculative_config's method is {method!r}, this engine has {known}")
    if method in ("ngram", "suffix"):
        given.pop("model", None)
    unknown = sorted(given.keys() - _SPECULATIVE_NAMES.keys())
    if unknown:
        raise InvalidInput(
            f"this engine does not support {unknown[0]!r} in speculative_config; it takes method, "
            f"{', '.join(_SPECULATIVE_NAMES)}"
        )
    named = {_SPECULATIVE_NAMES[name]: value for name, value in given.items()}
    return {"speculative": _SPECULATIVE_METHODS[method], **named}


def _is_neutral(name: str, value: object) -> bool:
    if name in _NEUTRAL_IF_EMPTY or name in _CHANGE_NO_RESULT:
        return not value or value == "auto"
    return value in _NEUTRAL.get(name, ())


def _as_text(name: str, value: object) -> str:
    text = str(value)
    if name == "dtype":
        text = text.removeprefix("torch.")  # str(torch.float32)
        return _DTYPES.get(text, text)
    if name == "quantization":
        return _QUANTIZATIONS.get(text, text)
    if name == "kv_cache_dtype":
        return _CACHE_DTYPES.get(text, text)
    if not isinstance(value, str | int | float | PathLike):
        raise InvalidInput(f"{name} is {value!r}, which the engine's command line cannot take")
    return text
