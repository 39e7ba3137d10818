"""Options that are refused, in one table: by the kind of model, by what its code does not support
(`engine_core.models.interface.Feature`) or its layers keep, on a GPU, and with several workers."""

from collections.abc import Callable
from typing import get_args

from engine_core.errors import ConfigurationError
from engine_core.models.interface import Feature, Model
from engine_core.options.engine import EngineOptions

FIRST_LAYERS = "first-layers:"
"""A draft model that is part of the model itself."""

_IS_GIVEN: dict[str, Callable[[EngineOptions], object]] = {
    "--num-blocks": lambda o: o.num_blocks is not None,
    "--kv-cache-memory": lambda o: o.kv_cache_memory is not None,
    "--kv-cache-dtype": lambda o: o.kv_cache_dtype != "auto",
    "--kv-cache-dtype of a CPU": lambda o: o.kv_cache_dtype in ("bfloat16", "int8"),
    "--host-cache-memory": lambda o: o.host_cache_memory,
    "--state-checkpoint-interval": lambda o: o.state_checkpoint_interval is not None,
    "--prefix-cache-dir": lambda o: o.prefix_cache_dir is not None,
    "--disaggregation-mode": lambda o: o.disaggregation.disaggregation_mode is not None,
    "--capture-at-start": lambda o: o.capture_at_start,
    "--memory-fraction": lambda o: o.memory_fraction is not None,
    "--enable-lora": lambda o: o.adapters.is_enabled,
    "--enable-prompt-embeds": lambda o: o.enable_prompt_embeds,
    "--trace": lambda o: o.trace is not None,
    "--model-impl transformers": lambda o: o.model_impl == "transformers",
    "--speculative": lambda o: o.speculation.speculative is not None,
    "--speculative eagle": lambda o: o.speculation.speculative == "eagle",
    "--speculative mtp": lambda o: o.speculation.speculative == "mtp",
    "--draft-model": lambda o: o.speculation.draft_model is not None,
    "--draft-quantization of a CPU": lambda o: o.speculation.draft_quantization in ("int8", "int4"),
    "--draft-model of first layers": lambda o: (o.speculation.draft_model or "").startswith(
        FIRST_LAYERS
    ),
    "--logits-processors": lambda o: o.logits_processors,
    "--logprobs-mode": lambda o: o.logprobs_mode != "raw_logprobs",
    "--quantization": lambda o: o.quantization in ("int8", "int4"),
    "--weight-cache-size": lambda o: o.weight_cache_size is not None,
    "--language-model-only": lambda o: o.multimodal.language_model_only,
    "--limit-mm-per-prompt": lambda o: o.multimodal.limit_mm_per_prompt is not None,
    "--runner pooling": lambda o: o.pooling.runner == "pooling",
    "--slo-tpot-ms": lambda o: o.scheduling.slo_tpot_ms is not None,
    "--slo-ttft-ms": lambda o: o.scheduling.slo_ttft_ms is not None,
    "--max-chunk-size": lambda o: o.scheduling.max_chunk_size is not None,
    "--num-decode-steps": lambda o: o.scheduling.num_decode_steps is not None,
    "--num-decode-steps with stages": lambda o: (
        (o.scheduling.num_decode_steps or 1) > 1 and o.parallel.pipeline_parallel_size > 1
    ),
    "--prefill-delay-factor": lambda o: o.scheduling.prefill_delay_factor is not None,
    "--block-size of a CPU": lambda o: o.block_size & (o.block_size - 1),
    "--cpu-experts": lambda o: o.cpu_experts,
    "--pipeline-parallel-size": lambda o: o.parallel.pipeline_parallel_size > 1,
}

_ENCODER_ONLY = (
    "{option} has no effect on an encoder-only model, which computes each prompt in one step and "
    "keeps no keys and values; omit it"
)
_ENCODER_DECODER = (
    "{option} is not supported for {architecture}, whose tokens attend to an encoder's output, one "
    "input a request; omit it"
)
_WORKERS = "{option} is not supported with {options.parallel.num_workers} workers: "
_ALONE = "; omit it, or use one worker"
_NO_DRAFTS = (
    "needs layers of our own code with one residual stream, which {architecture} does not have; "
)

_REFUSED: dict[str, dict[str, str]] = {
    "encoder-only": dict.fromkeys(
        (
            *("--num-blocks", "--kv-cache-memory", "--kv-cache-dtype", "--host-cache-memory"),
            *("--prefix-cache-dir", "--disaggregation-mode", "--memory-fraction", "--enable-lora"),
            *("--enable-prompt-embeds", "--trace", "--model-impl transformers", "--speculative"),
            *("--logits-processors", "--slo-tpot-ms", "--slo-ttft-ms", "--max-chunk-size"),
            *("--num-decode-steps", "--prefill-delay-factor", "--capture-at-start"),
        ),
        _ENCODER_ONLY,
    ),
    "encoder-decoder": dict.fromkeys(
        (
            *("--host-cache-memory", "--prefix-cache-dir", "--disaggregation-mode"),
            *("--draft-model", "--speculative mtp", "--trace"),
            *("--language-model-only", "--limit-mm-per-prompt"),
        ),
        _ENCODER_DECODER,
    ),
    "stages": {
        "--pipeline-parallel-size": "{option}: {architecture} has no stages here, only our own "
        "decoders have; omit it",
    },
    "states": {
        "--state-checkpoint-interval": "{option} has no effect: no layer of {architecture} keeps a "
        "state; omit it",
    },
    "adapters": {
        "--enable-lora": "adapters need our own model code, and {architecture} runs through "
        "transformers'; omit --adapter, --enable-lora, --max-loras and --adapter-dir",
    },
    "prompt_embeds": {
        "--enable-prompt-embeds": "{option}: each layer of {architecture} has embeddings of a "
        "token, which hidden states do not name; omit it",
    },
    "drafts": {
        "--speculative eagle": "{option} " + _NO_DRAFTS + "use --speculative draft",
        "--speculative mtp": "{option} " + _NO_DRAFTS + "use --speculative draft",
        "--draft-model of first layers": "--draft-model {options.speculation.draft_model} "
        + _NO_DRAFTS
        + "name another model",
    },
    "gpu": {
        "--draft-quantization of a CPU": "--draft-quantization "
        "{options.speculation.draft_quantization} runs on a CPU only; omit it, or run with "
        "--device cpu",
        "--logits-processors": "{option} {options.logits_processors[0]} runs on a CPU only: a GPU "
        "samples without the host; omit it, or run with --device cpu",
        "--prefix-cache-dir": "{option} keeps blocks of a CPU only: those of a GPU are not copied "
        "to disk; omit it, or run with --device cpu",
        "--disaggregation-mode": "{option} moves blocks of a CPU only: those of a GPU are not "
        "copied to host memory for it; omit it, or run with --device cpu",
        "--kv-cache-dtype of a CPU": "--kv-cache-dtype {options.kv_cache_dtype} is for float32 "
        "models on a CPU; use auto or fp8, or run with --device cpu",
        "--quantization": "{option} {options.quantization} runs on a CPU only; omit it, or run "
        "with --device cpu",
        "--block-size of a CPU": "--block-size is {options.block_size}; on a GPU it must be a "
        "power of two, such as 16",
        "--pipeline-parallel-size": "{option} is {options.parallel.pipeline_parallel_size}, and "
        "stages run on CPUs only; use --tensor-parallel-size, or --device cpu",
        "--weight-cache-size": "{option} has no effect on a GPU, which takes weights as they are; "
        "omit it, or run with --device cpu",
    },
    "workers": {
        **dict.fromkeys(
            ("--draft-model", "--speculative mtp"),
            _WORKERS + "a draft model is not split yet; use --speculative ngram or suffix",
        ),
        "--prefix-cache-dir": _WORKERS + "each worker has a part of a block, and one folder holds "
        "whole ones; keep prompts in memory with --host-cache-memory",
        "--disaggregation-mode": _WORKERS
        + "each worker has a part of a block, and whole ones are moved"
        + _ALONE,
        "--enable-lora": _WORKERS + "adapters are not split yet" + _ALONE,
        "--cpu-experts": _WORKERS + "they would take the same cores" + _ALONE,
        "--enable-prompt-embeds": _WORKERS + "hidden states would be sent to every worker" + _ALONE,
        "--logits-processors": _WORKERS
        + "its code would run in every worker, and need not choose the same"
        + _ALONE,
        "--logprobs-mode": _WORKERS + "each has the logits of a part of the vocabulary" + _ALONE,
        "--model-impl transformers": _WORKERS
        + "transformers' model code is not split here"
        + _ALONE,
        "--runner pooling": _WORKERS + "heads of pooling models are not split" + _ALONE,
        "--num-decode-steps with stages": "--num-decode-steps is not supported with "
        "{options.parallel.num_workers} workers: a stage waits for the token of each step; omit "
        "it, or use --tensor-parallel-size alone",
    },
}


def refuse(options: EngineOptions, situation: str, architecture: str = "") -> None:
    """Raises ConfigurationError: an option is given that this situation does not allow."""
    for option, text in _REFUSED[situation].items():
        if _IS_GIVEN[option](options):
            raise ConfigurationError(
                text.format(option=option, options=options, architecture=architecture)
            )


def refuse_unsupported(options: EngineOptions, model: Model, architecture: str) -> None:
    """Raises ConfigurationError: an option asks for what the model's code or layers do not
    support."""
    for feature in get_args(Feature):
        if feature not in model.supports and feature in _REFUSED:
            refuse(options, feature, architecture)
    if not any(layer.is_sparse for layer in model.spec.caches):
        refuse(options, "states", architecture)
