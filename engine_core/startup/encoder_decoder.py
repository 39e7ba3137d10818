"""What is other for an encoder-decoder model: options without effect, its cache, and what its
clients are told."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from engine_core.kv_cache import KVCacheGroupSpec
from engine_core.models.encoder_decoder.model import EncoderDecoderModel
from engine_core.models.interface import Model
from engine_core.options.engine import EngineOptions
from engine_core.options.refusals import refuse
from engine_core.startup.model import LoadedModel
from protocol.outputs import EncoderInfo
from protocol.sampling import GenerationRules


def with_own_encoder(
    options: EngineOptions, loaded: LoadedModel, model: EncoderDecoderModel
) -> LoadedModel:
    """Raises ConfigurationError: an option that has no effect, or that it cannot have."""
    refuse(options, "encoder-decoder", loaded.architecture)
    return dataclasses.replace(loaded, encoder=model)


def encoder_groups(model: Model) -> list[KVCacheGroupSpec]:
    """The group of what an encoder made of a request's input; none of a decoder alone."""
    return [KVCacheGroupSpec(is_encoders=True)] if isinstance(model, EncoderDecoderModel) else []


def encoder_blocks(model: Model, block_size: int) -> int:
    """Most blocks that a request takes for its encoder's output."""
    if not isinstance(model, EncoderDecoderModel):
        return 0
    return -(-model.max_encoder_tokens // block_size)


def encoder_info(
    model: Model, config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> EncoderInfo | None:
    """What clients are told; None: it is a decoder alone. As transformers' `generate` has it, the
    generation config counts before the model's."""
    if not isinstance(model, EncoderDecoderModel):
        return None
    settings = {**config, **{k: v for k, v in generation_config.items() if v is not None}}
    start = settings.get("decoder_start_token_id")
    if start is None:
        start = settings.get("bos_token_id")
    rules = GenerationRules(
        suppressed=(*_ids(settings.get("suppress_tokens")), *_bad_words(settings)),
        suppressed_first=tuple(_ids(settings.get("begin_suppress_tokens"))),
        forced_first=next(iter(_ids(settings.get("forced_bos_token_id"))), None),
        forced_last=next(iter(_ids(settings.get("forced_eos_token_id"))), None),
    )
    return EncoderInfo(
        modality=model.family.modalities[0],
        max_tokens=model.max_encoder_tokens,
        decoder_start_token_ids=tuple(_ids(start)),
        rules=None if rules == GenerationRules() else rules,
    )


def _bad_words(settings: Mapping[str, Any]) -> list[int]:
    """Those of one token, such as Marian's padding, whose embedding of zeros wins otherwise."""
    words = [ids for ids in settings.get("bad_words_ids") or [] if len(ids) == 1]
    return [ids[0] for ids in words if ids[0] not in _ids(settings.get("eos_token_id"))]


def _ids(value: Any) -> list[int]:
    found = value if isinstance(value, list) else [value]
    return [each for each in found if type(each) is int and each >= 0]
