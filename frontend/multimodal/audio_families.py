"""How each family of models takes a sound: the tensors of its encoder, the text that stands for it,
and how it is asked for a transcript. Of transformers' feature extractors and processors."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from frontend.errors import InvalidInput
from frontend.multimodal.audio import Floats, LogMel
from protocol.multimodal import MultiModalInfo

Tensors = dict[str, npt.NDArray[Any]]

_LANGUAGES = {
    "ar": "Arabic", "yue": "Cantonese", "zh": "Chinese", "cs": "Czech", "da": "Danish",
    "nl": "Dutch", "en": "English", "fil": "Filipino", "fi": "Finnish", "fr": "French",
    "de": "German", "el": "Greek", "hi": "Hindi", "hu": "Hungarian", "id": "Indonesian",
    "it": "Italian", "ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay",
    "fa": "Persian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian",
    "es": "Spanish", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "vi": "Vietnamese",
}  # fmt: skip
"""Languages that Qwen3-ASR knows, by code."""


class _Family:
    """
    Args:
        info: of the model.
        token_of: the text of a token's id.
    """

    part_type = "audio"
    """Of a sound's part in a message, as the family's chat templates know it."""
    transcribes = False
    """Whether a prompt of the family's own asks for a transcript."""

    def __init__(self, info: MultiModalInfo, token_of: Callable[[int], str | None]) -> None:
        config = json.loads(info.config_json)
        config = config.get("thinker_config") or config  # Qwen3-ASR as it is published
        self.audio: Mapping[str, Any] = config.get("audio_config") or {}
        settings = json.loads(info.processor_json)
        settings.setdefault("feature_size", self.audio.get("num_mel_bins", 128))
        self.log_mel = LogMel.of_config(settings)
        self.token_id = config.get("audio_token_id", config.get("audio_token_index", -1))
        self.token = token_of(self.token_id) or ""
        if not self.token:
            raise InvalidInput(
                f"the model's config.json has audio_token_id {self.token_id!r}, which is no token "
                "of its tokenizer; serve a complete model"
            )
        self.placeholder = self.token

    def transcript_prompt(self, language: str | None, context: str | None) -> str:
        """The text, with one placeholder, that asks for what is said.

        Args:
            language: of the sound, such as "en"; None: the model finds out.
            context: words or names that may be heard, or what was said before.

        Raises:
            InvalidInput: a language or a context that the model does not take.
        """
        raise NotImplementedError

    def transcript_of(self, text: str) -> tuple[str | None, str]:
        """The language, if the answer says it, and what was said."""
        return None, text.strip()

    def seconds_at_once(self, max_rows: int) -> float:
        """How much of a sound is heard at once, where it may take so many tokens."""
        raise NotImplementedError


class _Voxtral(_Family):
    """Windows of 30 s, [windows, mel bins, frames], with silence behind the last: 375 tokens each,
    behind a token that begins them."""

    part_type = "input_audio"
    transcribes = True

    def text(self, item: Floats) -> str:
        windows = max(1, -(-len(item) // self.log_mel.num_samples))
        positions = self.audio.get("max_source_positions", 1500)
        width = self.audio.get("hidden_size", 1280)
        rows = windows * positions * width // self.audio.get("intermediate_size", 5120)
        return "[BEGIN_AUDIO]" + self.token * int(rows)

    def tensors(self, item: Floats) -> Tensors:
        return {"input_features": self.log_mel.windows(item)}

    def transcript_prompt(self, language: str | None, context: str | None) -> str:
        if context:
            raise InvalidInput("prompt is given, and this model takes none here; leave it out")
        if language is not None and not re.fullmatch("[a-z]{2}", language):
            raise InvalidInput(f"language is {language!r:.40}; give a code such as 'en'")
        said = "" if language is None else f"lang:{language}"
        return f"<s>[INST]{self.placeholder}[/INST]{said}[TRANSCRIBE]"

    def seconds_at_once(self, max_rows: int) -> float:
        """Half an hour, of which transcripts are good."""
        window = self.log_mel.chunk_length
        tokens = self.text(np.zeros(1, np.float32)).count(self.token)
        return min(1800, max(1, max_rows // tokens) * window)


class _Qwen2Audio(_Family):
    """A sound of up to a window's length: [1, mel bins, frames], and which frames are not silence
    behind it; four of those are about one token."""

    def text(self, item: Floats) -> str:
        if len(item) > self.log_mel.num_samples:
            raise InvalidInput(
                f"a sound has {len(item) / self.log_mel.sampling_rate:.1f} s, the model takes "
                f"{self.log_mel.chunk_length} s; send it in parts"
            )
        after_convolution = (self.log_mel.num_frames(len(item)) - 1) // 2 + 1
        return self.placeholder * ((after_convolution - 2) // 2 + 1)

    def tensors(self, item: Floats) -> Tensors:
        features = self.log_mel.features(item)
        places = np.arange(features.shape[2]) < self.log_mel.num_frames(len(item))
        return {"input_features": features, "feature_attention_mask": places[None].astype(np.int32)}


class _Qwen3ASR(_Family):
    """A sound of any length: [1, mel bins, frames] with zeros up to a whole second, and which of
    them are the sound's; eight frames of a second are one token."""

    transcribes = True
    _SHORTEST = 8000
    """Samples, with silence behind those of a shorter sound."""
    _SECOND = 100

    def text(self, item: Floats) -> str:
        seconds, rest = divmod(self._num_frames(item), self._SECOND)
        return self.placeholder * (13 * seconds + -(-rest // 8))

    def tensors(self, item: Floats) -> Tensors:
        number = self._num_frames(item)
        padding = -number % self._SECOND
        silence = max(0, self._SHORTEST - len(item))
        log_mel = self.log_mel.log_mel(np.pad(item, (0, silence)))
        return {
            "input_features": np.pad(log_mel, ((0, 0), (0, padding)))[None],
            "input_features_mask": (np.arange(number + padding) < number)[None].astype(np.int32),
        }

    def transcript_prompt(self, language: str | None, context: str | None) -> str:
        """The prompt of `Qwen3ASRProcessor.apply_transcription_request`."""
        said = "" if language is None else f"language {_name_of(language)}<asr_text>"
        return (
            f"<|im_start|>system\n{context or ''}<|im_end|>\n<|im_start|>user\n"
            f"<|audio_start|>{self.placeholder}<|audio_end|><|im_end|>\n<|im_start|>assistant\n{said}"
        )

    def transcript_of(self, text: str) -> tuple[str | None, str]:
        """Of "language English<asr_text>...", without what was said twenty times and more."""
        text = re.sub(r"(.)\1{20,}", r"\1", text.strip(), flags=re.DOTALL)
        text = re.sub(r"(?=.{40})(.{1,20}?)\1{19,}", r"\1", text, flags=re.DOTALL)
        head, mark, said = text.partition("<asr_text>")
        if not mark:
            return None, text.strip()
        line = head.strip().partition("\n")[0]
        name = re.sub("^language +", "", line, flags=re.IGNORECASE).strip()
        codes = {value: code for code, value in _LANGUAGES.items()} | {"None": None, "": None}
        return codes.get(name, name), said.strip()

    def seconds_at_once(self, max_rows: int) -> float:
        """Twenty minutes, as the model's own package cuts sounds."""
        return min(1200, max(1, max_rows // 13))

    def _num_frames(self, item: Floats) -> int:
        return max(self._SHORTEST, len(item)) // self.log_mel.hop_length


def _name_of(language: str) -> str:
    """A language's name, of its code or name. Raises InvalidInput: it is not known."""
    names = {name.lower(): name for name in _LANGUAGES.values()}
    name = _LANGUAGES.get(language) or names.get(language.lower())
    if name is None:
        raise InvalidInput(
            f"language is {language!r:.40}, the model knows {', '.join(_LANGUAGES)}; give one of "
            "those"
        )
    return name


AudioFamily = _Voxtral | _Qwen2Audio | _Qwen3ASR

_FAMILIES: Mapping[str, type[AudioFamily]] = {
    "voxtral": _Voxtral,
    "qwen2_audio": _Qwen2Audio,
    "qwen3_asr": _Qwen3ASR,
}


def audio_family(info: MultiModalInfo, token_of: Callable[[int], str | None]) -> AudioFamily:
    """Raises InvalidInput: a family that is not here, or a configuration that it does not do."""
    if info.model_type not in _FAMILIES:
        raise InvalidInput(
            f"sounds for models of type {info.model_type!r} are not supported, there are: "
            f"{', '.join(_FAMILIES)}; send text, or serve one of those"
        )
    return _FAMILIES[info.model_type](info, token_of)
