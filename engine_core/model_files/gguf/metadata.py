"""What a GGUF file says of its model, with the architecture's prefix understood.

Owns errors that name the file and the key. Must not know what the keys mean.
"""

from typing import Any

import numpy as np

from engine_core.model_files.errors import BrokenModelFile, UnsupportedModelFile

SUPPORTED_ARCHITECTURES = ("gemma3", "llama", "qwen2", "qwen3", "qwen3moe")
_REQUIRED = object()


class GgufMetadata:
    """Metadata of one file with the architecture's prefix understood and errors that name it."""

    def __init__(self, file: str, metadata: dict[str, Any]) -> None:
        self.file = file
        self.raw = metadata
        self.architecture = self._architecture()

    @property
    def family(self) -> str:
        """The architecture, but that Mixtral, which llama.cpp calls llama, has its own name."""
        has_experts = self.raw.get(f"{self.architecture}.expert_count", 0)
        return "mixtral" if self.architecture == "llama" and has_experts else self.architecture

    def _architecture(self) -> str:
        architecture = self.raw.get("general.architecture")
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise UnsupportedModelFile(
                f"{self.file} is of architecture {architecture!r}; GGUF files are read for "
                f"{', '.join(SUPPORTED_ARCHITECTURES)}; use the model's Hugging Face folder"
            )
        return str(architecture)

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """Value of `<architecture>.<key>`: one number for the whole model.

        Raises:
            BrokenModelFile: absent and without default.
            UnsupportedModelFile: a list that differs from layer to layer.
        """
        value = self.raw.get(f"{self.architecture}.{key}")
        if value is None:
            if default is _REQUIRED:
                raise BrokenModelFile(
                    f"{self.file} lacks {self.architecture}.{key}; convert the model again with a "
                    f"current llama.cpp"
                )
            return default
        if isinstance(value, list):
            if len(set(value)) != 1:
                self.refuse(f"{key} differs from layer to layer")
            value = value[0]
        # stored as float32; the shortest number that gives it is what the model's config said
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def refuse(self, what: str) -> None:
        """Raises: UnsupportedModelFile, always."""
        raise UnsupportedModelFile(
            f"{self.file}: {what}, which is not supported for {self.architecture} GGUF files; use "
            f"the model's Hugging Face folder"
        )
