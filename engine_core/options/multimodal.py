"""Options for images and sounds in prompts."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from engine_core.errors import ConfigurationError
from engine_core.options.values import FLAG, MULTIMODAL, POSITIVE, SIZE

_MODALITIES = ("image", "audio")
_DEFAULT_ITEMS = 999
_DEFAULT_BYTES = 256 * 1024**2


@Parameter(name="*", group=MULTIMODAL.group)
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MultiModalOptions:
    language_model_only: Annotated[bool, FLAG] = False
    """Serve text alone: the encoder of a multimodal model is not loaded."""
    mmproj: Path | None = None
    """The file of a GGUF text's encoder of images, by llama.cpp; default: the one beside it."""
    limit_mm_per_prompt: str | None = None
    """Most inputs of a prompt by modality, as JSON such as {"image": 4}; default: 999."""
    max_mm_input: Annotated[int | None, SIZE, POSITIVE] = None
    """Most bytes of a request's images and sounds as tensors (default 256MiB)."""

    def __post_init__(self) -> None:
        self.max_items(_MODALITIES)  # checked before anything is loaded
        given = self.limit_mm_per_prompt or self.max_mm_input or self.mmproj
        if self.language_model_only and given:
            raise ConfigurationError(
                "--limit-mm-per-prompt, --max-mm-input and --mmproj have no effect with "
                "--language-model-only; omit them, or that"
            )

    def max_items(self, modalities: tuple[str, ...]) -> dict[str, int]:
        """Of these. Raises ConfigurationError: not JSON, another modality, or no whole number."""
        text = self.limit_mm_per_prompt
        if text is None:
            return dict.fromkeys(modalities, _DEFAULT_ITEMS)
        try:
            given = json.loads(text)
        except ValueError as error:
            given = str(error)
        is_right = isinstance(given, dict) and all(
            name in _MODALITIES and type(number) is int and number >= 0
            for name, number in given.items()
        )
        if not is_right:
            raise ConfigurationError(
                f"--limit-mm-per-prompt {text}: write an object of JSON with a number for "
                f'{" or ".join(_MODALITIES)}, such as {{"image": 4}}'
            )
        return {name: given.get(name, _DEFAULT_ITEMS) for name in modalities}

    def most_frame_bytes(self, model: str | None) -> int:
        """Of a client's message, before the model is opened: 0 if that is known to take text
        alone."""
        if self.language_model_only or model is None:
            return 0
        config = Path(model) / "config.json"
        folder = Path(model) if Path(model).is_dir() else Path(model).parent
        takes_more = self.mmproj is not None
        with contextlib.suppress(OSError):  # the model's opener says it better
            takes_more = "/" in model and not Path(model).exists()  # an id on the hub
            if not config.is_file():
                takes_more |= any("mmproj" in each.name.lower() for each in folder.glob("*.gguf"))
            else:
                names = (b'"vision_config"', b'"audio_config"', b'"is_encoder_decoder"')
                takes_more = any(name in config.read_bytes() for name in names)
        return self.max_input_bytes if takes_more else 0

    @property
    def max_input_bytes(self) -> int:
        """`max_mm_input` in force."""
        return self.max_mm_input or _DEFAULT_BYTES
