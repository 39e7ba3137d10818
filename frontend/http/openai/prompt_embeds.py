"""prompt_embeds of a body: base64 of a safetensors file with one tensor."""

import base64
import binascii
from typing import Annotated, Any

import msgspec

from frontend.http.api_errors import ApiError
from frontend.inputs.prompt_embeds import GivenTensor
from protocol.prompt_embeds import DTYPE_BYTES, PromptEmbedsInfo

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_MOST_HEADER_BYTES = 2**16
_PICKLES = (b"PK\x03\x04", b"\x80")
"""How files of torch.save begin, those before version 1.6 too."""


def read_prompt_embeds(text: str, info: PromptEmbedsInfo | None) -> GivenTensor:
    """Raises ApiError: the engine takes none, it is too large, or it is no such file."""
    if info is None:
        raise _refused(
            "prompt_embeds are off; send prompt, or start the engine with --enable-prompt-embeds"
        )
    limit = info.max_bytes + _MOST_HEADER_BYTES
    if len(text) // 4 * 3 > limit + 2:
        raise _refused(
            f"prompt_embeds has {len(text) // 4 * 3} bytes, the limit is {limit}; send fewer "
            "positions, or start the engine with a larger --max-prompt-embeds"
        )
    try:
        file = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _refused(f"prompt_embeds is not base64: {error}") from None
    if file.startswith(_PICKLES):
        raise _refused(
            "prompt_embeds is a file of torch.save, which is a pickle and could run code here; "
            'send base64 of safetensors.torch.save({"prompt_embeds": tensor})'
        )
    return _only_tensor(file)


def _only_tensor(file: bytes) -> GivenTensor:
    header_bytes = int.from_bytes(file[:8], "little")
    if len(file) < 8 or header_bytes > min(len(file) - 8, _MOST_HEADER_BYTES):
        raise _refused(
            f"prompt_embeds is no safetensors file: it has {len(file)} bytes, and a header of "
            f"{header_bytes}; send base64 of what safetensors.torch.save returns"
        )
    try:
        header = msgspec.json.decode(file[8 : 8 + header_bytes], type=dict[str, dict[str, Any]])
        header.pop("__metadata__", None)
        (tensor,) = header.values()
        found = msgspec.convert(tensor, _Tensor)
    except (ValueError, RecursionError) as error:
        raise _refused(
            f"prompt_embeds is no safetensors file of one tensor: {error}; send base64 of "
            'safetensors.torch.save({"prompt_embeds": tensor})'
        ) from None
    dtype, shape = _DTYPES.get(found.dtype), found.shape
    if dtype is None or len(shape) != 2 or not shape[0] * shape[1] > 0:
        raise _refused(
            f"prompt_embeds is {found.dtype:.20} of shape {[*shape[:9]]}; send [positions, hidden "
            f"size] of {', '.join(_DTYPES)}"
        )
    data = file[8 + header_bytes :]
    num_bytes = shape[0] * shape[1] * DTYPE_BYTES[dtype]
    if found.data_offsets != (0, num_bytes) or len(data) != num_bytes:
        raise _refused(
            f"prompt_embeds has {len(data)} bytes of data at {[*found.data_offsets]}, "
            f"{found.dtype} of shape {[*shape]} needs {num_bytes}"
        )
    return GivenTensor(dtype, shape, data)


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def _refused(message: str) -> ApiError:
    return ApiError(400, message, param="prompt_embeds")
