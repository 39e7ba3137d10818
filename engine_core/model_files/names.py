"""What a name means that is no path: a model of a wheel, one of the hub, or a file at an address.
Names that everybody knows (`qwen3:8b`) are data: protocol/known_names.toml."""

import difflib
from pathlib import Path

from engine_core.model_files.download import KNOWN_MODELS, KnownModel, find_known_model
from engine_core.model_files.errors import ModelNotFound
from engine_core.model_files.file_url import FileUrl, parse_file_url
from engine_core.model_files.hub import HubName, parse_hub_name
from protocol.known_names import known_names
from protocol.presets import PresetError, model_of


def find_model(model: str, option: str) -> Path | KnownModel | HubName | FileUrl:
    """A path that exists, or what is to be fetched for the name. Nothing is fetched.

    Raises:
        ModelNotFound: neither, as far as this machine can tell.
    """
    if not model.strip():
        raise ModelNotFound(f"{option} is empty; name a model folder, a .gguf file or a known name")
    try:
        model = model_of(model)
    except PresetError as error:
        raise ModelNotFound(str(error)) from error
    try:
        path = Path(model).expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # ~nobody, a NUL, a loop of links
        raise ModelNotFound(f"{model!r} cannot be looked at: {error}; check it") from error
    if exists:
        return path
    if (named := resolve_name(model)) is not None:
        return named
    if _looks_like_a_path(model):
        raise ModelNotFound(f"{path} does not exist; check the path given as {option}")
    raise ModelNotFound(
        f"{model!r} is neither a file or folder here nor a known name; "
        f"{describe_known_names(model)}; or give a path, or a hub id such as org/name or "
        "org/name:Q4_K_M"
    )


def _looks_like_a_path(model: str) -> bool:
    return (
        model.startswith(("/", "./", "../", "~"))
        or model.endswith((".gguf", ".json", "/"))
        or model.count("/") > 1
    )


def resolve_name(name: str) -> KnownModel | HubName | FileUrl | None:
    """What is to be fetched for a name; None: nothing has it, as far as a name tells.
    Raises ModelNotFound: a known model has no such tag, or an address is no GGUF file's."""
    stem = name.removesuffix(":latest")
    if (model := find_known_model(stem)) is not None:
        return model
    family, _, tag = stem.lower().partition(":")
    if (tags := known_names().get(family)) is not None:
        usual, *choices = tags
        if tag == usual or (meant := tags.get(tag or tags[usual])) is None:
            listed = ", ".join(choices)
            raise ModelNotFound(
                f"{family} has no {tag!r}; name one of {listed}, as {family}:{tags[usual]}"
            )
        return resolve_name(meant)
    return parse_hub_name(stem) or parse_file_url(stem)


def describe_known_names(name: str) -> str:
    """For an error about `name`: the nearest known names, if any are near, and all."""
    wheels = [model.name for model in KNOWN_MODELS]
    aliases = [alias for model in KNOWN_MODELS for alias in model.aliases]
    tagged = [f"{each}:{tag}" for each, tags in known_names().items() for tag in [*tags][1:]]
    every = {*wheels, *aliases, *known_names(), *tagged}
    near = difflib.get_close_matches(name.lower(), every)
    known = f"known names are {', '.join([*wheels, *known_names()])}"
    return f"did you mean {', '.join(near)}? {known}" if near else known
