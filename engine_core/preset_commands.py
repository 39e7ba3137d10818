"""`engine-core create`, `show` and `cp`: models under names of the user's own."""

import json as json_format
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from engine_core.errors import ConfigurationError, StartupError
from engine_core.model_commands import Json, print_line, with_one_error
from protocol.modelfile import modelfile as modelfile_of
from protocol.modelfile import parameter_lines, read_modelfile
from protocol.presets import SAMPLING_NAMES, Parameters, Preset, find_preset, write_preset

if TYPE_CHECKING:
    from engine_core.model_files.interface import ModelFiles

_Name = Annotated[str, Parameter(help="The new name; what had it gives way.", show=True)]
_Any = Annotated[str, Parameter(help="A name of `engine-core list`, or a path.", show=True)]
_Alone = Annotated[bool, Parameter(help="Print this part alone.", negative="", show=True)]
_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""A block of transformers' templates, which Jinja2 alone does not know."""


@with_one_error
def create(
    name: _Name,
    /,
    *,
    file: Annotated[
        Path, Parameter(name=["--file", "-f"], help="Ollama's Modelfile.", show=True)
    ] = Path("Modelfile"),
) -> None:
    """Give a model a name of your own, with a system text, parameters, an adapter."""
    try:
        preset = read_modelfile(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{file} cannot be read: {error}; name a Modelfile with -f") from None
    _check_template(preset.template or "", file)
    if preset.adapter is not None:
        path = (file.parent / Path(preset.adapter).expanduser()).resolve()
        if not (path.is_file() or (path / "adapter_config.json").is_file()):
            raise ConfigurationError(
                f"{file}: ADAPTER {path} is neither a folder with adapter_config.json nor a .gguf "
                "file; check the path"
            )
        preset = msgspec.structs.replace(preset, adapter=str(path))
    _keep(name, preset, file.parent)
    print_line(f"created {name}")


@with_one_error
def cp(source: _Any, name: _Name, /) -> None:
    """Give a model another name, with all that the first one has."""
    _keep(name, Preset(from_=source), Path())
    print_line(f"copied {source} to {name}")


@with_one_error
def show(
    name: _Any,
    /,
    *,
    modelfile: Annotated[
        bool, Parameter(help="Print what `create -f` reads, and no more.", negative="", show=True)
    ] = False,
    parameters: _Alone = False,
    template: _Alone = False,
    system: _Alone = False,
    license: _Alone = False,
    json: Json = False,
) -> None:
    """Show a model: architecture, size, context, parameters, template, system text."""
    alone = {"parameters": parameters, "template": template, "system": system, "license": license}
    parts = [part for part, is_asked in alone.items() if is_asked]
    if len(parts) + modelfile + json > 1:
        raise ConfigurationError(f"give one of --modelfile, --json, --{', --'.join(alone)}")
    preset = find_preset(name) or Preset(from_=name)
    if modelfile:
        print_line(modelfile_of(preset).rstrip())
        return
    facts: dict[str, Any] = {"model": preset.from_}
    files = _opened(preset.from_)
    if json:
        print_line(json_format.dumps({} if files is None else _facts(files)))
        return
    if files is not None:
        from engine_core.model_files.stored import size_bytes

        config = files.config.get("text_config", files.config)
        facts |= {
            "architecture": next(iter(files.config.get("architectures") or ()), None),
            "weights": files.num_weights,
            "context length": config.get("max_position_embeddings"),
            "bytes": size_bytes(files.path),
            "path": str(files.path),
        }
        preset = preset.over(_recommended(files))
    if parts:
        lines = parameter_lines(preset.parameters)
        print_line("\n".join(lines) if parameters else getattr(preset, parts[0]) or "")
        return
    for fact, value in facts.items():
        print_line(f"{fact:<16}{value:,}" if isinstance(value, int) else f"{fact:<16}{value}")
    if files is None:
        print_line(f"not here yet: engine-core pull {preset.from_}")
    print_line("\n" + modelfile_of(preset).partition("\n")[2].rstrip())


def _opened(model: str) -> "ModelFiles | None":
    """None: it was not fetched yet. Raises ModelFilesError: there is no such model, or its files
    cannot be read."""
    from engine_core.model_files import ModelNotFound
    from engine_core.model_files.open import open_model_files
    from engine_core.model_files.stored import find_stored_model

    source = _source(model, Path())
    if not Path(source).exists():
        try:
            found = find_stored_model(source)
        except ModelNotFound:
            return None
        snapshots = (found.path / "snapshots").glob("*")  # of a model of the hub
        source = str(max(snapshots, key=lambda each: each.stat().st_mtime, default=found.path))
    report = lambda _line: None  # noqa: E731
    return open_model_files(source, option="NAME", finds_mmproj=True, report=report)


def _facts(files: "ModelFiles") -> dict[str, Any]:
    """What a server tells of a model that does not run, by the names of `ModelInfo`."""
    from engine_core.model_files.stored import gguf_format, size_bytes
    from engine_core.options.pooling import PoolingOptions
    from engine_core.startup.pooled_files import pooled_files

    pooled, text = pooled_files(files, PoolingOptions()), files.config
    text = {**text, **(text.get("text_config") or {})}
    is_folder, tokenizer = files.path.is_dir(), files.tokenizer()
    dtype = text.get("dtype") or text.get("torch_dtype") or ""
    own = "+".join(files.quantised_types) or str(dtype).removeprefix("torch.")
    preset = _recommended(files)
    return {
        "architecture": next(iter(files.config.get("architectures") or ()), ""),
        "max_model_len": text.get("max_position_embeddings") or 0,
        "vocab_size": text.get("vocab_size") or 0,
        "num_weights": 0 if is_folder and files.quantised_types else files.num_weights,
        "file_bytes": size_bytes(files.path),
        "file_format": "safetensors" if is_folder else "gguf",
        "formats": own if is_folder else gguf_format(files.path).removeprefix("gguf "),
        "eos_token_ids": files.eos_token_ids,
        "default_sampling": preset.parameters.given(),
        "tasks": ["generate" if pooled.generates else "embed"],
        "takes_images": _takes_images(files),
        "chat_template": preset.template or "",
        "chat_templates": {} if tokenizer is None else tokenizer.named_chat_templates,
    }


def _takes_images(files: "ModelFiles") -> bool:
    if files.config.get("vision_config") is None:
        return False
    from engine_core.models.errors import UnsupportedArchitecture
    from engine_core.models.multimodal.families import input_family

    try:
        family = input_family(files.config)
    except UnsupportedArchitecture:
        return False
    return family is not None and "image" in family.modalities


def _recommended(files: "ModelFiles") -> Preset:
    """The template and sampling that its authors recommend."""
    names = {name: word for word, name in SAMPLING_NAMES.items()}
    given = {names.get(name, name): value for name, value in files.generation_config.items()}
    known = {"temperature", "top_k", "top_p", "min_p", "repeat_penalty"} & given.keys()
    tokenizer = files.tokenizer()
    return Preset(
        from_=files.name,
        template=None if tokenizer is None else tokenizer.chat_template,
        parameters=Parameters(**{name: given[name] for name in known}),
    )


def _keep(name: str, preset: Preset, folder: Path) -> None:
    """`folder`: paths of its model are relative to that.
    Raises ModelFilesError: there is no such model. PresetError, ConfigurationError: no name of a
    preset."""
    from engine_core.model_files.names import resolve_name

    if resolve_name(name) is not None:
        raise ConfigurationError(f"{name} is the name of a model; give yours another one")
    preset = msgspec.structs.replace(preset, from_=_source(preset.from_, folder))
    base = find_preset(preset.from_)
    write_preset(name, preset if base is None else preset.over(base))


def _source(model: str, folder: Path) -> str:
    """The model as it is kept: a path is absolute. Raises ModelNotFound: there is none."""
    from engine_core.model_files.names import resolve_name
    from engine_core.model_files.open import locate_model

    if find_preset(model) is not None:
        return model
    path = folder / Path(model).expanduser()
    if path.exists():
        return str(path.resolve())
    if resolve_name(model) is None:
        locate_model(model, option="FROM", report=lambda _line: None)  # says why there is none
    return model


def _check_template(template: str, file: Path) -> None:
    """Raises ConfigurationError: it is not Jinja2."""
    import jinja2

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        environment.parse(_GENERATION_TAG.sub("", template))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigurationError(
            f"{file}: TEMPLATE is not Jinja2, in its line {error.lineno}: {error.message}; mend "
            "it, or leave TEMPLATE out, and the model's own template is used"
        ) from None
