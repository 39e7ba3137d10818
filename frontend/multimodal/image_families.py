"""How each family of models takes an image: the tensors of its encoder, and the text that stands
for it. Of transformers' image processors (those of Pillow) and processors, to the bit."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from frontend.errors import InvalidInput
from frontend.multimodal.pixels import (
    BICUBIC,
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    LANCZOS,
    Settings,
    center_cropped,
    check_scaled,
    normalized,
    resized,
    sides,
)
from protocol.multimodal import MultiModalInfo

Tensors = dict[str, npt.NDArray[Any]]

_MAX_RATIO = 200
"""Largest ratio of an image's sides, for Qwen's models."""
_MAX_SIDE = 4096
"""Longest side of an image before it is split, for Idefics3 and SmolVLM."""
_NAMES_OF_IDS = {
    "image": ("image_token_id", "image_token_index"),
    "begin": ("boi_token_id", "boi_token_index"),
    "end": ("eoi_token_id", "eoi_token_index"),
}


class _Family:
    """
    Args:
        info: of the model.
        token_of: the text of a token's id.
    """

    part_type = "image"
    defaults: Mapping[str, Any] = {}
    must_be: Mapping[str, bool | None] = {
        "do_resize": True, "do_pan_and_scan": False, "pad_size": None,
    }  # fmt: skip
    """Settings that are done in one way alone."""

    def __init__(self, info: MultiModalInfo, token_of: Callable[[int], str | None]) -> None:
        self.config: Mapping[str, Any] = json.loads(info.config_json)
        processor = json.loads(info.processor_json)
        given = {**processor, **(processor.get("image_processor") or {})}
        given = {name: value for name, value in given.items() if value is not None}
        flags = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True)
        self.settings: Settings = {
            **flags, "rescale_factor": 1 / 255, **self._defaults(given), **given
        }  # fmt: skip
        self._token_of = token_of
        self.token_id, self.token = self._special("image")
        self.placeholder = self.token
        self._check()

    def _defaults(self, given: Settings) -> Settings:
        return self.defaults

    def _check(self) -> None:
        for name, needed in self.must_be.items():
            if self.settings.get(name, needed) != needed:
                raise InvalidInput(
                    f"the model's image processor has {name} {self.settings[name]!r}, which this "
                    f"engine does not do; set it to {json.dumps(needed)} in its configuration"
                )

    def _special(self, kind: str) -> tuple[int, str]:
        names = _NAMES_OF_IDS[kind]
        token_id = next((self.config[name] for name in names if name in self.config), None)
        text = self._token_of(token_id) if isinstance(token_id, int) else None
        if not isinstance(token_id, int) or not text:
            raise InvalidInput(
                f"the model's config.json has {names[0]} {token_id!r}, which is no token of its "
                "tokenizer; serve a complete model"
            )
        return token_id, text


class _QwenVL(_Family):
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


class _Pixtral(_Family):
    """Mistral 3's: an image of any size within a square; behind each row of tokens is a break, and
    behind the last one an end."""

    defaults = {
        "size": {"longest_edge": 1024}, "resample": BICUBIC, "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD, "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]",
    }  # fmt: skip
    must_be = {**_Family.must_be, "do_center_crop": False}

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
        return patch * int(self.config.get("spatial_merge_size", 2))

    def _size(self, width: int, height: int) -> tuple[int, int]:
        (longest,) = sides(self.settings, "size", "longest_edge")
        ratio = max(height / longest, width / longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        rows, columns = ((side - 1) // self._step + 1 for side in (height, width))
        return rows * self._step, columns * self._step


class _Gemma3(_Family):
    """A square of one size, between two markers."""

    defaults = {
        "size": {"height": 224, "width": 224}, "resample": BILINEAR, "image_mean": HALF,
        "image_std": HALF,
    }  # fmt: skip

    def __init__(self, info: MultiModalInfo, token_of: Callable[[int], str | None]) -> None:
        super().__init__(info, token_of)
        _, self.placeholder = self._special("begin")
        _, self._end = self._special("end")

    def text(self, item: Image.Image) -> str:
        own = self.config.get("mm_tokens_per_image") or 256
        number = self.settings.get("image_seq_length") or own
        return f"\n\n{self.placeholder}{self.token * number}{self._end}\n\n"

    def tensors(self, item: Image.Image) -> Tensors:
        height, width = sides(self.settings, "size", "height", "width")
        square = resized(item, height, width, self.settings)
        return {"pixel_values": normalized(square, self.settings)[None]}


class _Idefics3(_Family):
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
        tiles = [
            image.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
            for row in range(rows)
            for column in range(columns)
        ]
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


class _Llava(_Family):
    """LLaVA-1.5: one image of one size, by the image processor of CLIP, SigLIP or LLaVA itself."""

    def _defaults(self, given: Settings) -> Settings:
        name = str(given.get("image_processor_type", "CLIPImageProcessor"))
        kind = name.removesuffix("Fast").removesuffix("Pil").removesuffix("ImageProcessor")
        if kind not in ("CLIP", "Siglip", "Llava"):
            raise InvalidInput(
                f"the model has the image processor {name}, this engine has those of CLIP, SigLIP "
                "and LLaVA for models of type llava; serve another model"
            )
        square = {"height": 224, "width": 224}
        if kind == "Siglip":
            return {
                "resample": BICUBIC, "image_mean": HALF, "image_std": HALF, "size": square,
                "do_center_crop": False, "crop_size": square,
            }  # fmt: skip
        # only LLaVA's own pads; a batch of one has nothing to be padded to
        return {
            "resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD,
            "size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": square,
            "pads": kind == "Llava" and bool(given.get("do_pad")),
        }  # fmt: skip

    def _check(self) -> None:
        super()._check()
        given = dict(self.settings)
        if isinstance(size := given["size"], int):
            given["size"] = {"shortest_edge": size}
        if isinstance(crop := given["crop_size"], int):
            given["crop_size"] = {"height": crop, "width": crop}
        self.settings = given

    def text(self, item: Image.Image) -> str:
        vision = self.config.get("vision_config") or {}
        patch = self.settings.get("patch_size")
        strategy = self.settings.get("vision_feature_select_strategy")
        more = self.settings.get("num_additional_image_tokens", 0)
        if patch is None:  # older models: as the model's configuration has it
            patch = vision.get("patch_size", 14)
            strategy = self.config.get("vision_feature_select_strategy", "default")
            more = 1 if vision.get("model_type", "clip_vision_model").startswith("clip") else 0
        rows, columns = (side // patch for side in self._last_size(*item.size))
        number: int = rows * columns + more - (strategy == "default")
        return self.placeholder * number

    def tensors(self, item: Image.Image) -> Tensors:
        image = item
        if self.settings.get("pads") and image.width != image.height:
            side = max(image.size)
            check_scaled(side, side)
            color = tuple(int(value * 255) for value in self.settings["image_mean"])
            square = Image.new("RGB", (side, side), color)
            square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
            image = square
        image = resized(image, *self._first_size(*image.size), self.settings)
        if self.settings["do_center_crop"]:
            image = center_cropped(image, *self._crop())
        return {"pixel_values": normalized(image, self.settings)[None]}

    def _crop(self) -> tuple[int, int]:
        height, width = sides(self.settings, "crop_size", "height", "width")
        return height, width

    def _first_size(self, width: int, height: int) -> tuple[int, int]:
        if "shortest_edge" not in self.settings["size"]:
            rows, columns = sides(self.settings, "size", "height", "width")
            return rows, columns
        (short,) = sides(self.settings, "size", "shortest_edge")
        long = int(short * max(width, height) / min(width, height))
        return (long, short) if width <= height else (short, long)

    def _last_size(self, width: int, height: int) -> tuple[int, int]:
        if self.settings["do_center_crop"]:
            return self._crop()
        if self.settings.get("pads"):
            width = height = max(width, height)
        return self._first_size(width, height)


_FAMILIES: Mapping[str, type[_QwenVL | _Pixtral | _Gemma3 | _Idefics3 | _Llava]] = {
    "qwen2_vl": _QwenVL,
    "qwen2_5_vl": _QwenVL,
    "qwen3_vl": _QwenVL,
    "qwen3_vl_moe": _QwenVL,
    "qwen3_5": _QwenVL,
    "qwen3_5_moe": _QwenVL,
    "gemma3": _Gemma3,
    "idefics3": _Idefics3,
    "smolvlm": _Idefics3,
    "llava": _Llava,
    "mistral3": _Pixtral,
}


def image_family(
    info: MultiModalInfo, token_of: Callable[[int], str | None]
) -> _QwenVL | _Pixtral | _Gemma3 | _Idefics3 | _Llava:
    """Raises InvalidInput: a family that is not here, or a configuration that it does not do."""
    if info.model_type not in _FAMILIES:
        raise InvalidInput(
            f"images for models of type {info.model_type!r} are not supported, there are: "
            f"{', '.join(_FAMILIES)}; send text, or serve one of those"
        )
    return _FAMILIES[info.model_type](info, token_of)
