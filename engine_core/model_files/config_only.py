"""A model of which nothing is at hand but its config.json: the shape for random weights.

Must not know how weights are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine_core.model_files.eos_tokens import resolve_eos_token_ids
from engine_core.model_files.errors import ModelNotFound
from engine_core.model_files.fingerprint import fingerprint_files
from engine_core.model_files.interface import TokenizerFiles
from engine_core.model_files.json_file import read_json_object

if TYPE_CHECKING:
    from kernels.interface.weights import WeightPart


class ConfigOnly:
    """`ModelFiles` without weights and without a tokenizer. Named after the file, or after its
    folder if the file is called config.json.

    Raises:
        ModelNotFound: there is no such file.
        BrokenModelFile: it is not a JSON object.
    """

    def __init__(self, file: Path) -> None:
        if not file.is_file():
            raise ModelNotFound(f"{file} is not a file; name a config.json with --model-config")
        self.path = file
        self.name = file.resolve().parent.name if file.name == "config.json" else file.stem
        self.config: dict[str, Any] = read_json_object(file)
        self.generation_config: dict[str, Any] = {}

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        text_config = self.config.get("text_config")
        nested = [text_config] if isinstance(text_config, dict) else []
        return resolve_eos_token_ids([self.config, *nested], self.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint_files([self.path])

    @property
    def weight_files(self) -> tuple[Path, ...]:
        return ()

    @property
    def quantised_types(self) -> frozenset[str]:
        return frozenset()

    def tensors(self, *, keeps_blocks: bool = False) -> Iterator[tuple[str, WeightPart]]:
        self._has_no_weights()

    def tokenizer(self) -> TokenizerFiles | None:
        return None

    def _has_no_weights(self) -> NoReturn:
        raise ModelNotFound(f"{self.path} has no weights beside it; use --load-format dummy")
