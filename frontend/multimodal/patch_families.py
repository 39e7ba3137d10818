"""Families of models that take an image of any size, as patches. Of transformers' image processors
(those of Pillow) and processors, to the bit."""

import math
from collections.abc import Callable

import numpy as np
from PIL import Image

from frontend.errors import InvalidInput
from frontend.multimodal.image_family import ImageFamily, Tensors
from frontend.multimodal.pixels import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    normalized,
    resized,
    sides,
)
from protocol.multimodal import MultiModalInfo

_MAX_RATIO = 200
"""Largest ratio of an image's sides, for Qwen's models."""


class QwenVL(ImageFamily):
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: patches of an image of any size, [patches, 3 * 2 * 14 * 14],
    and their grid; `merge_size`**2 of them are one token."""

    defaults = {
        "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "resample": BICUBIC,
        "image_mean": CLIP_MEAN, "image_std": CLIP_STD,
    }  # fmt: skip

    def text(self, item: Image.Image) -> str:
        rows, columns = self._grid(*item.size)
        return self.placeholder * int(rows * columns // self.settings["merge_size"] ** 2)

    def tensors(self, item: Image.Image) -> Tensors:
        patch, merge = self.settings["patch_size"], self.settings["merge_size"]
        repeats = self.settings["temporal_patch_size"]
        rows, columns = self._grid(*item.size)
        pixels = normalized(
            resized(item, rows * patch, columns * patch, self.settings), self.settings
        )
        blocks = pixels.reshape(3, rows // merge, merge, patch, columns // merge, merge, patch)
        blocks = blocks.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        frames = np.broadcast_to(blocks, (*blocks.shape[:5], repeats, patch, patch))
        return {
            "pixel_values": frames.reshape(rows * columns, -1),
            "image_grid_thw": np.array([[1, rows, columns]], dtype=np.int64),
        }

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Patches down and across: `smart_resize`."""
        patch = self.settings["patch_size"]
        factor = patch * self.settings["merge_size"]
        least, most = self._pixels()
        if max(height, width) / min(height, width) > _MAX_RATIO:
            raise InvalidInput(
                f"an image has {width}x{height} pixels, one side of this model's images may be "
                f"{_MAX_RATIO} times the other; cut it"
            )
        new_height, new_width = (round(side / factor) * factor for side in (height, width))
        if new_height * new_width > most:
            ratio = math.sqrt((height * width) / most)
            new_height, new_width = (
                max(factor, math.floor(side / ratio / factor) * factor) for side in (height, width)
            )
        elif new_height * new_width < least:
            ratio = math.sqrt(least / (height * width))
            new_height, new_width = (
                math.ceil(side * ratio / factor) * factor for side in (height, width)
            )
        return new_height // patch, new_width // patch

    def _pixels(self) -> tuple[int, int]:
        size = self.settings.get("size") or {}
        least = self.settings.get("min_pixels") or size.get("shortest_edge") or 56 * 56
        most = self.settings.get("max_pixels") or size.get("longest_edge") or 28 * 28 * 1280
        return least, most


class Pixtral(ImageFamily):
    """Mistral 3's: an image of any size within a square; behind each row of tokens is a break, and
    behind the last one an end. `_merge`: patches of a token's side, if the config does not say."""

    _merge = 2

    defaults = {
        "size": {"longest_edge": 1024}, "resample": BICUBIC, "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD, "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]",
    }  # fmt: skip
    must_be = {**ImageFamily.must_be, "do_center_crop": False}

    def text(self, item: Image.Image) -> str:
        height, width = self._size(*item.size)
        line = self.placeholder * (width // self._step)
        lines = [line] * (height // self._step) if line else []
        between: str = self.settings["image_break_token"]
        return between.join(lines) + self.settings["image_end_token"] if lines else ""

    def tensors(self, item: Image.Image) -> Tensors:
        height, width = self._size(*item.size)
        pixels = normalized(resized(item, height, width, self.settings), self.settings)
        sizes = np.array([[height, width]], dtype=np.int64)
        return {"pixel_values": pixels[None], "image_sizes": sizes}

    @property
    def _step(self) -> int:
        """Pixels of a token's side."""
        patch: int = (self.config.get("vision_config") or {}).get("patch_size", 16)
        return patch * int(self.config.get("spatial_merge_size", self._merge))

    def _size(self, width: int, height: int) -> tuple[int, int]:
        (longest,) = sides(self.settings, "size", "longest_edge")
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = ((side - 1) // self._step + 1 for side in (height, width))
        return rows * self._step, columns * self._step


class LlavaPixtral(Pixtral):
    """LLaVA with Pixtral's tower (Pixtral 12B): each patch is a token."""

    _merge = 1


class Gemma4(ImageFamily):
    """Patches of an image of any size, [1, patches, 16 * 16 * 3], and the column and row of each;
    `pooling_kernel_size`**2 of them are one token. Padding is behind them, up to those of
    `max_soft_tokens` tokens."""

    defaults = {
        "patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": 280, "resample": BICUBIC,
        "do_normalize": False, "image_mean": 0.0, "image_std": 1.0,
    }  # fmt: skip

    def __init__(self, info: MultiModalInfo, token_of: Callable[[int], str | None]) -> None:
        super().__init__(info, token_of)
        _, self._begin = self._special("begin")
        _, self._end = self._special("end")

    def text(self, item: Image.Image) -> str:
        rows, columns = self._grid(*item.size)
        return f"{self._begin}{self.token * (rows * columns)}{self._end}"

    def tensors(self, item: Image.Image) -> Tensors:
        rows, columns = (side * self._patches for side in self._grid(*item.size))
        side, number = self._side // self._patches, rows * columns
        image = resized(item, rows * side, columns * side, self.settings)
        blocks = normalized(image, self.settings).reshape(3, rows, side, columns, side)
        most = self.settings["max_soft_tokens"] * self._patches**2
        patches = np.zeros((1, most, 3 * side**2), np.float32)
        patches[0, :number] = blocks.transpose(1, 3, 2, 4, 0).reshape(number, -1)
        places = np.full((1, most, 2), -1)
        places[0, :number] = np.stack(np.divmod(np.arange(number), columns)[::-1], axis=1)
        return {"pixel_values": patches, "image_position_ids": places}

    @property
    def _patches(self) -> int:
        """Patches of a token's side."""
        number: int = self.settings["pooling_kernel_size"]
        return number

    @property
    def _side(self) -> int:
        """Pixels of a token's side."""
        side: int = self.settings["patch_size"] * self.settings["pooling_kernel_size"]
        return side

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Tokens down and across: `get_aspect_ratio_preserving_size`."""
        most, side = self.settings["max_soft_tokens"], self._side
        factor = math.sqrt(most * side**2 / (height * width))
        rows, columns = (math.floor(factor * length / side) for length in (height, width))
        if not rows:
            rows, columns = 1, min(width // height, most)
        elif not columns:
            rows, columns = min(height // width, most), 1
        return rows, columns


class Gemma4Unified(Gemma4):
    """Gemma 4 12B: the pixels of a token are one patch."""

    _patches = 1
