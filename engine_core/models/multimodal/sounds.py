"""Sounds of a prompt: which tensors each family's encoder takes, how many rows it makes of them,
and in which parts it computes them, so that an hour takes no more memory than half a minute."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.multimodal.interface import Tensors
from engine_core.models.multimodal.tensor_checks import FLOATS, INTS, check_tensors, wrong_shape

_MOST_SECONDS = 3600
"""The longest sound that clients take."""
_FRAMES_A_SECOND, _ROWS_A_SECOND = 100, 13
"""Rows: of Qwen3-ASR."""


class Sounds:
    """Log-mel features, [1, mel bins, frames]. Implements `InputFamily`."""

    modalities: tuple[str, ...] = ("audio",)
    is_bidirectional = False
    is_causal_without_window = False
    has_axes = False
    is_cross_attended = False
    num_added_layers = 0
    _takes: Mapping[str, tuple[str, ...]] = {"input_features": FLOATS}

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._audio = ConfigFields(ConfigFields(config).mapping("audio_config") or {})
        self._num_bins = self._audio.positive_int("num_mel_bins", 128)
        self._num_frames = 2 * self._audio.positive_int("max_source_positions", 1500)
        self.most_rows = self._most_rows()

    def num_rows(self, modality: str, tensors: Tensors) -> int:
        check_tensors(modality, tensors, self.modalities, self._takes)
        return self._rows_of(tensors)

    def grid(self, tensors: Tensors) -> tuple[int, int]:
        raise NotImplementedError

    def rows(self, model: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Rows [N, E] by transformers' module, with its tensors in the model's dtype."""
        parts = [
            model.get_audio_features(**part, return_dict=True).pooler_output.flatten(0, -2)
            for part in self._parts(tensors)
        ]
        return torch.cat(parts)

    def _most_rows(self) -> int:
        raise NotImplementedError

    def _rows_of(self, tensors: Tensors) -> int:
        raise NotImplementedError

    def _parts(self, tensors: Mapping[str, torch.Tensor]) -> Iterable[Mapping[str, torch.Tensor]]:
        """An input in parts that are computed one by one, as nothing passes between them."""
        return [tensors]

    def _check_masked(self, tensors: Tensors, mask: str, num_frames: int | None) -> int:
        """The number of frames that a mask leaves of [1, bins, frames]."""
        features, flags = tensors["input_features"], tensors[mask]
        wanted = features.shape[2] if num_frames is None and features.ndim == 3 else num_frames
        if features.shape != (1, self._num_bins, wanted):
            frames = num_frames or "frames"
            wanted_shape = f"[1, {self._num_bins}, {frames}]"
            raise ValueError(wrong_shape("input_features", features.shape, wanted_shape))
        if flags.shape != (1, wanted):
            raise ValueError(wrong_shape(mask, flags.shape, f"[1, {wanted}]"))
        number = int(flags.sum())
        if not number or not flags[0, :number].all() or flags.max() > 1:
            raise ValueError(f"{mask} must be ones and zeros behind them, with at least one 1")
        return number


class VoxtralSounds(Sounds):
    """Windows of 30 s, [windows, mel bins, frames]; four of a window's positions make a row."""

    def _rows_of(self, tensors: Tensors) -> int:
        shape = tensors["input_features"].shape
        if len(shape) != 3 or not shape[0] or shape[1:] != (self._num_bins, self._num_frames):
            wanted = f"[windows, {self._num_bins}, {self._num_frames}]"
            raise ValueError(wrong_shape("input_features", shape, wanted))
        return int(shape[0]) * self._rows_of_window()

    def _parts(self, tensors: Mapping[str, torch.Tensor]) -> Iterable[Mapping[str, torch.Tensor]]:
        return [{"input_features": part} for part in torch.split(tensors["input_features"], 1)]

    def _rows_of_window(self) -> int:
        width = self._audio.positive_int("hidden_size", 1280)
        joined = self._audio.positive_int("intermediate_size", 5120)
        return self._num_frames // 2 * width // joined

    def _most_rows(self) -> int:
        return _MOST_SECONDS * _FRAMES_A_SECOND // self._num_frames * self._rows_of_window()


class Qwen2AudioSounds(Sounds):
    """One window of 30 s and a mask of its frames; four frames that are no silence make a row."""

    _takes = {"input_features": FLOATS, "feature_attention_mask": INTS}

    def rows(self, model: Any, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """As in `Qwen2AudioModel.forward`, which has no function of its own for it."""
        num_heard = int(tensors["feature_attention_mask"].sum() - 1) // 2 + 1
        device = tensors["input_features"].device
        is_heard = torch.arange(self._num_frames // 2, device=device) < num_heard
        found = model.audio_tower(
            tensors["input_features"], attention_mask=is_heard[None, None, None]
        )
        rows: torch.Tensor = model.multi_modal_projector(found.last_hidden_state[0])
        return rows[: num_heard // 2]

    def _rows_of(self, tensors: Tensors) -> int:
        number = self._check_masked(tensors, "feature_attention_mask", self._num_frames)
        if not (num_rows := ((number - 1) // 2 + 1) // 2):
            raise ValueError(f"a sound of {number} frames makes no row; send a longer one")
        return num_rows

    def _most_rows(self) -> int:
        return self._num_frames // 4


class Qwen3ASRSounds(Sounds):
    """Frames up to a whole second, and a mask of them; eight frames of a second make a row."""

    _takes = {"input_features": FLOATS, "input_features_mask": INTS}

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config.get("thinker_config") or config)  # published, or of transformers
        if (n_window := self._audio.positive_int("n_window", 50)) != _FRAMES_A_SECOND // 2:
            raise UnsupportedArchitecture(
                f"audio_config's n_window is {n_window}, sounds are served with "
                f"{_FRAMES_A_SECOND // 2}"
            )

    def _rows_of(self, tensors: Tensors) -> int:
        number = self._check_masked(tensors, "input_features_mask", None)
        num_frames = tensors["input_features"].shape[2]
        whole, rest = divmod(number, _FRAMES_A_SECOND)
        if num_frames != (whole + bool(rest)) * _FRAMES_A_SECOND:
            raise ValueError(
                f"input_features has {num_frames} frames for {number}, it must be the next "
                f"multiple of {_FRAMES_A_SECOND}; send what the model's own processor makes"
            )
        return whole * _ROWS_A_SECOND + -(-rest // 8)

    def _parts(self, tensors: Mapping[str, torch.Tensor]) -> Iterable[Mapping[str, torch.Tensor]]:
        """Those that attention sees at once."""
        size = self._audio.positive_int("n_window_infer", 800)
        features, mask = tensors["input_features"], tensors["input_features_mask"]
        parts = zip(torch.split(features, size, 2), torch.split(mask, size, 1), strict=True)
        return [{"input_features": own, "input_features_mask": flags} for own, flags in parts]

    def _most_rows(self) -> int:
        return _MOST_SECONDS * _ROWS_A_SECOND
