"""The encoder beside a model's decoder: whether prompts may have images, and in what sizes."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

from engine_core.errors import ConfigurationError
from engine_core.model_files import ModelFiles
from engine_core.model_files.json_file import read_json_object_if_present
from engine_core.models.encoder_decoder.model import EncoderDecoderModel
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.multimodal.families import MODEL_TYPES, input_family
from engine_core.models.multimodal.interface import InputFamily
from engine_core.models.multimodal.tower import load_encoder
from engine_core.models.text_part import text_part
from engine_core.options.engine import EngineOptions
from engine_core.scheduler import SchedulerConfig
from engine_core.server.multimodal import MultiModalReader
from engine_core.startup.encoder_decoder import with_own_encoder
from engine_core.startup.model import LoadedModel
from protocol.multimodal import MultiModalInfo

logger = logging.getLogger(__name__)

_LEAST_CACHE_SIZE = 8192
_WIDTHS_A_ROW, _USUAL_ROWS = 64, 2048
"""Estimate of an encoder's activations: so many hidden widths a row of its output, of an image of
that size; the largest ones take from what the KV cache leaves free."""


def with_encoder(options: EngineOptions, files: ModelFiles, loaded: LoadedModel) -> LoadedModel:
    """The model with its encoder, or with the reason why its prompts are text.
    Raises ModelError: the encoder cannot be loaded."""
    if isinstance(loaded.model, EncoderDecoderModel):
        return with_own_encoder(options, loaded, loaded.model)
    why_text = _why_text(options, files, loaded)
    if why_text is not None:
        if _has_encoder(files.config):
            logger.info("prompts are text: %s", why_text)
        return dataclasses.replace(loaded, why_text=why_text)
    if (option := options.speculation.draft_option) is not None:
        raise ConfigurationError(
            f"{option} makes drafts for text alone; use --speculative ngram or suffix, or give "
            "--language-model-only"
        )
    if options.trace is not None:
        raise ConfigurationError(
            "--trace of a model that takes images cannot be replayed, as a trace holds none; omit "
            "it, or give --language-model-only"
        )
    family = input_family(files.config)
    assert family is not None, "it is of one of MODEL_TYPES"
    path, own = files.path, None
    if files.mmproj is not None:
        path, own = files.mmproj.file, (files.mmproj.config, files.mmproj.tensors)
    encoder = load_encoder(
        path,
        family,
        own,
        dtype=loaded.dtype,
        num_threads=loaded.ops.num_threads,
        device=loaded.ops.device,
    )
    return dataclasses.replace(loaded, encoder=encoder)


def _has_encoder(config: dict[str, Any]) -> bool:
    keys = ("vision_config", "audio_config")
    return text_part(config) is not None or any(config.get(key) is not None for key in keys)


def _why_text(options: EngineOptions, files: ModelFiles, loaded: LoadedModel) -> str | None:
    if not _has_encoder(files.config):
        is_gguf = files.path.suffix == ".gguf" and not options.multimodal.language_model_only
        more = ", with no mmproj file beside it that fits" if is_gguf else ""
        return f"the model takes text alone{more}"
    if options.multimodal.language_model_only:
        return "--language-model-only"
    if options.speculation.speculative == "mtp":
        return "--speculative mtp makes drafts for text alone"
    if options.load_format == "dummy":
        return "the model's weights are random"
    if options.parallel.num_workers > 1 and not loaded.traits.is_host:
        return "several workers on GPUs encode nothing; use one worker"
    if files.config.get("model_type") not in MODEL_TYPES:
        return (
            f"no encoder of a model of type {files.config.get('model_type')!r} is supported, "
            f"there are: {', '.join(MODEL_TYPES)}"
        )
    if loaded.model_impl != "native":
        return "the text runs through transformers' model code, which takes no encoder's output"
    try:
        input_family(files.config)
    except UnsupportedArchitecture as error:
        return str(error)
    return None


def with_encoder_sizes(
    options: EngineOptions, loaded: LoadedModel, scheduler: SchedulerConfig
) -> SchedulerConfig:
    """The scheduler's settings with those of the encoder in force.
    Raises ConfigurationError: a setting that has no effect, or cannot work with the model."""
    given = options.scheduling
    names = ("max_num_encoder_input_tokens", "encoder_cache_size")
    if loaded.encoder is None:
        for name in names:
            if getattr(given, name) is not None:
                raise ConfigurationError(
                    f"--{name.replace('_', '-')} has no effect: {loaded.why_text}; omit it"
                )
        return scheduler
    family = loaded.encoder.family
    most_rows = family.most_rows
    if not family.is_cross_attended:
        most_rows = min(most_rows, scheduler.max_model_len)
    num_batched, num_shared = scheduler.max_num_batched_tokens, scheduler.max_num_shared_tokens
    if family.is_bidirectional:
        for name in ("slo_tpot_ms", "max_num_shared_tokens"):
            if getattr(given, name) is not None:
                raise ConfigurationError(
                    f"--{name.replace('_', '-')} cuts prompts where it must, and "
                    f"{loaded.architecture} computes an image in one step; omit it, or give "
                    "--language-model-only"
                )
        num_shared = None
        if given.max_num_batched_tokens is None:
            num_batched = max(num_batched, 2 * most_rows)
    budget = given.max_num_encoder_input_tokens or max(num_batched, most_rows)
    return dataclasses.replace(
        scheduler,
        max_num_batched_tokens=num_batched,
        max_num_shared_tokens=num_shared,
        max_num_encoder_input_tokens=budget,
        encoder_cache_size=given.encoder_cache_size or max(budget, _LEAST_CACHE_SIZE),
        disable_chunked_mm_input=family.is_bidirectional,
    )


def text_only_note(files: ModelFiles, loaded: LoadedModel) -> list[str]:
    """A note that the engine serves text alone of a model that takes more; else none."""
    is_less = loaded.encoder is None and _has_encoder(files.config)
    return [f"text only: {loaded.why_text}"] if is_less else []


def encoder_bytes(loaded: LoadedModel, scheduler: SchedulerConfig) -> int:
    """Estimate of what outputs and a step's activations take."""
    if loaded.encoder is None:
        return 0
    row_bytes = loaded.model.spec.hidden_size * loaded.dtype.itemsize
    num_rows = scheduler.encoder_cache_size * (1 + loaded.encoder.family.num_added_layers)
    usual = min(num_rows, loaded.encoder.family.most_rows, _USUAL_ROWS)
    return row_bytes * (num_rows + _WIDTHS_A_ROW * usual)


def make_reader(options: EngineOptions, loaded: LoadedModel) -> MultiModalReader:
    """Make the reader that checks the multimodal inputs of requests."""
    family = None if loaded.encoder is None else loaded.encoder.family
    given = options.multimodal
    return MultiModalReader(
        family,
        max_items={} if family is None else _max_items(options, family),
        max_input_bytes=given.max_input_bytes,
        why_text=loaded.why_text,
    )


def _max_items(options: EngineOptions, family: InputFamily) -> dict[str, int]:
    if family.is_cross_attended:
        return dict.fromkeys(family.modalities, 1)
    return options.multimodal.max_items(family.modalities)


def multimodal_info(
    options: EngineOptions, files: ModelFiles, loaded: LoadedModel
) -> MultiModalInfo | None:
    """The handshake's facts on the multimodal inputs of prompts; None: prompts are text."""
    if loaded.encoder is None or "text" in loaded.encoder.family.modalities:
        return None
    processor: dict[str, Any] = {} if files.mmproj is None else files.mmproj.processor
    for name in ("processor_config.json", "preprocessor_config.json"):
        processor |= read_json_object_if_present(Path(files.path) / name)
    given = options.multimodal
    return MultiModalInfo(
        model_type=str(files.config["model_type"]),
        config_json=json.dumps(files.config).encode(),
        processor_json=json.dumps(processor).encode(),
        max_items=_max_items(options, loaded.encoder.family),
        max_input_bytes=given.max_input_bytes,
    )
