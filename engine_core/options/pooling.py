"""Options of embeddings, classes and scores, by vLLM's names."""

import dataclasses
import json
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from engine_core.errors import ConfigurationError
from engine_core.options.values import MODEL

_POOLER_NAMES = (
    "pooling_type",
    "seq_pooling_type",
    "tok_pooling_type",
    "use_activation",
    "step_tag_id",
    "returned_token_ids",
)
_OVERRIDES = (
    "architectures",
    "classifier_from_token",
    "id2label",
    "is_matryoshka",
    "is_original_qwen3_reranker",
    "matryoshka_dimensions",
    "method",
    "num_labels",
    "problem_type",
)


@Parameter(name="*", group=MODEL.group)
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PoolingOptions:
    runner: Annotated[Literal["auto", "generate", "pooling"], MODEL] = "auto"
    """generate: text; pooling: vectors, classes and scores; auto: as the model was made for."""
    convert: Annotated[Literal["auto", "none", "embed", "classify"], MODEL] = "auto"
    """What a model for text is served as too, or with --runner pooling instead."""
    pooler_config: Annotated[str | None, MODEL] = None
    """JSON such as '{"pooling_type": "MEAN", "use_activation": false}', before the model's own."""
    hf_overrides: Annotated[str | None, MODEL] = None
    """JSON of fields of config.json that say how hidden states are pooled, such as
    '{"is_matryoshka": true}'."""

    @property
    def pooler_fields(self) -> dict[str, Any]:
        """Raises ConfigurationError."""
        return _object("--pooler-config", self.pooler_config, _POOLER_NAMES)

    @property
    def overrides(self) -> dict[str, Any]:
        """Raises ConfigurationError."""
        return _object("--hf-overrides", self.hf_overrides, _OVERRIDES)


def _object(option: str, text: str | None, names: tuple[str, ...]) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigurationError(f"{option} is not JSON: {error}; quote it as a whole") from error
    if not isinstance(fields, dict):
        raise ConfigurationError(f"{option} is {text}, it must be an object of JSON")
    if unknown := sorted(fields.keys() - set(names)):
        raise ConfigurationError(
            f"{option}: {', '.join(unknown)} is not supported; there is {', '.join(names)}"
        )
    return fields
