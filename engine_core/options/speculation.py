"""Options of speculative decoding: who makes drafts, and how many."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from engine_core.errors import ConfigurationError
from engine_core.options.values import COMMON, POSITIVE, SPECULATION

if TYPE_CHECKING:
    from engine_core.scheduler.speculation.base import Proposer

QuantizationName = Literal[
    "auto",
    "none",
    "int8",
    "int4",
    "awq",
    "gptq",
    "gguf",
    "fp8",
    "mxfp4",
    "compressed-tensors",
    "modelopt",
    "auto-round",
    "bitsandbytes",
]
SpeculativeName = Literal["ngram", "suffix", "draft", "eagle", "mtp"]
_MODELS = {"draft": "a model, such as first-layers:4", "eagle": "an EAGLE-3 head"}
"""Drafts that a model of --draft-model makes, and which."""
_IN_THE_RUNNER = (*_MODELS, "mtp")
"""Drafts that a model or a head makes."""
_NUM_TOKENS = 8
_LOOKUP_MIN, _LOOKUP_MAX = 3, 5


@Parameter(name="*", group=SPECULATION.group)
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationOptions:
    speculative: Annotated[SpeculativeName | None, COMMON] = None
    """Verify several guessed tokens in one step, which changes none. ngram: what followed the
    last tokens before; suffix: or in earlier outputs too; draft: what a smaller model samples;
    eagle: what an EAGLE-3 head does; mtp: what the model's own head for multi-token prediction
    does."""
    num_speculative_tokens: Annotated[int | None, POSITIVE] = None
    """Most guessed tokens of a sequence in a step (default 8), fewer as measured."""
    draft_model: str | None = None
    """draft: a model of the same vocabulary, named as --model is, or first-layers:N, the first N
    layers of the model itself. eagle: the head's folder."""
    draft_quantization: QuantizationName | None = None
    """draft, eagle, mtp: as --quantization, of the draft model or head."""
    prompt_lookup_min: Annotated[int | None, POSITIVE] = None
    """ngram: least tokens that must match (default 3)."""
    prompt_lookup_max: Annotated[int | None, POSITIVE] = None
    """ngram: most tokens that are compared (default 5)."""

    @property
    def max_drafts(self) -> int:
        """Most drafts of a sequence in a step; 0 without speculation."""
        return (self.num_speculative_tokens or _NUM_TOKENS) if self.speculative else 0

    def check(self) -> None:
        """Raises ConfigurationError: an option without effect, or what this engine lacks."""
        given = [
            field.name.replace("_", "-")
            for field in dataclasses.fields(self)
            if field.name != "speculative" and getattr(self, field.name) is not None
        ]
        if self.speculative is None and given:
            raise ConfigurationError(
                f"--{given[0]} has no effect without --speculative; give both, or omit it"
            )
        drafts = [name for name in given if name.startswith("draft-")]
        if self.speculative == "mtp":
            drafts = [name for name in drafts if name == "draft-model"]  # it brings its own
        if self.speculative not in _MODELS and drafts:
            raise ConfigurationError(
                f"--{drafts[0]} has no effect with --speculative {self.speculative}; omit it, or "
                "use --speculative draft"
            )
        if self.speculative in _MODELS and self.draft_model is None:
            raise ConfigurationError(
                f"--speculative {self.speculative} needs {_MODELS[self.speculative]}; name one "
                "with --draft-model"
            )
        lookups = [name for name in given if name.startswith("prompt-lookup")]
        if self.speculative != "ngram" and lookups:
            raise ConfigurationError(
                f"--{lookups[0]} has no effect with --speculative {self.speculative}; omit it"
            )
        smallest, largest = self._lookup
        if not 1 <= smallest <= largest:
            raise ConfigurationError(
                f"--prompt-lookup-min is {smallest} and --prompt-lookup-max {largest}; the first "
                "must be at least 1, the second not below it"
            )

    @property
    def draft_option(self) -> str | None:
        """The option that says which model or head makes drafts in the runner; None: none does."""
        if self.speculative not in _IN_THE_RUNNER:
            return None
        return (
            "--draft-model" if self.speculative in _MODELS else f"--speculative {self.speculative}"
        )

    @property
    def _lookup(self) -> tuple[int, int]:
        smallest, largest = self.prompt_lookup_min, self.prompt_lookup_max
        if largest is None:
            largest = max(_LOOKUP_MAX, smallest or 0)
        return (min(_LOOKUP_MIN, largest) if smallest is None else smallest), largest

    def make_proposer(self) -> "Proposer | None":
        """None without speculation, and where the model runner makes the drafts. Imports the
        scheduler."""
        from engine_core.speculation.ngram import NgramProposer
        from engine_core.speculation.suffix import SuffixProposer

        if self.speculative is None or self.speculative in _IN_THE_RUNNER:
            return None
        if self.speculative == "suffix":
            return SuffixProposer()
        smallest, largest = self._lookup
        return NgramProposer(smallest=smallest, largest=largest)
