"""Refuses options that contradict each other, or that the device cannot do."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from engine_core.devices import DeviceTraits, traits_of
from engine_core.errors import ConfigurationError
from engine_core.models.config_names import architecture_of
from engine_core.models.encoders.encoder_configs import EncoderConfig
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.layer_cache import Latent, PagedKeys, State
from engine_core.models.registry import find_family, read_model_config
from engine_core.options.engine import EngineOptions
from engine_core.options.parallel import check_parallel
from engine_core.options.refusals import refuse


def check_options(options: EngineOptions) -> None:
    """What can be said before the model is known, and without the scheduler's own options.
    Raises ConfigurationError: an option without effect, or a pair that cannot work."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            name = field.name.replace("_", "-")
            raise ConfigurationError(f"--{name} is {value}, it must be finite")
    _check_weights(options)
    options.speculation.check()
    check_parallel(options)
    if options.speculation.speculative is not None and options.trace is not None:
        raise ConfigurationError(
            "--trace with --speculative cannot be replayed, as a trace holds no drafts; omit one "
            "of them"
        )
    if options.load_format == "dummy" and options.tokenizer is not None:
        raise ConfigurationError(
            "--tokenizer has no effect with --load-format dummy, whose clients send token ids; "
            "omit it"
        )
    if options.device != "auto":
        check_device(options, traits_of(options.device))
    mode = options.scheduling.preemption_mode
    if not options.host_cache_memory and mode in ("swap", "auto"):
        raise ConfigurationError(
            f"--preemption-mode {mode} needs host memory to swap to; give "
            "--host-cache-memory, or use recompute"
        )
    if options.host_cache_memory and mode == "recompute" and not options.enable_prefix_caching:
        raise ConfigurationError(
            "--host-cache-memory has no effect with --preemption-mode recompute and "
            "--no-enable-prefix-caching; omit it, or one of those"
        )
    _check_prefix_store(options)
    _check_disaggregation(options)
    if options.state_checkpoint_interval is not None and not options.enable_prefix_caching:
        raise ConfigurationError(
            "--state-checkpoint-interval has no effect with --no-enable-prefix-caching; omit one"
        )
    if options.security.isolate_tenants and not options.enable_prefix_caching:
        raise ConfigurationError(
            "--isolate-tenants has no effect with --no-enable-prefix-caching; omit one of them"
        )
    if options.max_prompt_embeds is not None and not options.enable_prompt_embeds:
        raise ConfigurationError(
            "--max-prompt-embeds has no effect without --enable-prompt-embeds; omit it, or give "
            "both"
        )
    if options.max_restarts is not None and not options.supervise:
        raise ConfigurationError(
            "--max-restarts has no effect without --supervise; omit it, or give both"
        )
    if options.trace is not None and not options.trace.absolute().parent.is_dir():
        raise ConfigurationError(
            f"--trace: there is no folder {options.trace.absolute().parent}; make it first"
        )


def _check_prefix_store(options: EngineOptions) -> None:
    if options.prefix_cache_dir is None:
        if options.prefix_cache_disk is not None:
            raise ConfigurationError(
                "--prefix-cache-disk has no effect without --prefix-cache-dir; omit it, or "
                "give both"
            )
        return
    if not options.enable_prefix_caching:
        raise ConfigurationError(
            "--prefix-cache-dir has no effect with --no-enable-prefix-caching; omit one of them"
        )
    if options.trace is not None:
        raise ConfigurationError(
            "--trace with --prefix-cache-dir cannot be replayed, as a replay has no disk; omit "
            "one of them"
        )


def _check_disaggregation(options: EngineOptions) -> None:
    options.disaggregation.check()
    if options.disaggregation.disaggregation_mode is None:
        return
    others = {
        "--no-enable-prefix-caching": not options.enable_prefix_caching,
        "--prefix-cache-dir": options.prefix_cache_dir is not None,
        "--trace": options.trace is not None,
    }
    for option, is_given in others.items():
        if is_given:
            raise ConfigurationError(
                f"--disaggregation-mode cannot be combined with {option}: blocks that move are "
                "prefix blocks in memory, which a replay does not have; omit one of them"
            )


def check_device(options: EngineOptions, device: DeviceTraits) -> None:
    """Refuse what the device cannot do, and options that contradict each other on it.
    Raises ConfigurationError: naming the option and the reason."""
    if options.enforce_eager and options.capture_at_start:
        raise ConfigurationError(
            "--capture-at-start has no effect with --enforce-eager, which captures no CUDA "
            "graph; omit one of them"
        )
    if options.cpu_experts and options.capture_at_start:
        raise ConfigurationError(
            "--capture-at-start has no effect with --cpu-experts, whose layers wait for the host "
            "and are in no CUDA graph; omit one of them"
        )
    if device.runs_ahead:
        refuse(options, "gpu")
        return
    if options.cpu_experts:
        raise ConfigurationError(
            f"--cpu-experts {options.cpu_experts} has no effect on a CPU, which has all experts; "
            "omit it, or run with --device cuda"
        )
    if options.kv_cache_dtype == "fp8":
        raise ConfigurationError(
            "--kv-cache-dtype fp8 needs a GPU: the CPU's attention has no arithmetic on 8-bit "
            "floats and would be slower for it; use auto, or run with --device cuda"
        )
    if options.capture_at_start:
        raise ConfigurationError(
            "--capture-at-start has no effect on a CPU, which has no CUDA graphs; omit it, or "
            "run with --device cuda"
        )


def check_encoder(options: EngineOptions) -> None:
    """Refuse what has no meaning for a model that computes whole prompts and keeps nothing.
    Raises ConfigurationError: naming the option and the reason."""
    refuse(options, "encoder-only")


def check_cpu_experts(options: EngineOptions, config: Mapping[str, Any]) -> None:
    """Raises ConfigurationError: the model has no experts that --cpu-experts could be of."""
    if not options.cpu_experts:
        return
    try:
        read = read_model_config(config)
    except UnsupportedArchitecture:
        read = None  # transformers' code would run it
    experts = getattr(read, "experts", ())
    if options.model_impl == "transformers" or not any(experts[: options.cpu_experts]):
        raise ConfigurationError(
            f"--cpu-experts {options.cpu_experts}: the first {options.cpu_experts} layers of "
            f"{architecture_of(config)} have no experts in our own model code; omit it, or give a "
            "larger number for a mixture of experts"
        )


def check_layers(config: Mapping[str, Any], device: DeviceTraits) -> None:
    """Refuse layers that no kernel of the device takes. `config`: its config.json.
    Raises ConfigurationError: naming the model, the size and the limit."""
    if not device.compiles_kernels:
        return
    if config.get("is_encoder_decoder"):
        raise ConfigurationError(
            f"{architecture_of(config)} is an encoder-decoder model, which runs on a CPU only; run "
            "with --device cpu"
        )
    from kernels.interface.recurrence import MOST_KEY_ELEMENTS
    from kernels.triton.device_limits import LARGEST_HEAD

    try:
        read = read_model_config(config)
    except UnsupportedArchitecture:
        return  # it is not our code that runs it, or nothing does
    name = find_family(config)[0]
    states = [kept.shapes[0][1] for kept in read.spec.caches if isinstance(kept, State)]
    keys = [kept for kept in read.spec.caches if isinstance(kept, PagedKeys)]
    latents = [kept for kept in keys if isinstance(kept, Latent)]
    if latents and states:
        raise ConfigurationError(
            f"{name} has latent attention beside recurrent states, which runs on a CPU only: never "
            "tried on a GPU; run with --device cpu"
        )
    if any(kept.index_size for kept in latents):
        raise ConfigurationError(
            f"{name} attends keys that an indexer chooses, which runs on a CPU only: it has no GPU "
            "kernel yet; run with --device cpu"
        )
    keys = [kept for kept in keys if not isinstance(kept, Latent)]
    if isinstance(read, EncoderConfig) and (read.names.distance_bias or read.disentangled):
        raise ConfigurationError(
            f"{name} has a learned bias of distances, which no GPU kernel adds to scores; run with "
            "--device cpu"
        )
    for largest, limit, what in (
        (max(states, default=0), MOST_KEY_ELEMENTS, "recurrent states of {} elements a key"),
        (max([kept.key_size for kept in keys], default=0), LARGEST_HEAD, "heads of {} elements"),
    ):
        if largest > limit:
            raise ConfigurationError(
                f"{name} has {what.format(largest)}, a GPU takes at most {limit}; run with "
                "--device cpu"
            )


def _check_weights(options: EngineOptions) -> None:
    """Refuse a model that is named twice or not at all, and weights of two kinds."""
    if options.quantization in ("int8", "int4") and options.dtype in ("bfloat16", "float16"):
        raise ConfigurationError(
            f"--quantization {options.quantization} computes in float32, not in {options.dtype}; "
            "omit one of them"
        )
    if options.load_format == "dummy":
        if options.model_config is None:
            raise ConfigurationError(
                "--load-format dummy needs a shape; name a config.json with --model-config"
            )
        if options.model is not None:
            raise ConfigurationError(
                f"--model {options.model} has no effect with --load-format dummy; omit one of "
                "them, and name the weights with --model-name"
            )
    elif options.model_config is not None:
        raise ConfigurationError(
            "--model-config has no effect without --load-format dummy; omit it, or give both"
        )
    elif options.model is None:
        raise ConfigurationError(
            "--model is missing; name a folder, a .gguf file, a known name or a hub id, as in "
            "`engine-core run smollm2-135m-instruct`, a chat; --help has the rest"
        )
