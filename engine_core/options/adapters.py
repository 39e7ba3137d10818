"""Options for adapters (LoRA)."""

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from engine_core.errors import ConfigurationError
from engine_core.options.values import ADAPTERS, FLAG, POSITIVE, at_least

_DEFAULT_MAX_LORAS, _DEFAULT_RANK = 4, 16
_MOST_BY_DEFAULT = 8


@Parameter(name="*", group=ADAPTERS.group)
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AdapterOptions:
    adapter: Annotated[tuple[str, ...], FLAG] = ()
    """NAME=FOLDER: serve this LoRA adapter, a folder of PEFT's or a .gguf file; may be given
    several times."""
    enable_lora: Annotated[bool, FLAG] = False
    """Serve adapters; implied by the other options here."""
    max_loras: Annotated[int | None, POSITIVE] = None
    """Most adapters in a step, whose weights are kept beside the model (default: as many as
    --adapter names, at most 8; 4 without); requests for others wait."""
    max_lora_rank: Annotated[int | None, at_least(1, lte=256)] = None
    """Largest rank of an adapter, up to 256; memory is kept for it (default: that of the
    --adapter with most, at least 16)."""
    adapter_dir: Path | None = None
    """Clients that may change the engine may load adapters from below this folder while it
    serves; default: from nowhere."""

    def __post_init__(self) -> None:
        self.by_name()  # checked before anything is loaded

    @property
    def is_enabled(self) -> bool:
        others = (self.max_loras, self.max_lora_rank, self.adapter_dir)
        return self.enable_lora or bool(self.adapter) or any(each is not None for each in others)

    @property
    def num_slots(self) -> int:
        """`max_loras` in force."""
        by_default = min(len(self.adapter), _MOST_BY_DEFAULT) or _DEFAULT_MAX_LORAS
        return self.max_loras or by_default

    def rank_for(self, largest: int) -> int:
        """`max_lora_rank` in force; `largest`: of the adapters that were named."""
        return self.max_lora_rank or max(largest, _DEFAULT_RANK)

    def by_name(self) -> dict[str, Path]:
        """`--adapter`. Raises ConfigurationError: not NAME=FOLDER, or a name given twice."""
        found: dict[str, Path] = {}
        for text in self.adapter:
            name, equals, path = text.partition("=")
            if not (name and equals and path):
                raise ConfigurationError(f"--adapter {text}: write NAME=FOLDER")
            if name in found:
                raise ConfigurationError(
                    f"--adapter names {name!r} twice; give each adapter a name of its own"
                )
            found[name] = Path(path)
        return found
