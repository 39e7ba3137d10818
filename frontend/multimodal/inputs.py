"""From a prompt with placeholders, and what stands for them, to token ids, inputs and their tensors
as frames."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from frontend.errors import InvalidInput, PromptTooLong
from frontend.multimodal.audio import load_audio
from frontend.multimodal.audio_families import AudioFamily, audio_family
from frontend.multimodal.fetching import FETCH_S
from frontend.multimodal.image_families import image_family
from frontend.multimodal.images import load_image
from frontend.multimodal.media import MediaItem, MediaSources, read_media
from frontend.text.tokenizer import Tokenizer
from protocol.multimodal import MultiModalInfo, MultiModalInput, TensorRef

Tensors = dict[str, npt.NDArray[Any]]


class Family(Protocol):
    """How a family of models takes images, or sounds. Each method raises InvalidInput: an item that
    it cannot take."""

    part_type: str
    """Of an item's part in a message, as the family's chat templates know it."""
    placeholder: str
    """The text that chat templates write for an item."""
    token: str
    token_id: int
    """The token id of positions that take a row of the encoder's output."""

    def text(self, item: Any) -> str:
        """What stands for an item in the prompt, in place of the placeholder."""

    def tensors(self, item: Any) -> Tensors:
        """The tensors that the encoder takes, by transformers' names."""


KINDS: Mapping[str, tuple[Callable[..., Family], Callable[[object, str], Any]]] = {
    "image": (image_family, load_image),
    "audio": (audio_family, load_audio),
}
"""Functions that make the family of a model and read an item, by modality."""


@dataclass(frozen=True, slots=True)
class MultiModalPrompt:
    """A prompt as a request is sent with it."""

    token_ids: list[int]
    inputs: tuple[MultiModalInput, ...]
    frames: list[memoryview]


@dataclass(slots=True)
class _Processed:
    modality: str
    text: str
    num_rows: int
    tensors: dict[str, TensorRef]


class MultiModalProcessor:
    """Of one model, for all threads.

    Args:
        model: its name, for errors.
        sources: of files that prompts only name.
    """

    def __init__(
        self,
        model: str,
        info: MultiModalInfo,
        tokenizer: Tokenizer,
        *,
        max_model_len: int,
        sources: Callable[[], MediaSources],
    ) -> None:
        self._model = model
        self._info = info
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._sources = sources
        self._families: dict[str, Family] = {}

    def part(self, modality: str) -> dict[str, str]:
        """An item's part of a message, for a chat template. Raises InvalidInput: the model takes
        none."""
        family = self.family_of(modality)
        return {"type": family.part_type, "placeholder": family.placeholder}

    def transcriber(self) -> AudioFamily | None:
        """How the model is asked for transcripts; None: it hears nothing, or is not asked so."""
        if not self._info.max_items.get("audio"):
            return None
        family = audio_family(self._info, self._tokenizer.id_to_token)
        return family if family.transcribes else None

    def process(
        self, prompt: str | list[int], items: Sequence[MediaItem], *, add_special_tokens: bool
    ) -> MultiModalPrompt:
        """Takes as long as decoding does.

        Args:
            prompt: a text, or token ids, with a placeholder for each item, in order.

        Raises:
            InvalidInput: items that this model does not take, that are not what they should be, or
                that are not as many as placeholders; too many of them.
        """
        kinds = dict.fromkeys(item.modality for item in items)
        for modality in kinds:
            self._check_number(modality, sum(item.modality == modality for item in items))
        frames: list[memoryview] = []
        processed = []
        seconds = FETCH_S
        for item in items:
            began = time.monotonic()
            source = read_media(item, self._sources(), seconds)
            seconds -= time.monotonic() - began
            processed.append(self._processed(item, source, frames))
            self._check_sizes(processed, frames)
        for modality in kinds:
            texts = [each.text for each in processed if each.modality == modality]
            if isinstance(prompt, str):
                prompt = self._expanded_text(prompt, self.family_of(modality), texts)
            else:
                prompt = self._expanded_ids(prompt, self.family_of(modality), texts)
        token_ids = (
            self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            if isinstance(prompt, str)
            else prompt
        )
        inputs = [placed for kind in kinds for placed in self._placed(kind, token_ids, processed)]
        return MultiModalPrompt(
            token_ids=token_ids,
            inputs=tuple(sorted(inputs, key=lambda each: each.start)),
            frames=frames,
        )

    def family_of(self, modality: str) -> Family:
        if modality not in self._families:
            make, _ = KINDS[modality]
            self._families[modality] = make(self._info, self._tokenizer.id_to_token)
        return self._families[modality]

    def _check_number(self, modality: str, number: int) -> None:
        most = self._info.max_items.get(modality, 0)
        if number > most:
            what = f"at most {most} of type {modality!r}" if most else f"no input {modality!r}"
            raise InvalidInput(
                f"the prompt has {number} of type {modality!r}, and model {self._model} takes "
                f"{what} in a prompt; send fewer, or serve another model"
            )

    def _processed(self, item: MediaItem, source: object, frames: list[memoryview]) -> _Processed:
        family, (_, load) = self.family_of(item.modality), KINDS[item.modality]
        loaded = load(source, item.name)
        text = family.text(loaded)
        num_rows = text.count(family.token) if text else 0
        if not num_rows:
            raise InvalidInput(f"{item.name} makes no token of this model; send a larger one")
        if num_rows >= self._max_model_len:
            raise PromptTooLong(
                f"{item.name} makes {num_rows} tokens, the limit of the model is "
                f"{self._max_model_len - 1}; send a smaller one"
            )
        refs = {}
        for name, array in family.tensors(loaded).items():
            refs[name] = TensorRef(frame=len(frames), dtype=array.dtype.name, shape=array.shape)
            frames.append(np.ascontiguousarray(array).data.cast("B"))
        return _Processed(item.modality, text, num_rows, refs)

    def _check_sizes(self, processed: Sequence[_Processed], frames: Sequence[memoryview]) -> None:
        num_tokens = sum(each.num_rows for each in processed)
        if num_tokens >= self._max_model_len:
            raise PromptTooLong(
                f"{len(processed)} inputs of the prompt make {num_tokens} tokens, the limit of the "
                f"model is {self._max_model_len - 1}; send fewer or smaller ones"
            )
        num_bytes = sum(frame.nbytes for frame in frames)
        if num_bytes > self._info.max_input_bytes:
            raise InvalidInput(
                f"{len(processed)} inputs of the prompt make tensors of {num_bytes} bytes, the "
                f"limit of the engine is {self._info.max_input_bytes}; send fewer or smaller ones"
            )

    def _expanded_text(self, prompt: str, family: Family, texts: Sequence[str]) -> str:
        between = prompt.split(family.placeholder)
        _check_placeholders(family, len(between) - 1, len(texts))
        parts = [between[0]]
        for text, behind in zip(texts, between[1:], strict=True):
            parts += (text, behind)
        return "".join(parts)

    def _expanded_ids(self, prompt: list[int], family: Family, texts: Sequence[str]) -> list[int]:
        if prompt.count(family.token_id) == sum(text.count(family.token) for text in texts):
            return prompt  # it was expanded before
        (marker,) = self._tokenizer.encode(family.placeholder, add_special_tokens=False)
        _check_placeholders(family, prompt.count(marker), len(texts))
        rest = iter(texts)
        expanded = []
        for token_id in prompt:
            expanded += (
                self._tokenizer.encode(next(rest), add_special_tokens=False)
                if token_id == marker
                else [token_id]
            )
        return expanded

    def _placed(
        self, modality: str, token_ids: list[int], processed: Sequence[_Processed]
    ) -> list[MultiModalInput]:
        """Each input with the positions of its rows."""
        family = self.family_of(modality)
        places = np.flatnonzero(np.asarray(token_ids) == family.token_id)
        mine = [each for each in processed if each.modality == modality]
        if len(places) != sum(each.num_rows for each in mine):
            raise InvalidInput(
                f"the prompt has {len(places)} tokens {family.token!r}, its inputs are "
                f"{sum(each.num_rows for each in mine)}; leave that token out of the text"
            )
        inputs = []
        for each, stop in zip(mine, np.cumsum([each.num_rows for each in mine]), strict=True):
            own = places[stop - each.num_rows : stop]
            start, end = int(own[0]), int(own[-1]) + 1
            inputs.append(
                MultiModalInput(
                    modality=modality,
                    start=start,
                    stop=end,
                    tensors=each.tensors,
                    runs=() if end - start == len(own) else _runs(own - start),
                )
            )
        return inputs


def _runs(offsets: npt.NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """(first, count) of each run of consecutive numbers."""
    pieces = np.split(offsets, np.flatnonzero(np.diff(offsets) != 1) + 1)
    return tuple((int(piece[0]), len(piece)) for piece in pieces)


def _check_placeholders(family: Family, number: int, num_items: int) -> None:
    if number != num_items:
        raise InvalidInput(
            f"the prompt has {number} placeholders {family.placeholder!r} for {num_items} inputs; "
            "write one for each, and none elsewhere in the text"
        )
