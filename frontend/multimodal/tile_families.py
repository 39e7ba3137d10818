"""Families of models that take an image as tiles of one size. Of transformers' image processors
(those of Pillow) and processors, to the bit."""

import math

import numpy as np
from PIL import Image

from frontend.multimodal.image_family import ImageFamily, Tensors
from frontend.multimodal.pixels import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    LANCZOS,
    normalized,
    resized,
    sides,
)

_MAX_SIDE = 4096
"""Longest side of an image before it is split, for Idefics3 and SmolVLM."""


def cut(image: Image.Image, rows: int, columns: int) -> list[Image.Image]:
    """Tiles of equal size, row by row."""
    width, height = image.width // columns, image.height // rows
    return [
        image.crop((column * width, row * height, (column + 1) * width, (row + 1) * height))
        for row in range(rows)
        for column in range(columns)
    ]


class Idefics3(ImageFamily):
    """Idefics3 and SmolVLM: tiles of one size and the whole image in the size of one, each behind
    its row and column, [1, tiles, 3, side, side]; a small image is one tile."""

    defaults = {
        "size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364},
        "do_image_splitting": True, "resample": LANCZOS, "image_mean": HALF, "image_std": HALF,
    }  # fmt: skip
    _around, _whole = "<fake_token_around_image>", "<global-img>"

    def text(self, item: Image.Image) -> str:
        _, _, rows, columns = self._layout(*item.size)
        tokens = self.placeholder * self._tokens_per_tile()
        tiles = "".join(
            "".join(
                f"{self._around}<row_{row + 1}_col_{column + 1}>{tokens}"
                for column in range(columns)
            )
            + "\n"
            for row in range(rows)
        )
        between = "\n" if tiles else ""
        return f"{tiles}{between}{self._around}{self._whole}{tokens}{self._around}"

    def tensors(self, item: Image.Image) -> Tensors:
        side = self._side()
        first, (height, width), rows, columns = self._layout(*item.size)
        image = resized(resized(item, *first, self.settings), height, width, self.settings)
        tiles = cut(image, rows, columns) if rows else []
        tiles.append(resized(image, side, side, self.settings) if tiles else image)
        pixels = np.stack([normalized(tile, self.settings) for tile in tiles])[None]
        mask = np.ones((1, len(tiles), side, side), dtype=np.int64)
        return {"pixel_values": pixels, "pixel_attention_mask": mask}

    def _side(self) -> int:
        return sides(self.settings, "max_image_size", "longest_edge")[0]

    def _tokens_per_tile(self) -> int:
        vision = self.config.get("vision_config") or {}
        given = self.settings.get("image_seq_len")
        if not given and {"image_size", "patch_size"} <= vision.keys():
            patches = (vision["image_size"] // vision["patch_size"]) ** 2
            given = patches // self.config.get("scale_factor", 2) ** 2
        return int(given or 169)

    def _layout(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int], int, int]:
        """(height, width) of the first resizing and of the second one, rows and columns."""
        side = self._side()
        (longest,) = sides(self.settings, "size", "longest_edge")
        ratio = width / height
        if width >= height:
            width, height = longest, int(longest / ratio)
            height += height % 2
        else:
            height, width = longest, int(longest * ratio)
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > _MAX_SIDE:
            width, height = _MAX_SIDE, int(_MAX_SIDE / ratio)
        elif height > width and height > _MAX_SIDE:
            height, width = _MAX_SIDE, int(_MAX_SIDE * ratio)
        width, height = max(width, 1), max(height, 1)
        first = height, width
        if not self.settings["do_image_splitting"]:
            return first, (side, side), 0, 0
        ratio = width / height
        if width >= height:
            width = math.ceil(width / side) * side
            height = math.ceil(int(width / ratio) / side) * side
        else:
            height = math.ceil(height / side) * side
            width = math.ceil(int(height * ratio) / side) * side
        if height <= side and width <= side:
            return first, (height, width), 0, 0
        return first, (height, width), height // side, width // side


class InternVL(ImageFamily):
    """Tiles of one size in the arrangement whose ratio of sides is nearest to the image's, and the
    whole image in the size of one, [tiles, 3, side, side]; a small image is one tile."""

    defaults = {
        "size": {"height": 384, "width": 384}, "resample": BICUBIC, "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD, "min_patches": 1, "max_patches": 12,
    }  # fmt: skip
    _begin, _end = "<img>", "</img>"

    def text(self, item: Image.Image) -> str:
        rows, columns = self._layout(*item.size)
        tiles = rows * columns + (rows * columns > 1)
        number = self.settings.get("image_seq_length") or self.config.get("image_seq_length", 256)
        return f"{self._begin}{self.token * (number * tiles)}{self._end}"

    def tensors(self, item: Image.Image) -> Tensors:
        rows, columns = self._layout(*item.size)
        height, width = sides(self.settings, "size", "height", "width")
        image = resized(item, rows * height, columns * width, self.settings)
        tiles = cut(image, rows, columns)
        if len(tiles) > 1:
            tiles.append(resized(item, height, width, self.settings))
        return {"pixel_values": np.stack([normalized(tile, self.settings) for tile in tiles])}

    def _layout(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns: `get_optimal_tiled_canvas`."""
        least, most = self.settings["min_patches"], self.settings["max_patches"]
        if most <= 1:
            return 1, 1
        tile_height, tile_width = sides(self.settings, "size", "height", "width")
        best, best_difference = (1, 1), math.inf
        for tiles in range(least, most + 1):
            is_large = width * height > 0.5 * tile_height * tile_width * tiles
            for columns in (number for number in range(1, tiles + 1) if tiles % number == 0):
                rows = tiles // columns
                difference = abs(width / height - columns / rows)
                if difference < best_difference or (difference == best_difference and is_large):
                    best, best_difference = (rows, columns), difference
        return best
