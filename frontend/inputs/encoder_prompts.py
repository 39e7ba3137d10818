"""Prompts of encoder-decoder models: what the encoder reads, and what the decoder begins with."""

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from frontend.errors import InvalidInput
from frontend.multimodal.media import MediaSources, items_of, read_media
from frontend.text.tokenizer import Tokenizer, needed
from protocol.multimodal import MultiModalInfo, MultiModalInput, TensorRef
from protocol.outputs import EncoderInfo, ModelInfo

if TYPE_CHECKING:
    from frontend.multimodal.audio import Floats, LogMel


class EncoderDecoderPrompt(TypedDict, total=False):
    """Both parts, each a text, token ids, or a dictionary with 'prompt' or 'prompt_token_ids'; the
    encoder's may be {"multi_modal_data": {"audio": ...}}."""

    encoder_prompt: Any
    decoder_prompt: Any
    """None: the model's own start."""
    cache_salt: str


@dataclass(frozen=True, slots=True)
class SplitPrompt:
    """`decoder_prompt` has token ids; `inputs` and their `frames` are the encoder's."""

    decoder_prompt: dict[str, Any]
    inputs: tuple[MultiModalInput, ...]
    frames: list[memoryview]


class EncoderPrompts:
    """For one model.

    Args:
        tokenizer: the model's, if it came with one.
        sources: of files that prompts only name.
    """

    def __init__(
        self,
        model: ModelInfo,
        info: EncoderInfo,
        tokenizer: Tokenizer | None,
        sources: Callable[[], MediaSources],
    ) -> None:
        self._name = model.name
        self._vocab_size = model.vocab_size
        self._info = info
        self._multimodal = model.multimodal
        self._tokenizer = tokenizer
        self._sources = sources
        self._log_mel: LogMel | None = None

    @property
    def modality(self) -> str:
        """The modality of the encoder's input."""
        return self._info.modality

    @property
    def start_token_ids(self) -> tuple[int, ...]:
        """The tokens that the decoder's prompt begins with by itself."""
        return self._info.decoder_start_token_ids

    def split(self, prompt: object) -> SplitPrompt:
        """A single prompt is a text for the encoder, or for the decoder beside a sound.
        Raises InvalidInput: what the model cannot take."""
        salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
        if isinstance(prompt, Mapping) and "encoder_prompt" in prompt:
            unknown = prompt.keys() - {"encoder_prompt", "decoder_prompt", "cache_salt"}
            if unknown:
                raise InvalidInput(
                    f"the prompt has {sorted(unknown)[0]!r} beside 'encoder_prompt'; known are "
                    "decoder_prompt and cache_salt"
                )
            given, start = prompt["encoder_prompt"], prompt.get("decoder_prompt")
        elif self._info.modality == "audio" and isinstance(prompt, Mapping):
            given = {"multi_modal_data": prompt.get("multi_modal_data")}
            start = {key: prompt[key] for key in prompt if key != "multi_modal_data"}
        else:
            given, start = prompt, None
        decoder_prompt = {"prompt_token_ids": self._decoder_ids(start)}
        if salt is not None:
            decoder_prompt["cache_salt"] = salt
        make = self._sound if self._info.modality == "audio" else self._text
        inputs, frames = make(given)
        return SplitPrompt(decoder_prompt, inputs, frames)

    def _decoder_ids(self, prompt: object) -> list[int]:
        """The prompt's tokens with the model's start before them, unless they have it."""
        start = list(self._info.decoder_start_token_ids)
        token_ids = self._token_ids(prompt, add_special_tokens=False)
        return token_ids if start and start[0] in token_ids else start + token_ids

    def _token_ids(self, prompt: object, *, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, Mapping):
            own = prompt.get("prompt_token_ids")
            prompt = prompt.get("prompt") if own is None else own
        if prompt is None or prompt == "":
            return []
        if isinstance(prompt, str):
            return needed(self._tokenizer).encode(prompt, add_special_tokens=add_special_tokens)
        if not isinstance(prompt, list | tuple) or not all(type(each) is int for each in prompt):
            raise InvalidInput(
                f"a part of the prompt is {prompt!r:.80}; give a text, token ids, or a dictionary "
                "with 'prompt' or 'prompt_token_ids'"
            )
        return list(prompt)

    def _text(self, prompt: object) -> tuple[tuple[MultiModalInput, ...], list[memoryview]]:
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
            raise InvalidInput(f"model {self._name!r} takes text only; leave multi_modal_data out")
        token_ids = self._token_ids(prompt, add_special_tokens=True)
        if not 1 <= len(token_ids) <= self._info.max_tokens:
            raise InvalidInput(
                f"encoder_prompt has {len(token_ids)} tokens, model {self._name!r} takes from 1 to "
                f"{self._info.max_tokens}; shorten it"
            )
        if not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
            raise InvalidInput(
                f"encoder_prompt has tokens from {min(token_ids)} to {max(token_ids)}, the "
                f"vocabulary ends at {self._vocab_size - 1}; use this model's own tokenizer"
            )
        tensor = TensorRef(frame=0, dtype="int64", shape=(len(token_ids),))
        return _one_input("text", "input_ids", tensor, memoryview(array("q", token_ids)).cast("B"))

    def _sound(self, prompt: object) -> tuple[tuple[MultiModalInput, ...], list[memoryview]]:
        data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
        items = items_of(data) if data else []
        if len(items) != 1 or items[0].modality != "audio":
            raise InvalidInput(
                f"the prompt has {len(items)} inputs, model {self._name!r} takes one sound; give "
                'multi_modal_data={"audio": ...}'
            )
        log_mel = self.log_mel()  # says what to install if numpy is missing
        from frontend.multimodal.audio import load_audio

        source = read_media(items[0], self._sources())
        samples = load_audio(source, items[0].name, log_mel.sampling_rate)
        return self._features_input(samples, items[0].name)

    def _features_input(
        self, samples: "Floats", name: str
    ) -> tuple[tuple[MultiModalInput, ...], list[memoryview]]:
        """Of up to a window's samples. Raises InvalidInput: there are more."""
        log_mel = self.log_mel()
        if len(samples) > log_mel.num_samples:
            raise InvalidInput(
                f"{name} has {len(samples) / log_mel.sampling_rate:.1f} s, model {self._name!r} "
                f"hears {log_mel.chunk_length} s at once; send parts, or use "
                "/v1/audio/transcriptions, which does"
            )
        features = log_mel.features(samples)[0]
        tensor = TensorRef(frame=0, dtype=features.dtype.name, shape=features.shape)
        data = memoryview(features.tobytes())
        return _one_input("audio", "input_features", tensor, data)

    def log_mel(self) -> "LogMel":
        """How the model's features are made of samples."""
        if self._log_mel is None:
            self._log_mel = _log_mel_of(self._multimodal)
        return self._log_mel


def _log_mel_of(info: MultiModalInfo | None) -> "LogMel":
    import json

    try:
        from frontend.multimodal.audio import LogMel
    except ImportError as error:
        raise InvalidInput(
            f"sounds need the package {error.name}, which is not installed; "
            "pip install engine-core[multimodal]"
        ) from None
    settings: dict[str, Any] = {} if info is None else json.loads(info.processor_json)
    config: dict[str, Any] = {} if info is None else json.loads(info.config_json)
    settings.setdefault("feature_size", config.get("num_mel_bins", 80))
    if "chunk_length" not in settings and "max_source_positions" in config:
        settings["chunk_length"] = config["max_source_positions"] * 2 // 100
    return LogMel.of_config(settings)


def _one_input(
    modality: str, name: str, tensor: TensorRef, data: memoryview
) -> tuple[tuple[MultiModalInput, ...], list[memoryview]]:
    given = MultiModalInput(modality=modality, start=0, stop=1, tensors={name: tensor})
    return (given,), [data]
