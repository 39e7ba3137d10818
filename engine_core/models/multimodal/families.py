"""Which tensors each family's encoder takes, and how many rows it makes of them. What does not fit
is refused before anything runs; the prompt's places must be as many as the rows."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from engine_core.models.config_fields import ConfigFields
from engine_core.models.errors import UnsupportedArchitecture
from engine_core.models.multimodal.interface import InputFamily, Tensors
from engine_core.models.multimodal.sounds import Qwen2AudioSounds, Qwen3ASRSounds, VoxtralSounds
from engine_core.models.multimodal.tensor_checks import FLOATS, INTS, check_tensors, wrong_shape

_QWEN_MOST_PIXELS = 12_845_056
_INTERN_MOST_TILES = 13
"""The most tiles of an image of InternVL, as published processors make them."""
_GEMMA4_MOST_ROWS = 1120
"""The most rows of an image of Gemma 4, whatever its processor is set to."""


class _Images:
    """Square images of one size: pixel_values [images, 3, side, side]."""

    modalities: tuple[str, ...] = ("image",)
    is_bidirectional = False
    is_causal_without_window = False
    has_axes = False
    is_cross_attended = False
    num_added_layers = 0
    _takes: Mapping[str, tuple[str, ...]] = {"pixel_values": FLOATS}

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._fields = ConfigFields(config)
        self._vision = ConfigFields(self._fields.mapping("vision_config") or {})
        self._side = self._square("image_size", self._default_side)
        self._patches = (self._side // self._square("patch_size", self._patch)) ** 2
        self.most_rows = self._rows_of_one()

    _default_side, _patch = 224, 16

    def num_rows(self, modality: str, tensors: Tensors) -> int:
        self._check_names(modality, tensors)
        shape = tensors["pixel_values"].shape
        if len(shape) != 4 or not shape[0] or shape[1:] != (3, self._side, self._side):
            wanted = f"[images, 3, {self._side}, {self._side}]"
            raise ValueError(wrong_shape("pixel_values", shape, wanted))
        return int(shape[0]) * self._rows_of_one()

    def grid(self, tensors: Tensors) -> tuple[int, int]:
        raise NotImplementedError

    def _square(self, name: str, default: int) -> int:
        """A side of the vision config, which may be spelled out twice."""
        given = self._vision.get(name)
        if isinstance(given, list) and len(given) == 2 and given[0] == given[1]:
            return ConfigFields({name: given[0]}).positive_int(name)
        return self._vision.positive_int(name, default)

    def _rows_of_one(self) -> int:
        return self._patches

    def _check_names(self, modality: str, tensors: Tensors) -> None:
        check_tensors(modality, tensors, self.modalities, self._takes)


class Gemma3Images(_Images):
    """Images with an equal number of rows each; the rows of a run see each other."""

    is_bidirectional = True
    _patch = 14

    def _rows_of_one(self) -> int:
        return self._fields.positive_int("mm_tokens_per_image", 256)


class LlavaImages(_Images):
    """A row a patch, and one for the class token if all are taken."""

    _default_side, _patch = 336, 14

    def _rows_of_one(self) -> int:
        strategy = self._fields.text("vision_feature_select_strategy", "default")
        vision = self._vision.text("model_type", "clip_vision_model")
        if not vision.startswith(("clip", "siglip")):
            raise UnsupportedArchitecture(f"LLaVA's images by a {vision!r} are not supported")
        has_class = vision.startswith("clip")
        return self._patches + has_class - (strategy == "default")


class Idefics3Images(_Images):
    """Tiles of one size and a mask of real pixels; `scale_factor`^2 patches make a row."""

    _takes = {"pixel_values": FLOATS, "pixel_attention_mask": ("uint8", *INTS)}
    _default_side, _patch = 224, 32

    def num_rows(self, modality: str, tensors: Tensors) -> int:
        self._check_names(modality, tensors)
        shape = tensors["pixel_values"].shape
        if len(shape) != 5 or shape[0] != 1 or not shape[1] or shape[2] != 3:
            raise ValueError(wrong_shape("pixel_values", shape, "[1, tiles, 3, side, side]"))
        if shape[3:] != (self._side, self._side):
            raise ValueError(
                wrong_shape("pixel_values", shape, f"tiles of {self._side} x {self._side}")
            )
        mask = tensors["pixel_attention_mask"]
        if mask.shape != (1, shape[1], *shape[3:]):
            raise ValueError(wrong_shape("pixel_attention_mask", mask.shape, "that of the pixels"))
        pixels = tensors["pixel_values"][0].reshape(shape[1], -1)
        if not mask.any() or not pixels.any(axis=1).all():
            raise ValueError("a tile of pixel_values is all zeros; leave such padding out")
        return int(shape[1]) * self._rows_of_one()

    def _rows_of_one(self) -> int:
        return self._patches // self._fields.positive_int("scale_factor", 2) ** 2


class InternVLImages(_Images):
    """Tiles of one size; 1 / `downsample_ratio`^2 patches make a row."""

    _default_side, _patch = 448, 14

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        strategy = self._fields.text("vision_feature_select_strategy", "default")
        if strategy != "default":
            raise UnsupportedArchitecture(
                f"vision_feature_select_strategy {strategy!r} of InternVL is not supported"
            )
        self.most_rows *= _INTERN_MOST_TILES

    def _rows_of_one(self) -> int:
        return int(self._patches**0.5 * self._fields.positive_float("downsample_ratio", 0.5)) ** 2


class PixtralImages(_Images):
    """An image of any size up to a square; `spatial_merge_size`^2 patches make a row."""

    _takes = {"pixel_values": FLOATS, "image_sizes": INTS}
    _default_side, _patch, _merge = 1024, 16, 2

    def num_rows(self, modality: str, tensors: Tensors) -> int:
        self._check_names(modality, tensors)
        sizes, shape = tensors["image_sizes"], tensors["pixel_values"].shape
        if sizes.shape != (1, 2):
            raise ValueError(wrong_shape("image_sizes", sizes.shape, "[1, 2]"))
        height, width = (int(number) for number in sizes[0])
        step = self._step
        is_right = all(step <= side <= self._side and side % step == 0 for side in (height, width))
        if not is_right:
            raise ValueError(
                f"image_sizes is {[height, width]}, it must be two multiples of {step} up to "
                f"{self._side}; send what the model's own processor makes"
            )
        if shape != (1, 3, height, width):
            raise ValueError(wrong_shape("pixel_values", shape, f"[1, 3, {height}, {width}]"))
        return height * width // step**2

    @property
    def _step(self) -> int:
        """Pixels of a row's side."""
        patch = self._vision.positive_int("patch_size", self._patch)
        return patch * self._fields.positive_int("spatial_merge_size", self._merge)

    def _rows_of_one(self) -> int:
        return (self._side // self._step) ** 2


class LlavaPixtralImages(PixtralImages):
    """Images of LLaVA with Pixtral's tower (Pixtral 12B): each patch makes a row."""

    _merge = 1

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        strategy = self._fields.text("vision_feature_select_strategy", "default")
        if strategy != "full":
            raise UnsupportedArchitecture(
                f"vision_feature_select_strategy {strategy!r} of a 'pixtral' is not supported, as "
                "it has no class token; it must be full"
            )


class Gemma4Images(_Images):
    """Patches of an image of any size, and the column and row of each; -1 is padding behind them.
    `pooling_kernel_size`^2 make a row. The rows of a run see each other, if the text says so."""

    is_causal_without_window = True
    _takes = {"pixel_values": FLOATS, "image_position_ids": INTS}
    _looks_ahead: str | None = None
    """`use_bidirectional_attention` of a text that does not have it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        if config.get("vision_config") is None:
            raise UnsupportedArchitecture("the model has no vision_config")
        text = self._fields.mapping("text_config") or {}
        looks_ahead = text.get("use_bidirectional_attention", self._looks_ahead)
        self.is_bidirectional = looks_ahead == "vision"
        self._pool = self._vision.positive_int("pooling_kernel_size", 3)
        self._patch = self._vision.positive_int("patch_size", 16)
        self._most_positions = self._vision.positive_int("position_embedding_size", 10_240)

    def num_rows(self, modality: str, tensors: Tensors) -> int:
        self._check_names(modality, tensors)
        places, shape = tensors["image_position_ids"], tensors["pixel_values"].shape
        values, most = 3 * self._patch**2, _GEMMA4_MOST_ROWS * self._pool**2
        number = shape[1] if len(shape) == 3 else 0
        if shape != (1, number, values) or not 0 < number <= most or number % self._pool**2:
            wanted = f"[1, patches, {values}] with a multiple of {self._pool**2} up to {most}"
            raise ValueError(wrong_shape("pixel_values", shape, wanted))
        if places.shape != (1, number, 2):
            raise ValueError(wrong_shape("image_position_ids", places.shape, f"[1, {number}, 2]"))
        columns, rows = (int(last) + 1 for last in places[0].max(axis=0))
        is_right = 0 < columns * rows <= number and columns % self._pool == rows % self._pool == 0
        if is_right and max(columns, rows) <= self._most_positions:
            row, column = np.divmod(np.arange(columns * rows), columns)
            grid = np.full((number, 2), -1)
            grid[: columns * rows] = np.stack((column, row), axis=1)
            if (places[0] == grid).all():
                return columns * rows // self._pool**2
        raise ValueError(
            f"image_position_ids end at {[columns - 1, rows - 1]}, they must be the column and row "
            f"of each patch, row by row, both numbers of which are multiples of {self._pool} up to "
            f"{self._most_positions}, and -1 behind; send what the model's own processor makes"
        )

    def _rows_of_one(self) -> int:
        return self._fields.positive_int("vision_soft_tokens_per_image", 280)


class Gemma4UnifiedImages(Gemma4Images):
    """Images of Gemma 4 12B: patches that are merged already, each of which makes a row."""

    _looks_ahead = "vision"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._patch, self._pool = self._patch * self._pool, 1
        self._most_positions = self._vision.positive_int("mm_posemb_size", 1120)


class QwenImages(_Images):
    """Patches of an image of any size, and their grid; `spatial_merge_size`^2 make a row."""

    has_axes = True
    _takes = {"pixel_values": FLOATS, "image_grid_thw": INTS}
    _default_side, _patch = 224, 14

    def num_rows(self, modality: str, tensors: Tensors) -> int:
        self._check_names(modality, tensors)
        grid, shape = tensors["image_grid_thw"], tensors["pixel_values"].shape
        merge = self._merge
        if grid.shape != (1, 3):
            raise ValueError(wrong_shape("image_grid_thw", grid.shape, "[1, 3]"))
        time, height, width = (int(number) for number in grid[0])
        if time != 1 or min(height, width) < merge or height % merge or width % merge:
            raise ValueError(
                f"image_grid_thw is {[time, height, width]}, it must be 1 and two multiples of "
                f"{merge}"
            )
        patch = self._vision.positive_int("patch_size", self._patch)
        channels = self._vision.get("in_channels") or self._vision.get("in_chans") or 3
        values = channels * self._vision.positive_int("temporal_patch_size", 2) * patch**2
        if shape != (height * width, values):
            raise ValueError(wrong_shape("pixel_values", shape, f"[{height * width}, {values}]"))
        return height * width // merge**2

    def grid(self, tensors: Tensors) -> tuple[int, int]:
        _, height, width = (int(number) for number in tensors["image_grid_thw"][0])
        return height // self._merge, width // self._merge

    @property
    def _merge(self) -> int:
        return self._vision.positive_int("spatial_merge_size", 2)

    def _rows_of_one(self) -> int:
        """Rows of an image with the most pixels that published processors allow."""
        return _QWEN_MOST_PIXELS // (14 * self._merge) ** 2


class Qwen35Images(QwenImages):
    """Images of Qwen 3.5 and 3.6: those of Qwen2-VL, in larger patches."""

    _patch = 16

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        text = ConfigFields(self._fields.mapping("text_config") or {})
        rotary = text.mapping("rope_scaling") or text.mapping("rope_parameters") or {}
        kind = rotary.get("rope_type") or rotary.get("type") or "default"
        has_axes = rotary.get("mrope_section") and rotary.get("mrope_interleaved")
        if not has_axes or kind not in ("default", "mrope"):
            raise UnsupportedArchitecture(
                f"text_config's rope_scaling {rotary!r:.200} is not of rope_type default with "
                "mrope_section and mrope_interleaved, by which images have their positions"
            )


class Qwen3Images(Qwen35Images):
    """Images of Qwen3-VL, some of whose rows are added to the output of the first layers."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        taken = self._vision.get("deepstack_visual_indexes")
        taken = (8, 16, 24) if taken is None else taken
        depth = self._vision.positive_int("depth", 27)
        self.num_added_layers = sum(index < depth for index in taken)
        text = ConfigFields(self._fields.mapping("text_config") or {})
        num_layers = text.positive_int("num_hidden_layers", 32)
        if self.num_added_layers >= num_layers:
            raise UnsupportedArchitecture(
                f"deepstack_visual_indexes adds to {self.num_added_layers} layers of the text, it "
                f"must be fewer than its {num_layers}"
            )


def _llava(config: Mapping[str, Any]) -> _Images:
    vision = config.get("vision_config")
    is_pixtral = isinstance(vision, Mapping) and vision.get("model_type") == "pixtral"
    return LlavaPixtralImages(config) if is_pixtral else LlavaImages(config)


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], InputFamily]] = {
    "gemma3": Gemma3Images,
    "gemma4": Gemma4Images,
    "gemma4_unified": Gemma4UnifiedImages,
    "internvl": InternVLImages,
    "qwen2_vl": QwenImages,
    "qwen2_5_vl": QwenImages,
    "qwen3_vl": Qwen3Images,
    "qwen3_vl_moe": Qwen3Images,
    "qwen3_5": Qwen35Images,
    "qwen3_5_moe": Qwen35Images,
    "idefics3": Idefics3Images,
    "smolvlm": Idefics3Images,
    "llava": _llava,
    "mistral3": PixtralImages,
    "voxtral": VoxtralSounds,
    "qwen2_audio": Qwen2AudioSounds,
    "qwen3_asr": Qwen3ASRSounds,
}

MODEL_TYPES = tuple(_FAMILIES)


def input_family(config: Mapping[str, Any]) -> InputFamily | None:
    """The family of inputs that a config.json names; None: its prompts are text."""
    family = _FAMILIES.get(str(config.get("model_type")))
    return None if family is None else family(config)
