"""Which encoder-decoder architectures run here, and how a folder becomes one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine_core.models.encoder_decoder.model import EncoderDecoderModel
from engine_core.models.encoder_decoder.parts import DecoderParts, bart_parts, t5_parts
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.interface import EncoderSpec
from engine_core.models.transformers.model import load_pretrained


@dataclass(frozen=True, slots=True)
class _Family:
    parts_of: Callable[[Any], DecoderParts]
    modality: str = "text"


_FAMILIES = {
    "BartForConditionalGeneration": _Family(bart_parts),
    "MBartForConditionalGeneration": _Family(bart_parts),
    "MarianMTModel": _Family(bart_parts),
    "PegasusForConditionalGeneration": _Family(bart_parts),
    "T5ForConditionalGeneration": _Family(t5_parts),
    "MT5ForConditionalGeneration": _Family(t5_parts),
    "WhisperForConditionalGeneration": _Family(bart_parts, "audio"),
}


def load_encoder_decoder(
    path: Path, config: Mapping[str, Any], *, dtype: torch.dtype
) -> EncoderDecoderModel:
    """Load a model folder through transformers.

    Raises:
        UnsupportedArchitecture: its decoder is not known here.
        ModelWeightsError, ModelError: see `load_pretrained`.
    """
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    names = config.get("architectures") or []
    family = next((_FAMILIES[name] for name in names if name in _FAMILIES), None)
    if family is None:
        raise UnsupportedArchitecture(
            f"{', '.join(names) or config.get('model_type')} is an encoder-decoder model that has "
            f"no code here; supported: {', '.join(sorted(_FAMILIES))}"
        )
    is_audio = family.modality == "audio"
    auto_class = AutoModelForSpeechSeq2Seq if is_audio else AutoModelForSeq2SeqLM
    model = load_pretrained(path, config, dtype, auto_class)
    with torch.inference_mode():
        parts = family.parts_of(model)
        encoder = model.get_encoder()
        return EncoderDecoderModel(encoder, parts, _encoder_spec(family, model.config, parts))


def _encoder_spec(family: _Family, config: Any, parts: DecoderParts) -> EncoderSpec:
    shapes: dict[str, tuple[int, ...]] = {"input_ids": (-1,)}
    max_tokens = parts.max_positions
    if family.modality == "audio":
        max_tokens = config.max_source_positions
        # the second of two convolutions halves the frames
        shapes = {"input_features": (config.num_mel_bins, 2 * max_tokens)}
    return EncoderSpec(
        modality=family.modality,
        shapes=shapes,
        max_tokens=max_tokens,
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
    )
