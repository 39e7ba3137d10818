"""Foreign image files to RGB, as transformers' `load_image`: in a process of their own, within
limits that the header must meet before anything is decoded."""

import io
import re
import struct
import warnings
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from frontend.errors import InvalidInput
from frontend.multimodal.media_process import decoded

MAX_PIXELS = 8192 * 8192
MAX_SIDE = 32_768
HEAD = struct.Struct("<II")
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Further decoders of Pillow's are not given foreign bytes."""


def load_image(source: object, name: str) -> Image.Image:
    """An RGB image, upright by its EXIF data; of an animation the first frame. Transparency of a
    file is dropped, as `load_image` does; that of an image of Pillow's is laid on white, as
    transformers' image processors do.

    Args:
        source: the bytes of a file, an image of Pillow's, or an array [height, width, 3], uint8.
        name: for errors.

    Raises:
        InvalidInput: no image, of another format, broken, or with too many pixels.
    """
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3:
            raise InvalidInput(
                f"{name} is an array of shape {source.shape} and type {source.dtype}; give "
                "[height, width, 3] of uint8"
            )
        if not source.size:
            raise InvalidInput(f"{name} is an array without pixels; give an image")
        _check_size(source.shape[1], source.shape[0], name)
        return Image.fromarray(source)
    if isinstance(source, Image.Image):
        _check_size(*source.size, name)
        return _with_errors(lambda: _on_white(_upright(source)), name)
    if not isinstance(source, bytes | bytearray | memoryview):
        raise InvalidInput(
            f"{name} is {type(source).__name__}; give an image of Pillow's, bytes, a path or a URL"
        )
    found = decoded("image", name, source)
    width, height = HEAD.unpack_from(found)
    return Image.fromarray(np.frombuffer(found, np.uint8, offset=8).reshape(height, width, 3))


def decode_image(data: bytes, name: str) -> bytes:
    """What `load_image` gets of a file's bytes: width, height, and three bytes of each pixel.
    Raises InvalidInput: see there."""
    image = _with_errors(lambda: _read(data, name), name)
    return HEAD.pack(*image.size) + image.tobytes()


def _read(data: bytes, name: str) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Pillow's own limit, which is above ours
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_size(*image.size, name)
            return _upright(image).convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(image)


def _on_white(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _check_size(width: int, height: int, name: str) -> None:
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise InvalidInput(
            f"{name} has {width}x{height} pixels, the limit is {MAX_PIXELS} in all and {MAX_SIDE} "
            "a side; scale it down"
        )
    if width < 1 or height < 1:
        raise InvalidInput(f"{name} has {width}x{height} pixels; give an image")


def _with_errors(decode: Callable[[], Image.Image], name: str) -> Image.Image:
    try:
        return decode()
    except InvalidInput:
        raise
    except UnidentifiedImageError:
        raise InvalidInput(
            f"{name} is no image of a known format; send one of {', '.join(FORMATS)}"
        ) from None
    except Image.DecompressionBombError as error:  # of the header, before ours
        number = next(iter(re.findall(r"\d+", str(error))), "too many")
        raise InvalidInput(
            f"{name} has {number} pixels, the limit is {MAX_PIXELS}; scale it down"
        ) from None
    except MemoryError:
        raise InvalidInput(f"{name} needs more memory than there is; scale it down") from None
    except Exception as error:  # decoders raise OSError, SyntaxError, struct.error, EOFError ...
        raise InvalidInput(
            f"{name} cannot be decoded ({type(error).__name__}: {str(error)[:200]}); send a whole "
            f"file, one of {', '.join(FORMATS)}"
        ) from None
