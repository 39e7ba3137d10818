"""Images and sounds that a request has: its binary frames are checked here, before the scheduler
sees them. What is wrong is refused by value, limit and next action."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from engine_core.errors import RequestRefused
from engine_core.kv_cache import CONTENT_HASH_BYTES
from engine_core.scheduler.records.prompt_content import MultiModalFeature
from protocol.codec import binary_frame
from protocol.errors import ErrorCode, InvalidParameter, MalformedMessage
from protocol.multimodal import MultiModalInput, TensorRef
from protocol.requests import EngineRequest

_REQUESTS_AT_ONCE = 16
"""How many requests of the largest size may be unfinished."""

Frames = Sequence[bytes | memoryview]


class AcceptedInputs(Protocol):
    """What the model takes; see `engine_core.models.multimodal.interface.InputFamily`."""

    has_axes: bool
    is_cross_attended: bool

    def num_rows(self, modality: str, tensors: Mapping[str, npt.NDArray[Any]]) -> int: ...


class MultiModalReader:
    """
    Args:
        inputs: None: the model's prompts are text.
        max_items: most inputs of a prompt, by modality.
        max_input_bytes: of all tensors of a request.
        why_text: why prompts are text.
    """

    def __init__(
        self,
        inputs: AcceptedInputs | None = None,
        *,
        max_items: Mapping[str, int] = MappingProxyType({}),
        max_input_bytes: int = 0,
        why_text: str = "the model takes text alone",
    ) -> None:
        self._inputs = inputs
        self._max_items = max_items
        self._max_input_bytes = max_input_bytes
        self._why_text = why_text
        self._unfinished: WeakSet[MultiModalFeature] = WeakSet()

    def read(self, request: EngineRequest, frames: Frames) -> tuple[MultiModalFeature, ...]:
        """
        Raises:
            InvalidParameter: a place, shape, dtype, size or number that cannot be.
            RequestRefused: the model takes none, or unfinished requests have taken the memory that
                there is for them.
        """
        given = request.multimodal_inputs
        if not given and self._inputs is not None and self._inputs.is_cross_attended:
            raise InvalidParameter(
                "multimodal_inputs is empty, and this model's encoder needs an input; give "
                "encoder_prompt, or a sound"
            )
        if not given:
            return ()
        if self._inputs is None:
            raise RequestRefused(
                ErrorCode.NOT_SUPPORTED, f"multimodal_inputs: {self._why_text}; send text"
            )
        if request.prompt_embeds or request.pooling_params is not None:
            raise RequestRefused(
                ErrorCode.NOT_SUPPORTED,
                "multimodal_inputs with prompt_embeds or pooling_params are not supported; omit "
                "one of them",
            )
        self._check_items(given)
        stop, num_bytes, features = 0, 0, []
        for index, each in enumerate(given):
            what = f"multimodal_inputs[{index}] ({each.modality!r:.40})"
            if not stop <= each.start < each.stop <= len(request.prompt_token_ids):
                raise InvalidParameter(
                    f"{what} has positions [{each.start}, {each.stop}) of a prompt of "
                    f"{len(request.prompt_token_ids)}, behind others that end at {stop}; give them "
                    "by rising positions, without overlap"
                )
            stop = each.stop
            data = {name: _data(what, ref, frames) for name, ref in each.tensors.items()}
            num_bytes += sum(part.nbytes for part in data.values())
            if num_bytes > self._max_input_bytes:  # several may be of one frame
                raise InvalidParameter(
                    f"multimodal_inputs have {num_bytes} bytes and more, the limit is "
                    f"{self._max_input_bytes}; send fewer or smaller ones, or start the engine "
                    "with a larger --max-mm-input"
                )
            tensors = {name: _array(what, each.tensors[name], part) for name, part in data.items()}
            features.append(self._feature(what, each, tensors, request.cache_salt))
        self._check_memory(num_bytes, is_resumed=request.is_resumed)
        self._unfinished.update(features)
        return tuple(features)

    def _check_items(self, given: Sequence[MultiModalInput]) -> None:
        for modality in {each.modality for each in given}:
            number = sum(each.modality == modality for each in given)
            limit = self._max_items.get(modality, 0)
            if number > limit:
                raise InvalidParameter(
                    f"multimodal_inputs has {number} of type {modality!r:.40}, the limit is "
                    f"{limit}; send fewer, or start the engine with a larger --limit-mm-per-prompt"
                )

    def _check_memory(self, num_bytes: int, *, is_resumed: bool) -> None:
        num_kept = sum(array.nbytes for each in self._unfinished for array in each.tensors.values())
        limit = _REQUESTS_AT_ONCE * self._max_input_bytes
        if num_kept + num_bytes > limit and not is_resumed:
            raise RequestRefused(
                ErrorCode.QUEUE_FULL,
                f"multimodal_inputs of unfinished requests have {num_kept} bytes, with this one's "
                f"{num_bytes} they pass the limit of {limit}; retry later, or raise --max-mm-input",
            )

    def _feature(
        self,
        what: str,
        given: MultiModalInput,
        tensors: Mapping[str, npt.NDArray[Any]],
        cache_salt: str | None,
    ) -> MultiModalFeature:
        assert self._inputs is not None
        try:
            num_rows = self._inputs.num_rows(given.modality, tensors)
        except ValueError as error:
            raise InvalidParameter(f"{what}: {error}") from None
        length, end = given.stop - given.start, 0
        runs = given.runs or ((0, length),)
        for offset, count in runs:
            if not end <= offset < offset + count <= length:
                raise InvalidParameter(
                    f"{what} has a run of {count} positions from {offset} on, of {length}, behind "
                    f"another that ends at {end}; give them by rising positions, without overlap"
                )
            end = offset + count
        num_places = sum(count for _, count in runs)
        if self._inputs.is_cross_attended:
            if (given.start, given.stop) != (0, 1):
                raise InvalidParameter(
                    f"{what} has positions [{given.start}, {given.stop}); an encoder's input has "
                    "[0, 1), as every token attends to it"
                )
            runs = ()
        elif num_places != num_rows or (self._inputs.has_axes and len(runs) > 1):
            raise InvalidParameter(
                f"{what} has {num_places} places in {len(runs)} runs, its tensors make {num_rows} "
                "rows; expand the prompt as the model's own processor does"
            )
        content = blake2b(repr((given.modality, length, runs)).encode())
        for name in sorted(tensors):
            array = tensors[name]
            content.update(repr((name, array.dtype.name, array.shape)).encode())
            content.update(array.data)
        content.update(repr(cache_salt).encode())
        return MultiModalFeature(
            given.modality,
            given.start,
            given.stop,
            num_rows,
            content.digest()[:CONTENT_HASH_BYTES],
            tuple((given.start + offset, given.start + offset + count) for offset, count in runs),
            tensors,
        )


def _data(what: str, ref: TensorRef, frames: Frames) -> memoryview:
    try:
        return binary_frame(ref, frames)
    except MalformedMessage as error:
        raise InvalidParameter(f"{what}: {error}") from None


def _array(what: str, ref: TensorRef, data: memoryview) -> npt.NDArray[Any]:
    """The tensor as an array, not copied. Raises InvalidParameter: not finite."""
    if ref.dtype == "bfloat16":
        raise InvalidParameter(f"{what} has dtype bfloat16; send float32 or float16")
    array = np.frombuffer(data, np.dtype(ref.dtype)).reshape(ref.shape)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidParameter(f"{what} has a number that is not finite; send finite ones")
    return array
