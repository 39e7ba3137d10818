"""Decodes image and sound files for `media_process.py`: a program that reads them from its standard
input."""

import json
import os
import struct
from collections.abc import Callable

from frontend.errors import InvalidInput
from protocol.sandbox import serve_sandbox

IMAGE_HEAD = struct.Struct("<II")
"""Width and height; [height, width, 3] of uint8 follow."""


def main() -> None:
    """Serve until the input ends."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each reserves address space, which has a limit
    serve_sandbox(_make, refusal=InvalidInput)


def _make(_setup: bytes) -> Callable[[bytes], bytes]:
    from frontend.multimodal.audio import load_audio
    from frontend.multimodal.images import load_image

    def answer(request: bytes) -> bytes:
        head, _, data = request.partition(b"\n")
        modality, name, rate = json.loads(head)
        if modality == "audio":
            return load_audio(data, name, rate).tobytes()
        image = load_image(data, name)
        return IMAGE_HEAD.pack(*image.size) + image.tobytes()

    return answer


if __name__ == "__main__":
    main()
