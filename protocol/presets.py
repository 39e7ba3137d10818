"""Models under names of the user's own: a file each, of a model and what requests that name it get:
a system text, messages, sampling, a chat template, an adapter. What both sides need of them."""

import contextlib
import functools
import hashlib
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.errors import InvalidParameter
from protocol.private_files import create_private_file

logger = logging.getLogger(__name__)

ADAPTER_PREFIX = "preset-"
_LATEST = ":latest"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}(:[A-Za-z0-9_.-]{1,99})?")
_MAX_BYTES, _MOST = 1 << 20, 1024
_GO_TEMPLATE = re.compile(r"\{\{-?\s*(\.[A-Z]|\$|(if|range|with|define|block|template)\s)")


_WHOLE = (
    "num_ctx", "num_predict", "seed", "top_k", "num_keep", "repeat_last_n", "dry_allowed_length",
    "dry_penalty_last_n",
)  # fmt: skip


class PresetError(InvalidParameter):
    """A preset, or the Modelfile of one, cannot be used; the message names the place and the next
    action."""


class LlamaSamplers(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """llama.cpp's samplers as users name them; None: its default, which does nothing. See
    `protocol.sampling.SamplerChain`."""

    typical_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_n_sigma: float | None = None
    xtc_probability: Annotated[float, Meta(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    dry_multiplier: Annotated[float, Meta(ge=0)] | None = None
    dry_base: Annotated[float, Meta(ge=1)] | None = None
    dry_allowed_length: Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)] | None = None
    dry_penalty_last_n: Annotated[int, Meta(ge=-1)] | Annotated[float, Meta(ge=-1)] | None = None
    dry_sequence_breakers: list[str] | None = None
    dynatemp_range: Annotated[float, Meta(ge=0)] | None = None
    dynatemp_exponent: Annotated[float, Meta(ge=0)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1)] | Annotated[float, Meta(ge=-1)] | None = None
    """How many tokens penalties look at; None: all."""
    samplers: list[str] | None = None
    """Their order."""


SAMPLING_NAMES = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
"""The engine's names of parameters that have others in Modelfiles."""


class Parameters(LlamaSamplers, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling by Ollama's names. None: the model's own default. Whole numbers may come as 3.0."""

    num_ctx: Annotated[int, Meta(ge=1)] | Annotated[float, Meta(ge=1)] | None = None
    """Most tokens of prompt and answer together."""
    num_predict: Annotated[int, Meta(ge=-2)] | Annotated[float, Meta(ge=-2)] | None = None
    """Most tokens of the answer; below 1: as many as there is room for."""
    seed: int | float | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | Annotated[float, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    stop: str | list[str] | None = None

    def __post_init__(self) -> None:
        """Raises ValueError: a fraction of a whole number."""
        for name in _WHOLE:
            if isinstance(value := getattr(self, name, None), float):
                if not value.is_integer():
                    raise ValueError(f"{name} is {value}, it must be a whole number")
                setattr(self, name, int(value))

    def given(self) -> dict[str, Any]:
        """Those that are set, by name."""
        every = {name: getattr(self, name) for name in Parameters.__struct_fields__}
        return {name: value for name, value in every.items() if value is not None}


class PresetMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


class Preset(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True,
             omit_defaults=True):  # fmt: skip
    """
    Args:
        from_: the model, as for `engine-core --model`, or as a server names it; never a preset.
        system: the system text of conversations that have none.
        template: Jinja2 source, in place of the model's.
        adapter: a folder of PEFT's or a .gguf file, where the engine is.
        messages: they stand before those of a conversation, behind its system text.
    """

    from_: Annotated[str, Meta(min_length=1)] = msgspec.field(name="from")
    system: str | None = None
    template: str | None = None
    adapter: str | None = None
    messages: list[PresetMessage] = []
    parameters: Parameters = msgspec.field(default_factory=Parameters)
    license: str | None = None

    def __post_init__(self) -> None:
        """Raises ValueError: its template is Go's."""
        if _GO_TEMPLATE.search(self.template or ""):
            raise ValueError(
                "the template is one of Go's, and only Jinja2 is taken; leave TEMPLATE out, and "
                "the model's own template is used"
            )

    @property
    def adapter_name(self) -> str | None:
        """The name of its adapter at an engine: one for each path."""
        if self.adapter is None:
            return None
        return ADAPTER_PREFIX + hashlib.sha256(self.adapter.encode()).hexdigest()[:12]

    def over(self, base: "Preset") -> "Preset":
        """This one of what `base` is of, with all that `base` has and it has not."""
        own = {name: getattr(self, name) for name in ("system", "template", "adapter", "license")}
        own = {name: value for name, value in own.items() if value is not None}
        parameters = Parameters(**base.parameters.given() | self.parameters.given())
        messages = self.messages or base.messages
        return msgspec.structs.replace(base, **own, parameters=parameters, messages=messages)


_decoder = msgspec.json.Decoder(Preset)


def presets_folder() -> Path:
    """`$XDG_DATA_HOME/engine-core/models`, or that in ~/.local/share."""
    try:
        root = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    except RuntimeError:  # this user has no home: there are none, and none can be written
        root = "/nonexistent"
    return Path(root, "engine-core", "models")


def preset_file(name: str) -> Path:
    """Where the preset of this name is, or would be. Raises PresetError: it is no name of one."""
    stem = name.removesuffix(_LATEST)
    if not _NAME.fullmatch(stem):
        raise PresetError(
            f"{name!r:.200} cannot be a preset's name; use letters, digits, '.', '_' and '-', with "
            "a tag behind ':' if you like, such as mario:v2"
        )
    return presets_folder() / f"{stem}.json"


def find_preset(name: str) -> Preset | None:
    """The preset of this name, with ":latest" or without; None: there is none.
    Raises PresetError: its file cannot be read, or is none of a preset."""
    if not _NAME.fullmatch(name.removesuffix(_LATEST)):
        return None
    file = preset_file(name)
    try:
        with file.open("rb") as stream:
            return _decoder.decode(stream.read(_MAX_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PresetError(f"{file} is no preset: {error}; mend or delete it") from error


def model_of(name: str) -> str:
    """The model that the preset of this name is of; without such a preset the name itself.
    Raises PresetError: see `find_preset`."""
    preset = find_preset(name)
    return name if preset is None else preset.from_


@functools.lru_cache
def warn_once(error: str) -> None:
    """A line of the log about a file that is no preset."""
    logger.warning("%s", error)


def all_presets() -> dict[str, Preset]:
    """All presets by name; the log has a line for each file that is none."""
    found = {}
    for file in sorted(presets_folder().glob("*.json")):
        try:
            if (preset := find_preset(file.stem)) is not None:
                found[file.stem] = preset
        except PresetError as error:
            warn_once(str(error))
    return found


def write_preset(name: str, preset: Preset) -> None:
    """In one step: who reads it meanwhile reads the one before.
    Raises PresetError: no name of one, too large, or one too many. OSError: it is not written."""
    file = preset_file(name)
    text = msgspec.json.format(msgspec.json.encode(preset), indent=1)
    if len(text) > _MAX_BYTES:
        raise PresetError(
            f"{name} has {len(text)} bytes, the limit is {_MAX_BYTES}; shorten its texts"
        )
    if not file.exists() and len([*file.parent.glob("*.json")]) >= _MOST:
        raise PresetError(f"there are {_MOST} presets in {file.parent}; delete some")
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=file.parent) as scratch:
        whole = Path(scratch, file.name)
        with create_private_file(whole) as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        whole.replace(file)


def remove_preset(name: str) -> bool:
    """False: there is none. Raises OSError: it cannot be removed."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PresetError):
        preset_file(name).unlink()
        return True
    return False
