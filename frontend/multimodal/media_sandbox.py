"""Decodes image and sound files for `media_process.py`: a program that reads them from its standard
input."""

import json
import os

from frontend.errors import InvalidInput
from protocol.sandbox import serve_sandbox


def main() -> None:
    """Serve until the input ends."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each reserves address space, which has a limit
    serve_sandbox(lambda _setup: _answer, refusal=InvalidInput)


def _answer(request: bytes) -> bytes:
    from frontend.multimodal.audio import decode_audio
    from frontend.multimodal.images import decode_image

    head, _, data = request.partition(b"\n")
    modality, name, rate = json.loads(head)
    return decode_image(data, name) if modality == "image" else decode_audio(data, name, rate)


if __name__ == "__main__":
    main()
