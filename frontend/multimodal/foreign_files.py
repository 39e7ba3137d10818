"""Images and sounds as prompts have them: the bytes of a file are decoded in a process of their
own, objects of Python's are the caller's and are taken as they are."""

import numpy as np
from PIL import Image

from frontend.media_process import decoded
from frontend.multimodal.audio import Floats, load_audio
from frontend.multimodal.images import load_image
from frontend.multimodal.media_sandbox import IMAGE_HEAD


def read_image(source: object, name: str) -> Image.Image:
    """See `load_image`. Raises InvalidInput: see there; or a file that ends its decoder."""
    if not isinstance(source, bytes | bytearray | memoryview):
        return load_image(source, name)
    found = decoded("image", name, source)
    width, height = IMAGE_HEAD.unpack_from(found)
    pixels = np.frombuffer(found, np.uint8, offset=IMAGE_HEAD.size)
    return Image.fromarray(pixels.reshape(height, width, 3))


def read_audio(source: object, name: str, rate: int = 16_000) -> Floats:
    """See `load_audio`. Raises InvalidInput: see there; or a file that ends its decoder."""
    if not isinstance(source, bytes | bytearray | memoryview):
        return load_audio(source, name, rate)
    return np.frombuffer(decoded("audio", name, source, rate), np.float32)
