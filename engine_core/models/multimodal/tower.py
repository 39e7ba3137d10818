"""The encoder of a multimodal model by transformers' own modules, without its language model.
transformers takes seconds to import, so it is imported when a model is loaded."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_core.models.errors import ModelError, ModelWeightsError
from engine_core.models.multimodal.interface import InputFamily, Tensors
from engine_core.models.multimodal.sounds import Sounds

_TEXT_PARTS = ("language_model", "text_model")
_KEYS = {
    r"^thinker\.audio_tower\.proj(\d)": r"model.multi_modal_projector.linear_\1",
    r"^thinker\.": "model.",
}
"""Names of tensors of Qwen3-ASR as it is published, and those of transformers."""
_SOUND_PARTS = ("audio_tower", "embed_audio")


class TransformersEncoder:
    """Implements `MultiModalEncoder`.

    Args:
        model: of transformers, without language model and head.
        num_threads: that it computes with; others are as before behind each call.
    """

    def __init__(self, model: Any, family: InputFamily, *, num_threads: int) -> None:
        self.family = family
        self._model = model
        self._num_threads = num_threads

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(part.numel() * part.element_size() for part in self._model.parameters())

    @torch.inference_mode()
    def encode(self, tensors: Tensors) -> torch.Tensor:
        own = {}
        for name, array in tensors.items():
            tensor = torch.from_numpy(np.array(array))
            dtype = self._model.dtype if tensor.is_floating_point() else tensor.dtype
            own[name] = tensor.to(self._model.device, dtype)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        try:
            if isinstance(self.family, Sounds):
                return self.family.rows(self._model.model, own)
            output = self._model.model.get_image_features(**own, return_dict=True)
        finally:
            torch.set_num_threads(num_threads)
        features = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        return torch.cat([_rows(found) for found in features], dim=1)


def _rows(found: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    rows = found if isinstance(found, torch.Tensor) else torch.cat(list(found))
    return rows.reshape(-1, rows.shape[-1])


def load_encoder(
    path: Path,
    family: InputFamily,
    own: tuple[Mapping[str, Any], Callable[[], dict[str, torch.Tensor]]] | None = None,
    *,
    dtype: torch.dtype,
    num_threads: int,
    device: torch.device | None = None,
) -> TransformersEncoder:
    """Read what of a model the family's inputs go through, without its language model.

    Args:
        path: of its folder, or of the file that `own` is of.
        own: the model's config, and what reads weights by the names of transformers' module.
        device: that it runs on; None: this CPU.

    Raises:
        ModelWeightsError: tensors are missing or of a wrong shape.
        ModelError: transformers cannot load it for another reason.
    """
    from transformers import AutoConfig, AutoModelForMultimodalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        full_config = (
            AutoConfig.for_model(**own[0])
            if own is not None
            else AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        )
        if thinker := getattr(full_config, "thinker_config", None):
            audio = thinker["audio_config"] | {"model_type": "qwen3_asr_encoder"}
            full_config = type(full_config)(audio_config=audio)
        if hasattr(full_config, "quantization_config"):
            del full_config.quantization_config  # of the language model's weights
        own_class = AutoModelForMultimodalLM._model_mapping[type(full_config)]
        left_out = _TEXT_PARTS if "audio" in family.modalities else _TEXT_PARTS + _SOUND_PARTS
        model_class = _without(left_out, own_class)
        model, report = model_class.from_pretrained(
            path if own is None else None,
            config=full_config,
            state_dict=None if own is None else own[1](),
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            key_mapping=_KEYS,
        )
    except Exception as error:  # code of others: whatever it raises, the model is not loaded
        line = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(
            f"transformers cannot load the encoder of {path}: {line}; serve text alone with "
            "--language-model-only"
        ) from error
    wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if wrong:
        raise ModelWeightsError(
            f"{path}: {len(wrong)} tensors of the encoder are missing or of a wrong shape "
            f"({', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''}); use the complete model "
            "folder, or serve text alone with --language-model-only"
        )
    return TransformersEncoder(model.eval().to(device), family, num_threads=num_threads)


def _without(left_out: tuple[str, ...], model_class: Any) -> Any:
    """A class of the same name, as names of tensors are converted by it."""

    def make(self: Any, config: Any) -> None:
        model_class.__init__(self, config)
        for part in left_out:
            if hasattr(self.model, part):
                setattr(self.model, part, torch.nn.Identity())
        self.lm_head = torch.nn.Identity()

    changes = {
        "__init__": make,
        "__module__": model_class.__module__,
        "_tied_weights_keys": None,
        "tie_weights": lambda self, *args, **options: None,
    }
    return type(model_class.__name__, (model_class,), changes)
