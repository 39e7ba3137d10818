"""Steps that families' image processors share: sizes, resizing, cropping, normalising. Of
transformers' `image_transforms.py` and `image_processing_backends.py`, to the bit."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from frontend.errors import InvalidInput
from frontend.multimodal.images import MAX_PIXELS

Floats = npt.NDArray[np.float32]
Settings = Mapping[str, Any]

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3


def sides(settings: Settings, name: str, *keys: str) -> tuple[int, ...]:
    """The values of these keys of a size in a processor's configuration.
    Raises InvalidInput: it has others."""
    size = settings[name]
    given = {key: side for key, side in size.items() if side is not None}
    are_sides = all(isinstance(side, int) and side > 0 for side in given.values())
    if given.keys() != {*keys} or not are_sides:
        raise InvalidInput(
            f"the model's image processor has {name} {size!r}, this engine takes "
            f"{' and '.join(keys)}; serve another model, or mend its preprocessor_config.json"
        )
    return tuple(given[key] for key in keys)


def check_scaled(height: int, width: int) -> None:
    """Raises InvalidInput: more pixels than any image may have."""
    if height * width > MAX_PIXELS:
        raise InvalidInput(
            f"an image would become {width}x{height} pixels, the limit is {MAX_PIXELS}; cut it, "
            "its sides differ too much"
        )


def resized(image: Image.Image, height: int, width: int, settings: Settings) -> Image.Image:
    """Raises InvalidInput: larger than any image may be."""
    check_scaled(height, width)
    return image.resize((width, height), resample=settings["resample"])


def center_cropped(image: Image.Image, height: int, width: int) -> Image.Image:
    """The middle; where the image is smaller, zeros are around it, one more above and left."""
    top, left = (image.height - height) // 2, (image.width - width) // 2
    return image.crop((left, top, left + width, top + height))


def normalized(image: Image.Image, settings: Settings) -> Floats:
    """[3, height, width]. A channel has 256 values: each is computed once, by the same formula."""
    values = np.arange(256, dtype=np.float64)
    if settings["do_rescale"]:
        values = values * settings["rescale_factor"]
    table = np.broadcast_to(values.astype(np.float32)[:, None], (256, 3))
    if settings["do_normalize"]:
        mean, std = (_of_channels(settings[key]) for key in ("image_mean", "image_std"))
        table = (table - mean) / std
    pixels = np.asarray(image)
    return np.stack([table[:, channel][pixels[..., channel]] for channel in range(3)])


def _of_channels(value: object) -> Floats:
    return np.array(value if isinstance(value, Sequence) else [value] * 3, dtype=np.float32)
