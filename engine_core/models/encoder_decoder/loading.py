"""Which encoder-decoder architectures run here, and how a folder becomes one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine_core.models.encoder_decoder.inputs import EncoderInputs
from engine_core.models.encoder_decoder.model import EncoderDecoderModel
from engine_core.models.encoder_decoder.parts import DecoderParts, bart_parts, t5_parts
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.transformers.model import load_pretrained


@dataclass(frozen=True, slots=True)
class _Family:
    parts_of: Callable[[Any], DecoderParts]
    modality: str = "text"


_FAMILIES = {
    "BartForConditionalGeneration": _Family(bart_parts),
    "BartModel": _Family(bart_parts),  # as bart-base is published; its head is its embeddings
    "MBartForConditionalGeneration": _Family(bart_parts),
    "MarianMTModel": _Family(bart_parts),
    "PegasusForConditionalGeneration": _Family(bart_parts),
    "T5ForConditionalGeneration": _Family(t5_parts),
    "T5WithLMHeadModel": _Family(t5_parts),  # of the first files
    "MT5ForConditionalGeneration": _Family(t5_parts),
    "WhisperForConditionalGeneration": _Family(bart_parts, "audio"),
}


def load_encoder_decoder(
    path: Path, config: Mapping[str, Any], *, dtype: torch.dtype, max_model_len: int | None = None
) -> EncoderDecoderModel:
    """Load a model folder through transformers. `max_model_len`: if given, and no table of
    positions ends there, it is the longest input of the encoder, too, if that is longer.

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
    if family.parts_of is t5_parts:  # positions are relative, the file's number is no limit
        parts = replace(parts, max_positions=max(parts.max_positions, max_model_len or 0))
    own = model.config
    inputs = EncoderInputs(
        family.modality,
        most_rows=own.max_source_positions if is_audio else parts.max_positions,
        vocab_size=own.vocab_size,
        num_mel_bins=own.num_mel_bins if is_audio else None,
    )
    return EncoderDecoderModel(model.get_encoder(), parts, inputs, vocab_size=own.vocab_size)
