"""Hidden states in place of a prompt's tokens: from numpy, torch or anything with their interface,
without an import of either, to spans of the wire."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from frontend.errors import InvalidInput
from frontend.sampling_params import as_invalid_input
from protocol.multimodal import TensorRef
from protocol.outputs import ModelInfo
from protocol.prompt_embeds import DTYPE_BYTES, EmbeddedSpan, PromptEmbedsInfo
from protocol.sampling import SamplingParams

_FORMATS = {"f": "float32", "e": "float16"}
"""Formats of the buffer protocol."""


class GivenTensor(NamedTuple):
    """[n, hidden size], row-major and little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class EmbeddedPrompt(NamedTuple):
    """`token_ids` are 0 where spans are; `frames` are what the spans point at."""

    token_ids: list[int]
    spans: tuple[EmbeddedSpan, ...]
    frames: tuple[bytes, ...]

    def check(self, info: PromptEmbedsInfo | None, params: SamplingParams) -> None:
        """Raises InvalidInput: the engine does not take it."""
        assert info is not None, "made for another engine"
        with as_invalid_input():
            info.check(self.spans, len(self.token_ids), params)


def embedded_prompt(prompt: Mapping[str, Any], model: ModelInfo, name: str) -> EmbeddedPrompt:
    """
    Args:
        prompt: `prompt_embeds` of one row a position; or, with `prompt_token_ids` and a mask
            `prompt_is_token_ids`, one a position or one for each that is no token.

    Raises:
        InvalidInput: it is none, or the engine takes none.
    """
    if model.prompt_embeds is None:
        raise InvalidInput(
            f"{name} has prompt_embeds, and this engine takes none; send tokens, or start it with "
            "--enable-prompt-embeds"
        )
    if prompt.get("multi_modal_data") or prompt.get("multimodal"):
        raise InvalidInput(f"{name} has prompt_embeds and multi_modal_data; send one of them")
    tensor = tensor_of(prompt["prompt_embeds"], f"prompt_embeds of {name}")
    num_rows, size = tensor.shape
    token_ids, is_token = prompt.get("prompt_token_ids"), prompt.get("prompt_is_token_ids")
    if token_ids is None:
        if is_token is not None:
            raise InvalidInput(f"{name} has prompt_is_token_ids without prompt_token_ids")
        token_ids, is_token = [0] * num_rows, [False] * num_rows
    if not isinstance(is_token, Sequence) or len(is_token) != len(token_ids):
        raise InvalidInput(
            f"{name} has prompt_embeds and {len(token_ids)} prompt_token_ids; give "
            "prompt_is_token_ids, which says of each whether it is a token"
        )
    num_embedded = sum(not each for each in is_token)
    if num_rows not in (num_embedded, len(is_token)) or not num_embedded:
        raise InvalidInput(
            f"prompt_embeds of {name} has {num_rows} rows; give one for each of the "
            f"{len(is_token)} positions, or for each of the {num_embedded} that are no tokens"
        )
    row_bytes = size * DTYPE_BYTES[tensor.dtype]
    is_dense, position, row = num_rows == num_embedded, 0, 0
    spans: list[EmbeddedSpan] = []
    frames: list[bytes] = []
    for is_text, run in itertools.groupby(bool(each) for each in is_token):
        count = sum(1 for _ in run)
        if not is_text:
            first = row if is_dense else position
            data = TensorRef(frame=len(frames), dtype=tensor.dtype, shape=(count, size))
            spans.append(EmbeddedSpan(start=position, data=data))
            frames.append(tensor.data[first * row_bytes : (first + count) * row_bytes])
            row += count
        position += count
    ids = [each if is_text else 0 for each, is_text in zip(token_ids, is_token, strict=True)]
    return EmbeddedPrompt(ids, tuple(spans), tuple(frames))


def tensor_of(value: Any, name: str) -> GivenTensor:
    """A copy of a [n, hidden size] or [1, n, hidden size] array of numpy or torch, or of what has
    the buffer protocol. Raises InvalidInput: it is none, or of another dtype."""
    if isinstance(value, GivenTensor):
        return value
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    try:
        if hasattr(value, "detach"):  # torch's, which therefore is imported
            value = value.detach().cpu()
            value = value.view(sys.modules["torch"].int16) if dtype == "bfloat16" else value
            value = value.numpy()
        elif dtype == "bfloat16":  # of ml_dtypes
            value = value.view("int16")
        view = memoryview(value)
    except (TypeError, ValueError, BufferError) as error:
        raise InvalidInput(
            f"{name} is of type {type(value).__name__} ({error}); give an array of numpy or torch"
        ) from None
    if dtype != "bfloat16":
        dtype = _FORMATS.get(view.format.lstrip("@=<"), dtype or view.format)
    if dtype not in DTYPE_BYTES:
        raise InvalidInput(f"{name} has dtype {dtype}; convert it to {', '.join(DTYPE_BYTES)}")
    shape = tuple(view.shape or ())
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or not all(shape):
        raise InvalidInput(f"{name} has shape {[*shape]}, it must be [positions, hidden size]")
    return GivenTensor(dtype, shape, view.tobytes())
