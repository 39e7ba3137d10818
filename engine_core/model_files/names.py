"""What a name means that is no path: a model of a wheel, one of the hub, or a file at an address.
Names that everybody knows (`qwen3:8b`) are data: known_names.toml."""

import difflib
import functools
from pathlib import Path

import msgspec

from engine_core.model_files.download import KNOWN_MODELS, KnownModel, find_known_model
from engine_core.model_files.errors import ModelNotFound
from engine_core.model_files.file_url import FileUrl, parse_file_url
from engine_core.model_files.hub import HubName, parse_hub_name

_LATEST = ":latest"


def resolve_name(name: str) -> KnownModel | HubName | FileUrl | None:
    """What is to be fetched for a name; None: nothing has it, as far as a name tells.

    Raises:
        ModelNotFound: a known model has no such tag, or an address is not one of a GGUF file.
    """
    stem = name.removesuffix(_LATEST)
    if (model := find_known_model(stem)) is not None:
        return model
    family, _, tag = stem.lower().partition(":")
    if (known := known_names().get(family)) is not None:
        if (meant := known.tags.get(tag or known.default)) is None:
            raise ModelNotFound(
                f"{family} has no {tag!r}; name one of {', '.join(known.tags)}, as "
                f"{family}:{known.default}"
            )
        return resolve_name(meant)
    return parse_hub_name(stem) or parse_file_url(stem)


class KnownName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By tag what is meant: an `org/name:tag` of the hub, or a model of a wheel."""

    default: str
    """The tag that the name alone has."""
    tags: dict[str, str]


@functools.cache
def known_names() -> dict[str, KnownName]:
    """The names that everybody knows."""
    text = Path(__file__).with_name("known_names.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, KnownName])


def describe_known_names(name: str) -> str:
    """For an error about `name`: the known names, and the nearest ones if any are near."""
    wheels = [model.name for model in KNOWN_MODELS]
    aliases = [alias for model in KNOWN_MODELS for alias in model.aliases]
    tagged = [f"{each}:{tag}" for each, known in known_names().items() for tag in known.tags]
    near = difflib.get_close_matches(
        name.lower(), {*wheels, *aliases, *known_names(), *tagged}, n=3
    )
    known = f"known names are {', '.join([*wheels, *known_names()])}"
    return f"{known} (did you mean {', '.join(near)}?)" if near else known
