"""What a scripted engine says of a model like LLaVA-1.5, whose images are 4 tokens. Not a test."""

import base64
import io
import json
import struct
import zlib

from fake_model import MEDIA_IDS
from PIL import Image

from protocol.multimodal import MultiModalInfo

INFO = MultiModalInfo(
    model_type="llava",
    config_json=json.dumps({"image_token_index": MEDIA_IDS["<image>"]}).encode(),
    processor_json=json.dumps(
        {
            "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
            "patch_size": 14,
        }
    ).encode(),
    max_items={"image": 2},
    max_input_bytes=2**20,
)
NUM_TOKENS = 4
PARTS_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}"
    "{% endif %};{% endfor %}"
)


def png(color: str = "red", size: tuple[int, int] = (40, 30)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, color).save(file, "PNG")
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Of a file that says how large it is, and ends there."""
    parts = struct.pack(">II5B", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", parts), (b"IDAT", b""), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_message(url: str, text: str = "what is it?") -> dict:
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
    return {"role": "user", "content": parts}
