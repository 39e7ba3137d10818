"""Files of sentence-transformers beside a model: which modules follow it, and prompts of texts."""

import dataclasses
from pathlib import Path

import msgspec

from engine_core.errors import StartupError
from engine_core.model_files.json_file import read_json_object_if_present
from engine_core.pooler_config import PoolingType
from protocol.codec import understood
from protocol.errors import MalformedMessage

_NO_LENGTH = 10**9
"""transformers writes 10**30 where a tokenizer has no limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class SentenceModules:
    """Contents of `modules.json` and the other files of sentence-transformers, or as far as a GGUF
    file says them."""

    pooling_type: PoolingType | None
    normalizes: bool = True
    dense: tuple[Path, ...] = ()
    """Folders of the dense modules, in order."""
    max_seq_length: int | None = None
    prompts: dict[str, str] = dataclasses.field(default_factory=dict)
    """Prefixes of texts, by the name of the prompt."""
    default_prompt_name: str | None = None


class _Module(msgspec.Struct):
    type: str
    path: str


def read_modules(folder: Path) -> SentenceModules:
    """Those of `modules.json`. Raises StartupError: a module is not known, or a file is broken."""
    pooling_type, normalizes, dense = None, False, []
    decode = msgspec.json.Decoder(list[_Module]).decode
    try:
        modules = understood(decode, (folder / "modules.json").read_bytes(), "a list of modules")
    except MalformedMessage as error:
        raise StartupError(
            f"{folder / 'modules.json'} is none of sentence-transformers: {error}; get it again"
        ) from error
    for module in modules:
        kind, path = module.type.rsplit(".", 1)[-1], folder / module.path
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                pooling_type = _read_pooling_type(path)
            case "Normalize":
                normalizes = True
            case "Dense":
                dense.append(path)
            case _:
                raise StartupError(
                    f"{folder}: module {kind} of sentence-transformers is not supported; there is "
                    "Transformer, Pooling, Dense and Normalize"
                )
    config = read_json_object_if_present(folder / "config_sentence_transformers.json")
    limits = read_json_object_if_present(folder / "sentence_bert_config.json")
    tokenizer = read_json_object_if_present(folder / "tokenizer_config.json")
    longest = limits.get("max_seq_length") or tokenizer.get("model_max_length")
    return SentenceModules(
        pooling_type,
        normalizes,
        tuple(dense),
        longest if isinstance(longest, int) and longest < _NO_LENGTH else None,
        config.get("prompts") or {},
        config.get("default_prompt_name"),
    )


def _read_pooling_type(folder: Path) -> PoolingType:
    config = read_json_object_if_present(folder / "config.json")
    if config.get("include_prompt") is False:
        raise StartupError(f"{folder}: include_prompt false is not supported; use another model")
    modes = dict.fromkeys(("cls_token", "cls"), PoolingType.CLS)
    modes |= dict.fromkeys(("mean_tokens", "mean"), PoolingType.MEAN)
    modes["lasttoken"] = PoolingType.LAST
    prefix = "pooling_mode_"
    on = [name.removeprefix(prefix) for name in config if name.startswith(prefix) and config[name]]
    on = on or [str(config.get("pooling_mode", "mean"))]
    if len(on) != 1 or on[0] not in modes:
        raise StartupError(
            f"{folder}: pooling by {' and '.join(on)} is not supported; there is one of cls_token, "
            "mean_tokens and lasttoken, or give --pooler-config and remove the file"
        )
    return modes[on[0]]
