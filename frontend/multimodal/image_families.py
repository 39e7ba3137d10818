"""How each family of models takes an image, by `model_type`; here are those that take one of one
size. Of transformers' image processors (those of Pillow) and processors, to the bit."""

import json
from collections.abc import Callable, Mapping

from PIL import Image

from frontend.errors import InvalidInput
from frontend.multimodal.image_family import ImageFamily, Tensors
from frontend.multimodal.patch_families import (
    Gemma4,
    Gemma4Unified,
    LlavaPixtral,
    Pixtral,
    QwenVL,
)
from frontend.multimodal.pixels import (
    BICUBIC,
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    Settings,
    center_cropped,
    check_scaled,
    normalized,
    resized,
    sides,
)
from frontend.multimodal.tile_families import Idefics3, InternVL
from protocol.multimodal import MultiModalInfo


class Gemma3(ImageFamily):
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


class Llava(ImageFamily):
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


def _llava(info: MultiModalInfo, token_of: Callable[[int], str | None]) -> ImageFamily:
    vision = json.loads(info.config_json).get("vision_config") or {}
    return (LlavaPixtral if vision.get("model_type") == "pixtral" else Llava)(info, token_of)


_FAMILIES: Mapping[str, Callable[[MultiModalInfo, Callable[[int], str | None]], ImageFamily]] = {
    "qwen2_vl": QwenVL,
    "qwen2_5_vl": QwenVL,
    "qwen3_vl": QwenVL,
    "qwen3_vl_moe": QwenVL,
    "qwen3_5": QwenVL,
    "qwen3_5_moe": QwenVL,
    "gemma3": Gemma3,
    "gemma4": Gemma4,
    "gemma4_unified": Gemma4Unified,
    "idefics3": Idefics3,
    "smolvlm": Idefics3,
    "internvl": InternVL,
    "llava": _llava,
    "mistral3": Pixtral,
}


def image_family(info: MultiModalInfo, token_of: Callable[[int], str | None]) -> ImageFamily:
    """Raises InvalidInput: a family that is not here, or a configuration that it does not do."""
    if info.model_type not in _FAMILIES:
        raise InvalidInput(
            f"images for models of type {info.model_type!r} are not supported, there are: "
            f"{', '.join(_FAMILIES)}; send text, or serve one of those"
        )
    return _FAMILIES[info.model_type](info, token_of)
