"""What families of models that take images have in common: settings of their image processors, and
tokens by name."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt
from PIL import Image

from frontend.errors import InvalidInput
from frontend.multimodal.pixels import Settings
from protocol.multimodal import MultiModalInfo

Tensors = dict[str, npt.NDArray[Any]]

_NAMES_OF_IDS = {
    "image": ("image_token_id", "image_token_index"),
    "begin": ("boi_token_id", "boi_token_index"),
    "end": ("eoi_token_id", "eoi_token_index"),
}


class ImageFamily(ABC):
    """How a family of models takes an image.

    Args:
        info: of the model.
        token_of: the text of a token's id.
    """

    part_type = "image"
    defaults: Mapping[str, Any] = {}
    must_be: Mapping[str, bool | None] = {
        "do_resize": True, "do_pan_and_scan": False, "pad_size": None,
    }  # fmt: skip
    """Settings that are done in one way alone."""

    def __init__(self, info: MultiModalInfo, token_of: Callable[[int], str | None]) -> None:
        self.config: Mapping[str, Any] = json.loads(info.config_json)
        processor = json.loads(info.processor_json)
        given = {**processor, **(processor.get("image_processor") or {})}
        given = {name: value for name, value in given.items() if value is not None}
        flags = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True)
        self.settings: Settings = {
            **flags, "rescale_factor": 1 / 255, **self._defaults(given), **given
        }  # fmt: skip
        self._token_of = token_of
        self.token_id, self.token = self._special("image")
        self.placeholder = self.token
        self._check()

    @abstractmethod
    def text(self, item: Image.Image) -> str:
        """What stands for an image in the prompt, in place of the placeholder.
        Raises InvalidInput: one that the model cannot take."""

    @abstractmethod
    def tensors(self, item: Image.Image) -> Tensors:
        """The tensors that the encoder takes, by transformers' names.
        Raises InvalidInput: an image that the model cannot take."""

    def _defaults(self, given: Settings) -> Settings:
        return self.defaults

    def _check(self) -> None:
        for name, needed in self.must_be.items():
            if self.settings.get(name, needed) != needed:
                raise InvalidInput(
                    f"the model's image processor has {name} {self.settings[name]!r}, which this "
                    f"engine does not do; set it to {json.dumps(needed)} in its configuration"
                )

    def _special(self, kind: str) -> tuple[int, str]:
        names = _NAMES_OF_IDS[kind]
        token_id = next((self.config[name] for name in names if name in self.config), None)
        text = self._token_of(token_id) if isinstance(token_id, int) else None
        if not isinstance(token_id, int) or not text:
            raise InvalidInput(
                f"the model's config.json has {names[0]} {token_id!r}, which is no token of its "
                "tokenizer; serve a complete model"
            )
        return token_id, text
